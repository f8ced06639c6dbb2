"""Reference counts of KV blocks. Knows block numbers only: neither tokens, nor sequences, nor what lies in a block.

A block is free (count 0, on the free list), held (count of its holders), or cached: held by the prefix tree alone, so it can be had by
evicting it. free + held + cached = total always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PoolExhausted(Exception):
    """No block is free. A matter between the pool, the tree and the scheduler: it never reaches a user."""


class BlockPool:
    """`n_blocks` blocks of `block_tokens` tokens each."""

    def __init__(self, n_blocks: int, block_tokens: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {n_blocks}")
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.n_cached = 0
        """Blocks that only the tree holds."""
        self._references = [0] * n_blocks
        self._in_tree = bytearray(n_blocks)
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_obtainable(self) -> int:
        """Free now, or after evicting everything that nobody uses."""
        return len(self._free) + self.n_cached

    @property
    def n_held(self) -> int:
        """Blocks that some sequence uses."""
        return self.n_blocks - self.n_obtainable

    def blocks_for(self, n_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-n_tokens // self.block_tokens)

    def references(self, block: int) -> int:
        return self._references[block]

    def in_tree(self, block: int) -> bool:
        return bool(self._in_tree[block])

    def allocate(self) -> int:
        """A free block, with one reference. Raises PoolExhausted."""
        if not self._free:
            raise PoolExhausted
        block = self._free.pop()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more holder of a block that has one."""
        count = self._references[block]
        if count < 1:
            raise ValueError(f"block {block} is free and cannot be shared")
        if count == 1 and self._in_tree[block]:
            self.n_cached -= 1
        self._references[block] = count + 1

    def release(self, block: int) -> None:
        """One holder less; the last one frees it."""
        count = self._references[block]
        if count < 1:
            raise ValueError(f"block {block} is already free")
        self._references[block] = count - 1
        if count == 1:
            if self._in_tree[block]:
                raise ValueError(f"block {block} is in the tree and only the tree may free it")
            self._free.append(block)
        elif count == 2 and self._in_tree[block]:
            self.n_cached += 1

    def enter_tree(self, block: int) -> None:
        """The tree becomes one more holder."""
        if self._in_tree[block]:
            raise ValueError(f"block {block} is in the tree already")
        self.retain(block)
        self._in_tree[block] = 1

    def leave_tree(self, block: int) -> None:
        """The tree lets go; a block nobody else holds is free."""
        if not self._in_tree[block]:
            raise ValueError(f"block {block} is not in the tree")
        if self._references[block] == 1:
            self.n_cached -= 1
        self._in_tree[block] = 0
        self.release(block)

    def check(self, tables: Iterable[Iterable[int]], tree_blocks: Iterable[int]) -> None:
        """Raises AssertionError unless the counts are exactly those of the given block tables and tree."""
        tree = list(tree_blocks)
        expected = Counter(tree)
        if expected and max(expected.values()) > 1:
            raise AssertionError("a block is in the tree twice")
        for table in tables:
            blocks = list(table)
            if len(set(blocks)) != len(blocks):
                raise AssertionError(f"a block table names a block twice: {blocks}")
            expected.update(blocks)
        actual = {block: count for block, count in enumerate(self._references) if count}
        if actual != dict(expected):
            both = {block: (actual.get(block, 0), expected.get(block, 0)) for block in actual.keys() | expected.keys()}
            wrong = {block: counts for block, counts in both.items() if counts[0] != counts[1]}
            raise AssertionError(f"reference counts differ from the tables (block: (count, holders)): {wrong}")
        if {b for b in range(self.n_blocks) if self._in_tree[b]} != set(tree):
            raise AssertionError("the pool's tree marks differ from the tree")
        if sorted(self._free) != [b for b in range(self.n_blocks) if not self._references[b]]:
            raise AssertionError("the free list differs from the blocks without holders")
        cached = sum(1 for b in tree if self._references[b] == 1)
        held = sum(1 for b, count in actual.items() if not (self._in_tree[b] and count == 1))
        if cached != self.n_cached or held + cached + self.n_free != self.n_blocks:
            raise AssertionError(f"free {self.n_free} + held {held} + cached {cached} (counted {self.n_cached}) is not {self.n_blocks}")
