"""The prefix tree against the plain truth: the longest common prefix with anything that was put in and not evicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.pool import BlockPool
from localrun.engine.prefix import PrefixTree

SIZE = 4
texts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def put(pool: BlockPool, tree: PrefixTree, tokens: list[int], *, tail: bool = True) -> list[int]:
    """As a sequence does that has computed all of `tokens` itself; the blocks it ended with."""
    table = [pool.allocate() for _ in range(pool.blocks_for(len(tokens)))]
    tree.insert(None, tokens, table, 0, len(tokens), tail=tail)
    for block in table:
        pool.release(block)
    return table


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(texts, max_size=12), texts)
def test_longest_match(inserted: list[list[int]], wanted: list[int]) -> None:
    pool = BlockPool(200, SIZE)
    tree = PrefixTree(pool)
    for tokens in inserted:
        put(pool, tree, tokens)
        tree.check()
        pool.check([], tree.blocks())
    match = tree.match(wanted, len(wanted))
    assert match.n_tokens == max((common(t, wanted) for t in inserted), default=0)
    assert len(match.blocks) == pool.blocks_for(match.n_tokens)
    assert pool.n_cached == len(tree)


@given(st.lists(texts, max_size=12), texts, st.integers(0, 20))
def test_match_respects_its_limit(inserted: list[list[int]], wanted: list[int], limit: int) -> None:
    pool = BlockPool(200, SIZE)
    tree = PrefixTree(pool)
    for tokens in inserted:
        put(pool, tree, tokens)
    limit = min(limit, len(wanted))
    assert tree.match(wanted, limit).n_tokens == max((common(t, wanted[:limit]) for t in inserted), default=0)


@given(st.lists(texts, max_size=12), texts)
def test_without_tails_whole_blocks_only(inserted: list[list[int]], wanted: list[int]) -> None:
    pool = BlockPool(200, SIZE)
    tree = PrefixTree(pool)
    for tokens in inserted:
        put(pool, tree, tokens, tail=False)
    whole = [t[: len(t) - len(t) % SIZE] for t in inserted]
    assert tree.match(wanted, len(wanted)).n_tokens == max((common(t, wanted) for t in whole), default=0)


@given(st.lists(texts, min_size=1, max_size=12), st.integers(0, 40))
def test_eviction_frees_leaves_and_keeps_beginnings(inserted: list[list[int]], n: int) -> None:
    pool = BlockPool(200, SIZE)
    tree = PrefixTree(pool)
    for tokens in inserted:
        put(pool, tree, tokens)
    before = len(tree)
    evicted = sum(tree.evict() for _ in range(n))
    assert evicted == min(n, before)
    assert pool.n_free == 200 - len(tree)
    tree.check()
    pool.check([], tree.blocks())


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(10, SIZE)
    tree = PrefixTree(pool)
    a, b, c = [0] * 4, [1] * 4, [2] * 4
    for tokens in (a, b, c):
        put(pool, tree, tokens)
    tree.match(a, 4)
    assert tree.evict()
    assert [tree.match(t, 4).n_tokens for t in (b, c, a)] == [0, 4, 4]
    put(pool, tree, b)
    tree.match(c, 4)
    assert tree.evict()
    assert [tree.match(t, 4).n_tokens for t in (a, b, c)] == [0, 4, 4]


def test_a_shared_beginning_outlives_its_ends() -> None:
    pool = BlockPool(10, SIZE)
    tree = PrefixTree(pool)
    put(pool, tree, [0] * 4 + [1] * 4)
    put(pool, tree, [0] * 4 + [2] * 4)
    assert len(tree) == 3
    assert tree.evict()
    assert tree.evict()
    assert tree.match([0] * 4, 4).n_tokens == 4


def test_held_blocks_are_not_evicted() -> None:
    pool = BlockPool(10, SIZE)
    tree = PrefixTree(pool)
    put(pool, tree, [0] * 8)
    match = tree.match([0] * 5, 5)
    for block in match.blocks:
        pool.retain(block)
    assert not tree.evict()
    assert pool.n_held == 2
    for block in match.blocks:
        pool.release(block)
    assert tree.evict()


def test_equal_blocks_become_one() -> None:
    """Two sequences that computed the same: the second one's table is turned to the first one's blocks."""
    pool = BlockPool(10, SIZE)
    tree = PrefixTree(pool)
    tokens = list(range(10))
    tables = [[pool.allocate() for _ in range(3)] for _ in range(2)]
    for table in tables:
        tree.insert(None, tokens, table, 0, 10)
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    pool.check(tables, tree.blocks())
    assert pool.n_free == 10 - 4


def test_insert_goes_on_from_its_cursor() -> None:
    pool = BlockPool(10, SIZE)
    tree = PrefixTree(pool)
    tokens = list(range(12))
    table = [pool.allocate() for _ in range(3)]
    cursor = tree.insert(None, tokens, table, 0, 5)
    cursor = tree.insert(cursor, tokens, table, 4, 12)
    assert tree.match(tokens, 12).blocks == table
    assert cursor is not None
    assert cursor.block == table[2]


def test_a_longer_end_replaces_a_shorter_one() -> None:
    pool = BlockPool(10, SIZE)
    tree = PrefixTree(pool)
    put(pool, tree, [1, 2])
    put(pool, tree, [1, 2, 3])
    assert len(tree) == 1
    put(pool, tree, [1])
    assert len(tree) == 1
    assert tree.match([1, 2, 3, 4], 4).n_tokens == 3


def test_near_miss_says_where_and_how_much_was_lost() -> None:
    pool = BlockPool(20, SIZE)
    tree = PrefixTree(pool)
    put(pool, tree, list(range(14)))
    miss = tree.near_miss([0, 1, 2, 3, 4, 99, 6, 7, 8])
    assert miss is not None
    assert (miss.position, miss.cached, miss.beyond) == (5, (5, 6, 7), 9)
    border = tree.near_miss([0, 1, 2, 3, 99])
    assert border is not None
    assert (border.position, border.cached, border.beyond) == (4, (4, 5, 6, 7), 10)
    assert tree.near_miss(list(range(14))) is None
    assert tree.near_miss([*range(14), 99]) is None
    assert tree.near_miss([99]) is None
