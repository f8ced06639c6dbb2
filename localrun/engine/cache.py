"""A sequence's K/V: its block table, what it takes from the prefix tree, what it leaves there. Joins pool and tree; decides nothing.

Invariants: a sequence's table holds exactly the blocks of its first `computed` tokens and of what the current step writes; a block with
more than one holder is never written (copy on write).

A model with recurrent state needs more to go on from a match: the state after its last token. Snapshots of it are taken where they pay: at
the last block boundary of a prompt (the same prompt again), at the end of an answer (the next turn), where prompts are seen to part (a
common beginning), in an answer that had to be taken back before, and, while slots are free, where a long prompt is cut into chunks. A
match is as long as the last of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from localrun.engine.pool import BlockPool, PoolExhausted
from localrun.engine.prefix import PrefixTree
from localrun.engine.sequence import Sequence
from localrun.engine.states import StateSlots


class KVCache:
    """`copy_block(source, target)` copies a block's K/V (Model.copy_block). `states`: of a model with recurrent state."""

    def __init__(
        self, n_blocks: int, block_tokens: int, copy_block: Callable[[int, int], None], states: StateSlots | None = None
    ) -> None:
        self.pool = BlockPool(n_blocks, block_tokens)
        self.states = states
        self.tree = PrefixTree(self.pool, states)
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
        limit = len(seq.tokens) - 1
        match = (self.tree.match if self.states is None else self.tree.match_state)(seq.keys, limit, seq.kind)
        seq.branch = match.n_known - match.n_known % self.pool.block_tokens
        if match.n_tokens <= seq.computed:
            return
        if self.states is not None:
            self.states.use(match.slot, seq.slot)
        for block in match.blocks:
            self.pool.retain(block)
        for block in seq.blocks:
            self.pool.release(block)
        seq.blocks = match.blocks
        if not seq.n_preempted and not seq.n_rewound:
            seq.n_cached += match.n_tokens - seq.computed
        seq.computed = match.n_tokens
        seq.tree_cursor, seq.in_tree = None, 0

    def hold(self, seq: Sequence) -> bool:
        """Gives the sequence a slot for its recurrent state, if the model has any. False when all are in use."""
        if self.states is None or seq.slot >= 0:
            return True
        slot = self.states.take()
        seq.slot = -1 if slot is None else slot
        return slot is not None

    def plan_snapshots(self, seq: Sequence, start: int, count: int) -> None:
        """Chooses where, in the tokens that this step computes, snapshots are taken, and finds slots for them."""
        if self.states is None or not seq.may_reuse:
            return
        size = self.pool.block_tokens
        end = start + count
        last = (len(seq.tokens) - 1) // size * size
        wanted = {position: True for position in (seq.branch, last) if start < position <= end}
        if end % size == 0 and (end < len(seq.tokens) or seq.n_rewound):
            wanted.setdefault(end, seq.n_rewound > 0)
        for position, may_evict in sorted(wanted.items()):
            slot = self.states.take(may_evict=may_evict)
            if slot is not None:
                seq.saves[position] = slot

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
        known = min(seq.computed, len(seq.tokens))  # an answer cut at a stop string has less than was computed
        whole = known - known % self.pool.block_tokens
        if whole > seq.in_tree:
            seq.tree_cursor = self.tree.insert(seq.tree_cursor, seq.keys, seq.blocks, seq.in_tree, whole, kind=seq.kind)
            seq.in_tree = whole
        self._attach_saves(seq)

    def _attach_saves(self, seq: Sequence) -> None:
        saves, seq.saves = seq.saves, {}
        for position, slot in saves.items():
            self._attach(seq, position, slot)

    def _attach(self, seq: Sequence, position: int, slot: int) -> None:
        """The state after so many of the sequence's tokens stays as a snapshot, if the tree knows these tokens."""
        assert self.states is not None
        known = 0 < position <= len(seq.tokens) and seq.may_reuse
        where = self.tree.locate(seq.keys, position, seq.kind) if known else None
        if where is None:
            self.states.give(slot)
        else:
            self.states.attach(*where, slot)

    def fork(self, seq: Sequence, copy: Sequence) -> bool:
        """`copy`, which says the same and has no blocks, shares all of the sequence's and gets a copy of its recurrent state. False, with
        nothing changed, where no slot is free for that.
        """
        if self.states is not None:
            if seq.slot < 0 or not self.hold(copy):
                return False
            self.states.copy(seq.slot, copy.slot)
        for block in seq.blocks:
            self.pool.retain(block)
        copy.blocks = list(seq.blocks)
        copy.computed, copy.in_tree, copy.tree_cursor = seq.computed, seq.in_tree, seq.tree_cursor
        return True

    def rewind(self, seq: Sequence, n_tokens: int) -> None:
        """The sequence goes on from its first n_tokens: what follows is computed anew. With recurrent state, which cannot be taken back,
        it is computed anew from the latest snapshot.
        """
        if self.states is not None:
            self.publish(seq)
            n_tokens = 0
            seq.n_rewound += 1
        keep = self.pool.blocks_for(n_tokens)
        for block in seq.blocks[keep:]:
            self.pool.release(block)
        del seq.blocks[keep:]
        seq.computed = n_tokens
        seq.tree_cursor, seq.in_tree = None, 0

    def drop(self, seq: Sequence) -> None:
        """Takes all blocks from a sequence; what it has computed stays in the tree for as long as nobody needs the room."""
        if seq.may_reuse and seq.blocks:
            known = min(seq.computed, len(seq.tokens))
            self.tree.insert(seq.tree_cursor, seq.keys, seq.blocks, seq.in_tree, known, tail=True, kind=seq.kind)
        if self.states is not None:
            self._attach_saves(seq)
            if seq.slot >= 0:
                self._attach(seq, seq.computed, seq.slot)
            seq.slot, seq.branch = -1, 0
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
        if self.states is not None:
            self.states.check([slot for seq in live for slot in (seq.slot, *seq.saves.values()) if slot >= 0], self.tree.nodes())
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
