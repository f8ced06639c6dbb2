"""Decides whether layers of a model go on cards, and records the plan that way.

No card, or a model that cards cannot compute, is no error: the CPU runs, and `Placed.note` says why.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localrun.models.model import LoadOptions
from localrun.models.plan import Recorder
from localrun.models.rope import AngleTable
from localrun.models.weights import Weights

if TYPE_CHECKING:
    from localrun.kernels_gpu.device import Device
    from localrun.models.cards import Cards

log = logging.getLogger(__name__)

Recorded = tuple[Weights, Recorder, list[AngleTable]]
Record = Callable[[Sequence[int], bool], Recorded]
"""(places, probe) -> the plan recorded so; a probe's weights are not repacked."""


@dataclass
class Placed:
    weights: Weights
    recorder: Recorder
    tables: list[AngleTable]
    cards: Cards | None
    kv_blocks: int = 0
    """Blocks that the cards have room for; 0: none is on a card."""
    found: int = -1
    """Cards there are; -1: nobody looked."""
    note: str = ""
    """Why no layer is on a card, or fewer than were asked for."""


def _cards(cache: Path) -> tuple[list[Device], str]:
    """Those of this machine, or none and why. What speaks to cards is imported only where CuPy is installed."""
    if importlib.util.find_spec("cupy") is None:
        return [], "CuPy is not installed (pip install localrun[gpu])"
    from localrun.kernels_gpu import card

    return card.find(cache)


def place(record: Record, n_layers: int, n_ctx: int, options: LoadOptions, cache: Path) -> Placed:
    """The plan with layers on cards as options.gpu_layers asks for, as far as that is possible."""
    asked = options.gpu_layers
    if asked == 0:
        return Placed(*record((), False), None)
    if options.devices is not None:
        devices, note = list(options.devices), ""
    else:
        devices, note = _cards(cache)
    if devices:
        from localrun.models.offloading import on_cards

        placed = on_cards(record, n_layers, n_ctx, asked, devices)
        if isinstance(placed, Placed):
            return placed
        note = placed
    log.log(logging.INFO if asked < 0 else logging.WARNING, "all layers run on the CPU: %s", note)
    return Placed(*record((), False), None, found=len(devices), note=note)
