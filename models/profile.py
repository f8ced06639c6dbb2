"""Where the time of forward passes goes: by kind of kernel, and waiting for other threads. Reads what a timed team left in the program.

Times are those of the caller's thread: between taking up an instruction and finding no chunk of it left, and from there until the next
one begins, when all threads have finished theirs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from localrun.kernels_cpu.team import BEGAN, CHUNKS, ENDED
from localrun.models.program import Program


@dataclass(frozen=True)
class Share:
    """What instructions of one kind took, in seconds, of all passes so far."""

    name: str
    """Of the instruction, and its kernel's parameters where they tell weights' types apart."""
    calls: int
    working_s: float
    waiting_s: float


class Profile:
    """Sums over the passes of a program whose team is timed."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._working = np.zeros(len(program.names), np.int64)
        self._waiting = np.zeros(len(program.names), np.int64)
        self._calls = np.zeros(len(program.names), np.int64)
        self.passes = 0
        self._ticks = 0
        self._seconds = 0.0
        self._first: tuple[int, float] | None = None

    def clear(self) -> None:
        """Forgets what has been summed."""
        for sums in (self._working, self._waiting, self._calls):
            sums[:] = 0
        self.passes = 0

    def add(self) -> None:
        """Takes the pass that has just ended."""
        began, ended = self._program.table[:, BEGAN], self._program.table[:, ENDED]
        self._working += ended - began
        self._waiting[:-1] += began[1:] - ended[:-1]
        self._calls += self._program.table[:, CHUNKS] > 0
        self.passes += 1
        # Two readings of both clocks, far apart, tell how long a tick is.
        now = int(ended[-1]), time.perf_counter()
        if self._first is None:
            self._first = now
        self._ticks, self._seconds = now[0] - self._first[0], now[1] - self._first[1]

    def shares(self) -> list[Share]:
        """Most time first. Needs two passes, some time apart, to know the counter's rate."""
        tick = self._seconds / self._ticks if self._ticks else 0.0
        kinds: dict[str, list[int]] = {}
        for i, (name, kernel) in enumerate(zip(self._program.names, self._program.kernels)):
            matrix = kernel.factory in ("matmul", "expert_matmul")
            kinds.setdefault(f"{name} {kernel.params[0]}" if matrix else name, []).append(i)
        found = [
            Share(kind, int(self._calls[at].sum()), float(self._working[at].sum()) * tick, float(self._waiting[at].sum()) * tick)
            for kind, at in kinds.items()
        ]
        return sorted(found, key=lambda share: share.working_s + share.waiting_s, reverse=True)
