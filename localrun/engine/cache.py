"""A sequence's K/V: its block table, what it takes from the prefix tree, what it leaves there. Joins pool and tree; decides nothing.

Invariants: a sequence's table holds exactly the blocks of its first `computed` tokens and of what the current step writes; a block with
more than one holder is never written (copy on write).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from localrun.engine.pool import BlockPool, PoolExhausted
from localrun.engine.prefix import PrefixTree
from localrun.engine.sequence import Sequence


class KVCache:
    """`copy_block(source, target)` copies a block's K/V (Model.copy_block)."""

    def __init__(self, n_blocks: int, block_tokens: int, copy_block: Callable[[int, int], None]) -> None:
        self.pool = BlockPool(n_blocks, block_tokens)
        self.tree = PrefixTree(self.pool)
        self.n_copied = 0
        self._copy_block = copy_block

    @property
    def n_tokens(self) -> int:
        """Tokens that fit in all."""
        return self.pool.n_blocks * self.pool.block_tokens

    def adopt(self, seq: Sequence) -> None:
        """Takes what the tree knows beyond the tokens the sequence has computed. The last token is always computed anew, for its logits."""
        if not seq.may_reuse or seq.pending <= 1 or seq.computed % self.pool.block_tokens:
            return
        match = self.tree.match(seq.tokens, len(seq.tokens) - 1, seq.kind)
        if match.n_tokens <= seq.computed:
            return
        for block in match.blocks:
            self.pool.retain(block)
        for block in seq.blocks:
            self.pool.release(block)
        seq.blocks = match.blocks
        if not seq.n_preempted:
            seq.n_cached += match.n_tokens - seq.computed
        seq.computed = match.n_tokens
        seq.tree_cursor, seq.in_tree = None, 0

    def missing(self, seq: Sequence, n_tokens: int) -> int:
        """How many blocks the sequence lacks to write tokens computed..computed+n_tokens-1, a copy of a shared one included."""
        lacking = self.pool.blocks_for(seq.computed + n_tokens) - len(seq.blocks)
        return max(0, lacking) + (1 if self._shared_end(seq) is not None else 0)

    def grow(self, seq: Sequence, n_tokens: int) -> bool:
        """Makes room to write the next n_tokens, evicting from the tree as needed. False, with nothing changed, when there is none."""
        if self.missing(seq, n_tokens) > self.pool.n_obtainable:
            self._take_over_end(seq)
            if self.missing(seq, n_tokens) > self.pool.n_obtainable:
                return False
        shared = self._shared_end(seq)
        if shared is not None:
            old = seq.blocks[shared]
            new = self._allocate()
            self._copy_block(old, new)
            self.n_copied += 1
            seq.blocks[shared] = new
            self.pool.release(old)
        while len(seq.blocks) < self.pool.blocks_for(seq.computed + n_tokens):
            seq.blocks.append(self._allocate())
        return True

    def publish(self, seq: Sequence) -> None:
        """Shows the tree every whole block that the sequence has computed, so that others may start from it now."""
        if not seq.may_reuse:
            return
        whole = seq.computed - seq.computed % self.pool.block_tokens
        if whole > seq.in_tree:
            seq.tree_cursor = self.tree.insert(seq.tree_cursor, seq.tokens, seq.blocks, seq.in_tree, whole, kind=seq.kind)
            seq.in_tree = whole

    def rewind(self, seq: Sequence, n_tokens: int) -> None:
        """The sequence goes on from its first n_tokens: what follows is computed anew."""
        keep = self.pool.blocks_for(n_tokens)
        for block in seq.blocks[keep:]:
            self.pool.release(block)
        del seq.blocks[keep:]
        seq.computed = n_tokens
        seq.tree_cursor, seq.in_tree = None, 0

    def drop(self, seq: Sequence) -> None:
        """Takes all blocks from a sequence; what it has computed stays in the tree for as long as nobody needs the room."""
        if seq.may_reuse and seq.blocks:
            self.tree.insert(seq.tree_cursor, seq.tokens, seq.blocks, seq.in_tree, seq.computed, tail=True, kind=seq.kind)
        for block in seq.blocks:
            self.pool.release(block)
        seq.blocks = []
        seq.computed = seq.in_tree = 0
        seq.tree_cursor = None

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError when a count, a table or the tree contradicts another."""
        live = list(sequences)
        self.pool.check([seq.blocks for seq in live], self.tree.blocks())
        self.tree.check()
        for seq in live:
            if len(seq.blocks) < self.pool.blocks_for(seq.computed):
                raise AssertionError(f"{len(seq.blocks)} blocks for {seq.computed} computed tokens")

    def _shared_end(self, seq: Sequence) -> int | None:
        """Index of the block the next token falls into, when others hold it too."""
        index = seq.computed // self.pool.block_tokens
        if index < len(seq.blocks) and self.pool.references(seq.blocks[index]) > 1:
            return index
        return None

    def _take_over_end(self, seq: Sequence) -> None:
        """In need, a last block shared with nobody but the tree is taken out of the tree, which saves the copy."""
        shared = self._shared_end(seq)
        if shared is not None and self.pool.references(seq.blocks[shared]) == 2 and self.pool.in_tree(seq.blocks[shared]):
            self.tree.forget(seq.blocks[shared])

    def _allocate(self) -> int:
        if not self.pool.n_free and not self.tree.evict():
            raise PoolExhausted
        return self.pool.allocate()
