"""What this machine's memory and arithmetic can do at most: the yardsticks that speeds are held against. Knows no model.

Heavy: imports NumPy and LLVM.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from numpy.typing import NDArray

from localrun.kernels_cpu import head, isa, measure_sizes
from localrun.kernels_cpu.library import KernelLibrary
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.team import Team, table_of
from localrun.models.memory import HUGE_PAGE, anonymous

CHUNK = 1 << 20
"""Bytes of memory that a thread takes at a time."""
MEMORY = 1 << 30
"""Bytes that are read: more than most caches hold, and about what the weights of a small model take."""
SCRATCH = 4096
ROUNDS = 20_000
REPEATS = 7


@dataclass(frozen=True)
class Machine:
    """read_bytes_s: bytes a second read from memory, read only; multiply_adds_s: 8-bit multiply-adds a second; both with `n_threads`
    threads."""

    isa: str
    n_threads: int
    read_bytes_s: float
    multiply_adds_s: float


class Yardstick:
    """A thread team with the measuring kernels. A context manager."""

    def __init__(self, n_threads: int, instruction_set: str = "", cache_dir: str = "") -> None:
        """Raises ValueError for an instruction set that this machine does not execute, CompileError."""
        self.isa = isa.select(instruction_set)
        self.n_threads = n_threads
        self._read, self._multiply = KernelSpec("measure", "read"), KernelSpec("measure", "multiply")
        cache = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("localrun"))
        self._library = KernelLibrary(self.isa, cache)
        self._addresses = self._library.load([self._read, self._multiply])
        self._header = np.zeros(head.SIZE // 8, np.int64)
        self._team = Team(self._library, n_threads, self._header)

    def __enter__(self) -> Yardstick:
        return self

    def __exit__(self, *exc: object) -> None:
        self._team.close()

    def read_bytes_s(self, nbytes: int = MEMORY, repeats: int = REPEATS) -> float:
        """Median speed of reading `nbytes` bytes, each once, on huge pages where the system has them."""
        nbytes = max(CHUNK, nbytes // CHUNK * CHUNK)
        with contextlib.closing(anonymous(nbytes + HUGE_PAGE + 4096)) as memory:
            array = np.frombuffer(memory, np.uint8)
            array[:] = 1
            start = -(-array.ctypes.data // HUGE_PAGE) * HUGE_PAGE
            sums = np.zeros((self.n_threads, 8), np.int64)
            args = np.array([start, CHUNK, sums.ctypes.data], np.int64)
            try:
                seconds = self._median(lambda: self._run(self._read, args, nbytes // CHUNK), repeats)
            finally:
                del array
        return nbytes / seconds

    def multiply_adds_s(self, repeats: int = REPEATS) -> float:
        """Median speed of 8-bit multiply-adds, nothing read from memory."""
        scratch = np.zeros((self.n_threads, SCRATCH), np.uint8)
        args = np.array([ROUNDS, SCRATCH, scratch.ctypes.data], np.int64)
        chunks = 8 * self.n_threads
        seconds = self._median(lambda: self._run(self._multiply, args, chunks), repeats)
        return measure_sizes.multiply_adds(self.isa) * ROUNDS * chunks / seconds

    def measured(self) -> Machine:
        """Both."""
        return Machine(self.isa.name, self.n_threads, self.read_bytes_s(), self.multiply_adds_s())

    def _run(self, spec: KernelSpec, args: NDArray[np.int64], chunks: int) -> None:
        program = table_of(1)
        program[0, 0], program[0, 1] = self._addresses[spec], args.ctypes.data
        self._team.run(program, np.array([chunks], np.int64))

    @staticmethod
    def _median(work: Callable[[], None], repeats: int) -> float:
        work()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
