"""Slots of recurrent state: which are free, which belong to a sequence, which are snapshots of a beginning that others may go on from.

A snapshot hangs on a node of the prefix tree, at a number of the node's tokens; it is valid for whoever begins with exactly the tokens up
to there, and goes when the node goes. When a slot is wanted and none is free, the snapshot used least recently is given up. Knows neither
tokens nor what lies in a slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol


class Holder(Protocol):
    """A node of the tree."""

    states: dict[int, int]
    """Slots by the number of the node's tokens after which they were taken."""


class StateSlots:
    """`n_slots` slots; `copy(source, target)` copies one (Model.copy_state)."""

    def __init__(self, n_slots: int, copy: Callable[[int, int], None]) -> None:
        self.n_slots = n_slots
        self.copy = copy
        self.n_evicted = 0
        self._free = list(range(n_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, tuple[Holder, int]] = OrderedDict()
        """The least recently used first."""

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_snapshots(self) -> int:
        return len(self._snapshots)

    def take(self, *, may_evict: bool = True) -> int | None:
        """A slot of unknown content, or None when all are in use."""
        if not self._free:
            if not (self._snapshots and may_evict):
                return None
            slot, (holder, offset) = self._snapshots.popitem(last=False)
            del holder.states[offset]
            self.n_evicted += 1
            return slot
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Back from a sequence, its content of no use."""
        self._free.append(slot)

    def attach(self, holder: Holder, offset: int, slot: int) -> None:
        """A sequence's slot becomes a snapshot. Where there is one already, the slot is given back: equal beginnings leave equal states."""
        known = holder.states.get(offset)
        if known is not None:
            self._snapshots.move_to_end(known)
            self.give(slot)
        else:
            holder.states[offset] = slot
            self._snapshots[slot] = holder, offset

    def use(self, slot: int, target: int) -> None:
        """Copies a snapshot into a sequence's slot."""
        self._snapshots.move_to_end(slot)
        self.copy(slot, target)

    def drop_all(self, holder: Holder) -> None:
        """The node goes, and its snapshots."""
        for slot in holder.states.values():
            del self._snapshots[slot]
            self.give(slot)
        holder.states = {}

    def move_all(self, source: Holder, target: Holder) -> None:
        """A node gives way to one that begins with all its tokens."""
        for offset, slot in source.states.items():
            target.states[offset] = slot
            self._snapshots[slot] = target, offset
        source.states = {}

    def check(self, held: Iterable[int], holders: Iterator[Holder]) -> None:
        """Raises AssertionError unless every slot is free, one sequence's, or a snapshot that its node knows of."""
        mine = list(held)
        if sorted([*self._free, *mine, *self._snapshots]) != list(range(self.n_slots)):
            raise AssertionError(f"slots: free {self._free}, held {mine}, snapshots {list(self._snapshots)} of {self.n_slots}")
        there = {slot: (id(holder), offset) for holder in holders for offset, slot in holder.states.items()}
        if there != {slot: (id(holder), offset) for slot, (holder, offset) in self._snapshots.items()}:
            raise AssertionError("the nodes' snapshots differ from the slots'")
