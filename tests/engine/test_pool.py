"""The block pool's counts, by random acts against a plain model of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from localrun.engine.pool import BlockPool, PoolExhausted


class PoolMachine(RuleBasedStateMachine):
    """Holders are block tables of their own; the tree is a set."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.tables: list[list[int]] = []
        self.tree: set[int] = set()

    @rule()
    def allocate(self) -> None:
        if self.pool.n_free:
            self.tables.append([self.pool.allocate()])
        else:
            with pytest.raises(PoolExhausted):
                self.pool.allocate()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.tables))[0]
        self.pool.retain(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table[0])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def enter_tree(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.tables))[0]
        if block in self.tree:
            with pytest.raises(ValueError, match="already"):
                self.pool.enter_tree(block)
        else:
            self.pool.enter_tree(block)
            self.tree.add(block)

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def leave_tree(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.tree)))
        self.pool.leave_tree(block)
        self.tree.remove(block)

    @invariant()
    def consistent(self) -> None:
        self.pool.check(self.tables, self.tree)
        used = {table[0] for table in self.tables}
        assert self.pool.n_held == len(used)
        assert self.pool.n_cached == len(self.tree - used)
        assert self.pool.n_free == 6 - len(used | self.tree)


TestPool = PoolMachine.TestCase


@given(st.integers(1, 64), st.integers(0, 10_000))
def test_blocks_for(size: int, n: int) -> None:
    blocks = BlockPool(1, size).blocks_for(n)
    assert (blocks - 1) * size < n <= blocks * size or n == blocks == 0


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="already free"):
        pool.release(block)
    with pytest.raises(ValueError, match="free and cannot be shared"):
        pool.retain(block)
    block = pool.allocate()
    pool.enter_tree(block)
    pool.release(block)
    with pytest.raises(ValueError, match="only the tree"):
        pool.release(block)


@pytest.mark.parametrize(
    ("tables", "tree", "complaint"),
    [([[0]], [], "reference counts"), ([[0], [1]], [], "reference counts"), ([[0], [0]], [0], "tree marks"), ([[0, 0]], [], "twice")],
)
def test_check_notices(tables: list[list[int]], tree: list[int], complaint: str) -> None:
    """One block with two holders: every other story about it is refused."""
    pool = BlockPool(3, 4)
    block = pool.allocate()
    pool.retain(block)
    if complaint == "tree marks":
        pool.retain(block)
    assert block == 0
    with pytest.raises(AssertionError, match=complaint):
        pool.check(tables, tree)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(3, 4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="free list"):
        pool.check([], [])


def test_memory_held_against_memory_reserved() -> None:
    """Requests of 50, 120 and 20 tokens use 3.2% of what they hold with 2,000 reserved for each; in blocks of 16 they hold 14 blocks."""
    pool = BlockPool(1000, 16)
    lengths = (50, 120, 20)
    assert round(100 * sum(lengths) / (3 * 2000), 1) == 3.2
    assert [pool.blocks_for(n) for n in lengths] == [4, 8, 2]
    assert sum(pool.blocks_for(n) for n in lengths) * 16 == 224
