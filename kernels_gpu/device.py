"""What the rest needs of a card: memory, copies, launches.

Three things are one: a real card (card.py), the host as a card (emulator.py), and the latter with as little memory as a test wants.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_gpu.source import Kernel


class DeviceError(Exception):
    """A card cannot be used, or fails while it is. One line."""


class DeviceMemoryError(DeviceError):
    """The card's memory is full."""


@dataclass(frozen=True)
class Launch:
    """A kernel over a grid of blocks, with the device addresses of its int64 arguments and of the step header."""

    kernel: Kernel
    grid: tuple[int, int, int]
    args: int
    head: int


class Device(Protocol):
    """One card. Everything is done in the order it is asked for; addresses are the card's own."""

    name: str

    def free_bytes(self) -> int:
        """Memory that can still be had."""

    def allocate(self, nbytes: int) -> int:
        """Address of zeroed memory, a multiple of 256. Raises DeviceMemoryError."""

    def release(self) -> None:
        """Gives back all that was allocated, and what was prepared for it."""

    def host_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory of the host that copies to and from the card go through without waiting."""

    def upload(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copies to the card. `data` may be changed afterwards only if it is no host_buffer, or after the next download."""

    def download(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copies from the card and waits until all that was asked for is done."""

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copies inside the card."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compiles and loads kernels, or takes them from the cache. Raises DeviceError."""

    def run(self, launches: Sequence[Launch], key: Hashable | None = None) -> None:
        """Launches one after the other. With a key, the same key always comes with the same launches: they may be recorded and replayed."""
