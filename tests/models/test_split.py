"""Which layers go on which card."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrun.models.split import fewer, split, usable

GB = 1 << 30


def test_as_many_as_fit() -> None:
    layers = [GB] * 32
    assert split([100 * GB], layers, GB, GB) == (0,) * 33
    places = split([12 * GB], layers, GB, GB)
    assert 8 <= len(places) <= 11 and set(places) == {0}
    assert split([GB], layers, GB, GB) == ()
    assert split([], layers, GB, GB) == ()


def test_what_is_asked_for_is_tried() -> None:
    assert split([2 * GB], [GB] * 32, GB, 0, 20) == (0,) * 20
    assert split([100 * GB], [GB] * 32, GB, 0, 999) == (0,) * 33
    assert split([100 * GB], [GB] * 32, GB, 0, 0) == ()


def test_several_cards_share_by_their_memory() -> None:
    places = split([30 * GB, 10 * GB], [GB] * 28, GB, 0)
    assert len(places) == 29 and list(places) == sorted(places)
    assert 19 <= places.count(0) <= 24


@given(
    st.lists(st.integers(0, 64 * GB), min_size=1, max_size=4), st.lists(st.integers(1, 3 * GB), min_size=1, max_size=40),
    st.integers(0, GB), st.integers(0, GB),
)  # fmt: skip
def test_every_card_holds_what_it_is_given(free: list[int], layers: list[int], after: int, scratch: int) -> None:
    places = split(free, layers, after, scratch)
    sizes = [*layers, after]
    assert list(places) == sorted(places) and len(places) <= len(sizes)
    for card, each in enumerate(free):
        assert sum(size for size, place in zip(sizes, places) if place == card) <= usable(each, scratch) <= each
    if len(free) == 1 and len(places) < len(sizes):
        assert sum(sizes[: len(places) + 1]) > usable(free[0], scratch)


@given(st.integers(1, 200))
def test_fewer_ends(n: int) -> None:
    steps = 0
    while n:
        after = fewer((0,) * n)
        assert 0 <= after < n
        n, steps = after, steps + 1
    assert steps < 60
