"""The thread team: runs a recorded program of kernels on several threads, one call a thread and pass.

A program is a table of INSTRUCTION bytes a row: the kernel's address, its arguments, into how many chunks its work is cut, and whether it
waits for everything before it. Each thread walks the whole table and takes chunks by compare-and-swap until there are none left; then it
goes on to the next row, or, where that row waits, until the chunks others hold are finished. Nobody waits for a thread that holds no
chunk: one that the system has put to sleep delays nothing but the chunk it was computing. Who waits asks memory for the beginning of what
it will take of the next matrix: that is what a pass of few rows spends its time on.

The chunk counter of a row carries the number of the pass in its upper half, so a thread that wakes up in a later pass than it fell asleep
in can take nothing and leaves. That holds only where the counters are seen to change before the counts do, and both before the pass is seen
to begin; not every processor shows one core's writes to another in their order, so a kernel publishes a pass, with what it takes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.library import KernelLibrary, brief
from localrun.kernels_cpu.spec import KernelSpec

INSTRUCTION = 128
"""Bytes: 0 kernel, 8 args, 16 chunks, 24 first row to wait for (-1: none), 32 how many chunks to take at once (-d: a d-th of those left),
40 pass << 32 | next chunk, 48 chunks done, 56 the matrix that its chunks read one behind the other (0: none), 64 and 72 when the caller's
thread began with it and had nothing left to take (timed programs only), 80 bytes of the matrix in a chunk. All that threads hand to each
other in a pass is one cache line; processors may bring its neighbour along, so nobody else has that.
"""
CHUNKS, DONE, MATRIX, BEGAN, ENDED, MATRIX_STEP = 16 // 8, 48 // 8, 56 // 8, 64 // 8, 72 // 8, 80 // 8
WORDS = INSTRUCTION // 8
ASK_AHEAD = 16 * INSTRUCTION
"""Bytes between the row whose counter is set and the one that is asked for: about as many lines as a core can wait for at a time."""
MATRIX_AHEAD = 8
"""Rows among which a thread that waits looks for the next matrix: from a layer's rotation to its output are four."""
MATRIX_BYTES = 128 << 10
"""Of it that a thread asks for: a small part of the second-level cache, and as much as most waits give time for."""
SPINS_BEFORE_YIELD = 4_000
SPINS_BETWEEN_PASSES = 8_000
"""About 0.2 ms: as long as the engine needs between two passes; then a worker sleeps."""
STOP_TIMEOUT_S = 10.0


def _waiting() -> tuple[Any, Any, Any]:
    """What a thread does that waits: compiled functions (finished, next_matrix, part)."""
    import numba

    from localrun.kernels_cpu.atomics import atomic_load, call_plain, pause
    from localrun.kernels_cpu.fetch import prefetch_far
    from localrun.kernels_cpu.simd import load_i64

    @numba.njit  # type: ignore[untyped-decorator]
    def finished(program: int, first: int, end: int, epoch: int, yield_address: int, ask: int, ask_end: int) -> int:
        """Waits until all chunks of rows first..end-1 are done, and asks for memory from `ask` to `ask_end` meanwhile. How far it came with
        that; -1: the pass is over, this thread comes too late.
        """
        for i in range(first, end):
            row = program + i * INSTRUCTION
            spins = 0
            while atomic_load(row + 48) < load_i64(row + 16):
                if (atomic_load(row + 40) >> 32) != epoch:
                    return -1
                if ask < ask_end:
                    prefetch_far(ask, 4)
                    ask += 256
                else:
                    pause()
                spins += 1
                if spins > SPINS_BEFORE_YIELD:
                    call_plain(yield_address)
        return ask

    @numba.njit  # type: ignore[untyped-decorator]
    def next_matrix(program: int, i: int, n: int) -> int:
        """The first row from i on that reads one, or one behind those that are looked at."""
        end = min(i + MATRIX_AHEAD, n)
        while i < end and load_i64(program + i * INSTRUCTION + 8 * MATRIX) == 0:
            i += 1
        return i

    @numba.njit  # type: ignore[untyped-decorator]
    def part(row: int, thread: int) -> Any:
        """From where to where a thread that waits now asks for that row's matrix. Who does not wait comes first and takes the first part.
        What is left is the second part or, by a guess that is good enough for many threads, a later one.
        """
        grain = load_i64(row + 32)
        matrix = load_i64(row + 8 * MATRIX)
        if grain >= 0 or matrix == 0:
            return 0, 0
        chunks = load_i64(row + 16)
        step = load_i64(row + 8 * MATRIX_STEP)
        start = matrix + chunks * max(thread, 1) // -grain * step
        return start, min(start + MATRIX_BYTES, matrix + chunks * step)

    return finished, next_matrix, part


def replay(isa: Any, timed: int = 0) -> Any:
    """Kernel-shaped entry: args = state words (see Team), head = step header, chunk = pass number, thread. timed: rows get times."""
    import numba

    from localrun.kernels_cpu.atomics import atomic_add, atomic_load, call_kernel, compare_and_swap
    from localrun.kernels_cpu.clock import ticks
    from localrun.kernels_cpu.fetch import prefetch
    from localrun.kernels_cpu.simd import load_i64, store_scalar

    finished, next_matrix, part = _waiting()

    @numba.njit  # type: ignore[untyped-decorator]
    def run(program: int, n: int, epoch: int, yield_address: int, head: int, thread: int) -> None:
        waited = 0
        asked = -1
        ask = 0
        ask_end = 0
        for i in range(n):
            row = program + i * INSTRUCTION
            wait_from = load_i64(row + 24)
            if wait_from >= 0:
                if asked < i:
                    asked = next_matrix(program, i, n)
                    ask, ask_end = part(program + asked * INSTRUCTION, thread) if asked < n else (0, 0)
                ask = finished(program, wait_from, i, epoch, yield_address, ask, ask_end)
                if ask < 0:
                    return
                waited = i
            if timed and thread == 0:
                store_scalar(row + 8 * BEGAN, ticks())
            # Arguments of a whole program fill a first-level cache, and weights have gone through it since the last pass.
            if i + 2 < n:
                prefetch(row + 2 * INSTRUCTION, 1)
                prefetch(load_i64(row + INSTRUCTION + 8), 3)
            # Read before others write into the same line.
            kernel = load_i64(row)
            args = load_i64(row + 8)
            while True:
                held = atomic_load(row + 40)
                if (held >> 32) != epoch:
                    return
                chunk = held & 0xFFFFFFFF
                left = load_i64(row + 16) - chunk
                if left <= 0:
                    break
                grain = load_i64(row + 32)
                taken = min(left, grain) if grain > 0 else max(1, left // -grain)
                if compare_and_swap(row + 40, held, held + taken):
                    for c in range(chunk, chunk + taken):
                        call_kernel(kernel, args, head, c, thread)
                    atomic_add(row + 48, taken)
            if timed and thread == 0:
                store_scalar(row + 8 * ENDED, ticks())
        # The caller reads what was computed as soon as this returns, so chunks that others still hold are waited for here too.
        finished(program, waited, n, epoch, yield_address, 0, 0)

    def kernel(args: int, head: int, epoch: int, thread: int) -> None:
        yield_address = load_i64(args + 24)
        run(load_i64(args + 8), load_i64(args + 16), epoch, yield_address, head, thread)

    return kernel


def follow(isa: Any) -> Any:
    """A worker's loop: runs pass after pass as they are published, returns when none that it is a member of has come for a while.
    chunk = the last pass it saw.
    """
    from localrun.kernels_cpu.atomics import atomic_load, call_kernel, pause
    from localrun.kernels_cpu.simd import load_i64, store_scalar

    def kernel(args: int, head: int, last: int, thread: int) -> None:
        spins = 0
        while spins < SPINS_BETWEEN_PASSES:
            epoch = atomic_load(args)
            if epoch != last:
                last = epoch
                if thread < load_i64(args + 40):
                    call_kernel(load_i64(args + 32), args, head, epoch, thread)
                    spins = 0
                store_scalar(args + 64 + thread * 64, last)
            pause()
            spins += 1

    return kernel


def publish(isa: Any) -> Any:
    """The next pass, for whoever follows: args = state words, head = program, chunk = its rows, thread = the pass's number.

    The lines of the rows lie in other cores' caches: they are asked for some way ahead, or each would be waited for.
    """
    from localrun.kernels_cpu.atomics import atomic_add, fence
    from localrun.kernels_cpu.fetch import prefetch_to_write
    from localrun.kernels_cpu.simd import load_i64, store_scalar

    def kernel(args: int, program: int, n: int, epoch: int) -> None:
        for row in range(program, program + n * INSTRUCTION, INSTRUCTION):
            prefetch_to_write(row + ASK_AHEAD, 1)
            store_scalar(row + 40, epoch << 32)
        # From here on a thread still in an earlier pass can take nothing, whatever the counts become.
        fence()
        chunks = load_i64(args + 48)
        for i in range(n):
            row = program + i * INSTRUCTION
            store_scalar(row + 48, 0)
            store_scalar(row + 16, load_i64(chunks + i * 8))
            store_scalar(row + 32, load_i64(chunks + (n + i) * 8))
        store_scalar(args + 8, program)
        store_scalar(args + 16, n)
        atomic_add(args, 1)

    return kernel


def specs() -> list[KernelSpec]:
    """The kernels a team itself needs."""
    return [KernelSpec("team", name) for name in ("replay", "follow", "publish")]


def table_of(rows: int) -> NDArray[np.int64]:
    """An empty program: int64 (rows, WORDS), zeros."""
    whole = np.zeros((rows + 1) * WORDS, np.int64)
    start = -whole.ctypes.data % INSTRUCTION // 8
    return whole[start : start + rows * WORDS].reshape(rows, WORDS)


def _yield_function() -> int:
    """Address of the C function that gives the rest of a time slice away."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Known(NamedTuple):
    """A program that a team has run, with the addresses, which NumPy takes as long to tell as ten other calls."""

    program: NDArray[np.int64]
    address: int
    sizes: NDArray[np.int64]
    """(2, rows): chunks and grains of the pass to come."""
    sizes_address: int


class Team:
    """`n_threads` threads, the caller's one among them, that run programs together.

    Only one thread may call `run` at a time. `close` ends the workers; a team that is dropped without it leaves daemon threads asleep.
    """

    def __init__(self, library: KernelLibrary, n_threads: int, header: NDArray[np.int64], *, timed: bool = False) -> None:
        replaying = KernelSpec("team", "replay", (1,) if timed else ())
        addresses = library.load([*specs(), replaying])
        entry = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
        replay_address = addresses[replaying]
        self._replay = entry(replay_address)
        self._follow = entry(addresses[KernelSpec("team", "follow")])
        self._publish = brief(addresses[KernelSpec("team", "publish")])
        self.n_threads = n_threads
        self._header = header
        # A worker that comes late still looks at the program it was called for, through code of the library: both live as long as it.
        self._library = library
        self._programs: dict[int, _Known] = {}
        """By id."""
        self._epoch = 0
        # words: 0 pass, 1 program, 2 rows, 3 yield, 4 replay, 5 members of the pass, 6 its chunks and grains (for `publish` alone); then, a
        # cache line each, the last pass of each thread
        self._state = np.zeros(8 * (n_threads + 2), np.int64)
        self._state[3] = _yield_function()
        self._state[4] = replay_address
        self._addresses = self._state.ctypes.data, header.ctypes.data
        self._asleep = [True] * n_threads
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._closed = False
        self._workers = [threading.Thread(target=self._work, args=(i,), daemon=True, name=f"kernel-{i}") for i in range(1, n_threads)]
        for worker in self._workers:
            worker.start()

    def run(
        self, program: NDArray[np.int64], chunks: NDArray[np.int64] | int, grains: NDArray[np.int64] | int = 1, members: int = 0
    ) -> None:
        """Runs `program` (from table_of), row i in chunks[i] chunks, grains[i] of which a thread takes at once: small ones would cost more
        to take than to do. A grain of -d: a d-th of what is left, so that threads go long ways through memory and still end together.
        A number alone is for all rows. members: how many threads take part, 0: all. Returns when all are done.
        """
        members = members or self.n_threads
        known = self._programs.get(id(program)) or self._remember(program)
        known.sizes[0] = chunks
        known.sizes[1] = grains
        self._epoch += 1
        # A worker may see this before the pass that it is for, and joins or leaves the one before, which is over.
        self._state[5] = members
        self._state[6] = known.sizes_address
        self._publish(self._addresses[0], known.address, len(program), self._epoch)
        for i in range(1, members):
            if self._asleep[i]:
                self._asleep[i] = False
                self._wake[i].release()
        self._replay(*self._addresses, self._epoch, 0)

    def _remember(self, program: NDArray[np.int64]) -> _Known:
        sizes = np.zeros((2, len(program)), np.int64)
        known = self._programs[id(program)] = _Known(program, program.ctypes.data, sizes, sizes.ctypes.data)
        return known

    def _work(self, thread: int) -> None:
        """A worker: sleeps on its semaphore, wakes for a pass, follows as long as passes come quickly."""
        last = 0
        while True:
            self._wake[thread].acquire()
            if self._closed:
                return
            while True:
                self._follow(*self._addresses, last, thread)
                last = int(self._state[8 + 8 * thread])
                self._asleep[thread] = True
                # A pass published between the last look and the line above has not seen the flag; take it now.
                if int(self._state[0]) == last or self._closed:
                    break
                self._asleep[thread] = False

    def close(self) -> None:
        """Ends the workers. Idempotent."""
        self._closed = True
        for semaphore in self._wake:
            semaphore.release()
        for worker in self._workers:
            worker.join(STOP_TIMEOUT_S)
