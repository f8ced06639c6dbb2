"""Which layers go on which card, from sizes alone. Light on purpose (no NumPy): whoever plans a load reads it."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_MARGIN = 256 << 20
MARGIN_SHARE = 20
"""Of free memory, a twentieth stays free: other programs draw on the card too, and a driver's own needs are not told."""


def usable(free: int, scratch: int) -> int:
    """Bytes for weights and KV blocks of a card with so much free memory."""
    return max(0, free - max(min(LEAST_MARGIN, free // 4), free // MARGIN_SHARE) - scratch)


def split(free: Sequence[int], layers: Sequence[int], after: int, scratch: int, asked: int = -1) -> tuple[int, ...]:
    """The number of the card for each of the first layers; one more than there are layers: what comes after them goes along.

    free: bytes of each card; layers: bytes of weights and KV of each layer; after: of what comes after them; scratch: of buffers, on each
    card; asked: -1 takes as many as fit, else so many (at most all), whether they seem to fit or not. The first cards get the first layers,
    in proportion to their memory.
    """
    if not free:
        return ()
    rooms = [usable(each, scratch) for each in free]
    sizes = [*layers, after]
    if asked >= 0:
        wanted = sizes[:asked]
        return _in_proportion(wanted, rooms)
    for n in range(len(sizes), 0, -1):
        if sum(sizes[:n]) > sum(rooms):
            continue
        for places in (_in_proportion(sizes[:n], rooms), _one_by_one(sizes[:n], rooms)):
            if places is not None and _fits(places, sizes, rooms):
                return places
    return ()


def fewer(places: Sequence[int]) -> int:
    """How many layers to try next when so many did not fit: a tenth less, at least one less."""
    return max(0, len(places) - max(1, len(places) // 10))


def _fits(places: Sequence[int], sizes: Sequence[int], rooms: Sequence[int]) -> bool:
    return all(sum(size for size, place in zip(sizes, places) if place == card) <= room for card, room in enumerate(rooms))


def _in_proportion(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """Each card's share of the bytes is its share of the room; a layer lies where its middle falls."""
    total, whole = sum(rooms), sum(sizes)
    if not total:
        return (0,) * len(sizes)
    borders = [sum(rooms[: card + 1]) / total * whole for card in range(len(rooms))]
    places, before = [], 0
    for size in sizes:
        middle = before + size / 2
        places.append(next((card for card, border in enumerate(borders) if middle <= border), len(rooms) - 1))
        before += size
    return tuple(places)


def _one_by_one(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    """Each card is filled before the next."""
    places, card, left = [], 0, list(rooms)
    for size in sizes:
        while card < len(left) and size > left[card]:
            card += 1
        if card == len(left):
            return None
        left[card] -= size
        places.append(card)
    return tuple(places)
