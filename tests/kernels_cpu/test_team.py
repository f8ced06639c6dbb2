"""The thread team: every chunk is run exactly once, nothing is read before it is written, and `run` returns when all is done."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest

from localrun.kernels_cpu import isa
from localrun.kernels_cpu.compile import inspect_asm
from localrun.kernels_cpu.inspect import instructions
from localrun.kernels_cpu.library import KernelLibrary
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.team import DONE, MATRIX, MATRIX_STEP, Team, table_of

COPY = KernelSpec("elementwise", "norm")
"""Kind 'none' with reader 'f': copies row t of x to row t of the reader."""
READ = KernelSpec("measure", "read")
"""Leaves a sum with the thread that ran the chunk."""
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary(isa.select(), Path(os.environ["LOCALRUN_CACHE"]))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("matrices", [False, True])
def test_rows_follow_each_other_and_the_last_is_waited_for(library: KernelLibrary, threads: int, matrices: bool) -> None:
    """matrices: every second row says that it reads one, which lies nowhere: whoever waits asks for it, and nothing comes of that."""
    # One chunk more than can be shared out evenly: whoever does not get it is done long before it is.
    width, rows, depth = 1 << 16, 2 * threads + 1, 4
    header = np.zeros(20, np.int64)
    header[0] = rows
    buffers = np.zeros((depth + 1, rows, width), np.float32)
    program = table_of(depth)
    args = np.zeros((depth, 24), np.int64)
    address = library.address(COPY)
    for i in range(depth):
        args[i, :3] = [buffers[i].ctypes.data, width * 4, width]
        args[i, 13:15] = [buffers[i + 1].ctypes.data, width * 4]
        program[i, :4] = [address, args[i].ctypes.data, 0, max(i - 1, 0)]
        if matrices and i % 2:
            program[i, MATRIX], program[i, MATRIX_STEP] = 1 << 40, 1 << 16
    team = Team(library, threads, header)
    try:
        for seed in range(100):
            buffers[0] = np.random.default_rng(seed).standard_normal((rows, 1)).astype(np.float32)
            team.run(program, np.full(depth, rows), np.full(depth, -threads if matrices else 1))
            # Looked at at once, last row first: it is the one that a missing wait leaves unfinished.
            assert np.array_equal(buffers[depth][::-1], buffers[0][::-1]), seed
            assert (program[:, DONE] == rows).all()
    finally:
        team.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("grain", [1, 3, 100, -1, -2, -7])
def test_every_chunk_is_taken_once_however_many_at_a_time(library: KernelLibrary, threads: int, grain: int) -> None:
    rows, width = 37, 64
    header = np.zeros(20, np.int64)
    header[0] = rows
    x = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    y = np.zeros_like(x)
    args = np.zeros(24, np.int64)
    args[:3] = [x.ctypes.data, width * 4, width]
    args[13:15] = [y.ctypes.data, width * 4]
    program = table_of(1)
    program[0, :2] = [library.address(COPY), args.ctypes.data]
    team = Team(library, threads, header)
    try:
        for n in (0, 1, 2, rows):
            y[:] = 0
            team.run(program, np.array([n]), np.array([grain]))
            assert np.array_equal(y[:n], x[:n])
            assert not y[n:].any()
            assert program[0, DONE] == n
    finally:
        team.close()


def test_passes_with_fewer_members(library: KernelLibrary) -> None:
    """Whoever is no member does nothing, and takes part again in a later pass: as seen by the threads that wrote."""
    rows, large = 64, 1 << 20
    header = np.zeros(20, np.int64)
    memory = np.ones(rows * large, np.uint8)
    program = table_of(1)
    team = Team(library, 4, header)
    try:
        seen: set[int] = set()
        end = time.monotonic() + PATIENCE_S
        for turn in itertools.count():
            if turn >= 400 and seen == {0, 1, 2, 3}:
                break
            assert time.monotonic() < end, seen
            members = (1, 2, 4, 3, 0)[turn % 5]
            sums = np.zeros((4, 8), np.int64)
            # Small passes are done before a thread that sleeps has woken, on a busy machine all of them: large ones wait for it.
            args = np.array([memory.ctypes.data, 4096 if turn < 400 else large, sums.ctypes.data], np.int64)
            program[0, :2] = [library.address(READ), args.ctypes.data]
            team.run(program, np.array([rows]), members=members)
            assert program[0, DONE] == rows
            wrote = {int(i) for i in np.flatnonzero(sums.any(axis=1))}
            assert wrote <= set(range(members or 4)), (turn, members)
            seen |= wrote
    finally:
        team.close()


def test_fewer_chunks_than_threads_and_none_at_all(library: KernelLibrary) -> None:
    header = np.zeros(20, np.int64)
    header[0] = 1
    x = np.arange(64, dtype=np.float32).reshape(1, 64)
    y = np.zeros_like(x)
    args = np.zeros(24, np.int64)
    args[:3] = [x.ctypes.data, 256, 64]
    args[13:15] = [y.ctypes.data, 256]
    program = table_of(1)
    program[0, :2] = [library.address(COPY), args.ctypes.data]
    team = Team(library, 4, header)
    try:
        team.run(program, np.array([0]))
        assert not y.any()
        team.run(program, np.array([1]))
        assert np.array_equal(x, y)
    finally:
        team.close()
        team.close()
        team.close()


def test_processors_that_reorder_writes_are_told_not_to() -> None:
    """On ARM: the counters, a barrier, the counts, and last, by a store that releases, the pass."""
    code = inspect_asm(KernelSpec("team", "publish"), isa.build("neon"), "aarch64-linux-gnu")
    names = [name for name in instructions(code.splitlines()) if name.startswith(("st", "dmb"))]
    barriers = [i for i, name in enumerate(names) if name == "dmb"]
    assert set(names[: barriers[0]]) == {"str"}
    assert names[-1] == "stlxr"
    assert names.count("stlxr") == 1
