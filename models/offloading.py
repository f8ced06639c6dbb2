"""Puts as many layers on cards as fit, and records the plan that way: what `placing.place` does where there are cards.

The plan is recorded once on the host to see what each layer takes and whether a card can carry it out; then for real. Where a card's memory
turns out to be too small all the same, fewer layers are tried, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from localrun.kernels_gpu.device import Device, DeviceError, DeviceMemoryError
from localrun.kernels_gpu.layout import CARD_TYPES
from localrun.models.cards import Cards
from localrun.models.launches import NotOnCard, steps_of
from localrun.models.model import BLOCK_TOKENS
from localrun.models.placing import Placed, Record
from localrun.models.program import Instruction
from localrun.models.split import fewer, split, usable
from localrun.models.weights import Stack, Weight

log = logging.getLogger(__name__)

RESERVED_TOKENS = 8192
"""Of KV cache that a split leaves room for, at most the model's context."""
FEWEST_TOKENS = 512
CONTEXTS = 8
"""Whole contexts of the model that its KV pool has room for at most: more would never fill."""


@dataclass(frozen=True)
class Demand:
    """Bytes on a card: of each layer's weights and of its part of a KV block, of what comes after the layers, of buffers."""

    layers: list[int]
    kv: list[int]
    after: int
    scratch: int

    def with_kv(self, blocks: int) -> list[int]:
        """Of each layer with so many KV blocks."""
        return [weights + kv * blocks for weights, kv in zip(self.layers, self.kv)]


class _Probe:
    """A launches.Target without memory: counts what would be sent."""

    def __init__(self) -> None:
        self.nbytes = 0

    def at(self, address: int) -> int:
        return address

    def planes(self, weight: Weight | Stack) -> list[int]:
        count = weight.n if isinstance(weight, Stack) else 1
        self.nbytes += CARD_TYPES[weight.type_name].nbytes(count * weight.rows * weight.columns)
        return []


def _carried(instructions: Sequence[Instruction]) -> int:
    """Bytes of weights of these instructions. Raises NotOnCard."""
    probe = _Probe()
    for instruction in instructions:
        steps_of(instruction, probe)
    return probe.nbytes


def demand(record: Record, n_layers: int) -> Demand:
    """What each layer would take on a card. Raises NotOnCard for a model that cards cannot compute."""
    _, recorder, _ = record((0,) * (n_layers + 1), True)
    if len(recorder.marks) != n_layers + 1:
        raise NotOnCard("layers of this kind")
    if recorder.has_scores:
        raise NotOnCard("classification heads")
    starts = [first for first, _ in recorder.marks]
    kv = [done for _, done in recorder.marks]
    ends = [*starts[1:], len(recorder.recorded)]
    parts = [_carried(recorder.recorded[first:end]) for first, end in zip(starts, ends)]
    per_layer = [after - before for before, after in zip(kv[1:-1], [*kv[2:]])]
    # The first mark is made before its layer is said to lie on a card, so it stands for the host.
    return Demand(parts[:-1], [kv[1] if n_layers else 0, *per_layer][:n_layers], parts[-1], recorder.memory.nbytes)


def on_cards(record: Record, n_layers: int, n_ctx: int, asked: int, devices: Sequence[Device]) -> Placed | str:
    """The plan with `asked` layers on cards (-1: as many as fit), or fewer; or why none is on a card."""
    try:
        needed = demand(record, n_layers)
    except NotOnCard as error:
        return f"no card kernel for {error}"
    note = ""
    blocks = -(-min(n_ctx, RESERVED_TOKENS) // BLOCK_TOKENS)
    free = [device.free_bytes() for device in devices]
    places = split(free, needed.with_kv(blocks), needed.after, needed.scratch, asked)
    wanted = len(places)
    while places:
        try:
            weights, recorder, tables = record(places, False)
            cards = Cards.of(devices, recorder, tables)
            n_blocks = _kv_pool(cards, devices, n_ctx)
        except DeviceMemoryError as error:
            for device in devices:
                device.release()
            log.warning("%d layers do not fit on the card (%s); trying %d", len(places), error, fewer(places))
            note = f"{wanted} layers did not fit"
            places = split(free, needed.with_kv(blocks), needed.after, needed.scratch, fewer(places))
            continue
        except DeviceError as error:
            note = str(error)
            break
        log.info("%d of %d layers on %s", min(len(places), n_layers), n_layers, ", ".join(sorted({d.name for d in devices})))
        return Placed(weights, recorder, tables, cards, n_blocks, len(devices), note)
    return note or "no layer fits in the card's free memory"


def _kv_pool(cards: Cards, devices: Sequence[Device], n_ctx: int) -> int:
    """Reserves the KV blocks that the cards have room for; their number. Raises DeviceMemoryError."""
    rooms = [usable(s.device.free_bytes(), 0) // s.kv_block_bytes for s in cards.segments if s.kv_block_bytes]
    if not rooms:
        return 0
    n_blocks = min(*rooms, CONTEXTS * -(-max(n_ctx, 2048) // BLOCK_TOKENS))
    if n_blocks * BLOCK_TOKENS < FEWEST_TOKENS:
        raise DeviceMemoryError(f"{devices[0].name}: room for only {n_blocks * BLOCK_TOKENS} tokens of KV cache")
    cards.allocate_kv(n_blocks)
    return n_blocks
