"""Peaks of rows of logits, against their definition."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.kernels_cpu import isa
from localrun.kernels_cpu.spec import KernelSpec
from tests.kernels_cpu.running import GUARD, call, library

PARTS = 3
SIZE = 16


def found_by(instruction_set: str, row: NDArray[np.float32], k: int, changes: dict[int, float]) -> list[int] | None:
    """The k largest of a row some of whose values were changed after its peaks had been found; None: it says that one was not finite."""
    n = len(row)
    room = np.full(-(-n // 16) * 16, 1e30, np.float32)
    room[:n] = row
    peaks = np.full(-(-n // SIZE), GUARD)
    args = [room.ctypes.data, room.strides[0], n, peaks.ctypes.data, peaks.strides[0], 1, len(peaks)]
    call(instruction_set, KernelSpec("peaks", "peaks", (SIZE,)), args, 1)
    for i, value in changes.items():
        room[i] = value
    changed = np.array([*changes, *changes], np.int64)  # twice is as good as once
    ids, values = np.full(k + 1, -7, np.int64), np.full(k + 1, GUARD)
    words = np.array([room.ctypes.data, n, peaks.ctypes.data, changed.ctypes.data, len(changed), k, ids.ctypes.data, values.ctypes.data, 0])
    kernel = library(instruction_set).address(KernelSpec("peaks", "largest", (SIZE,)))
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel)(words.ctypes.data, 0, 0, 0)
    assert ids[k] == -7 and values[k] == GUARD
    return None if words[8] < 0 else ids[: words[8]].tolist()


@settings(deadline=None, max_examples=150)
@given(
    instruction_set=st.sampled_from(isa.available()), n=st.sampled_from([1, 15, 16, 17, 100, 1000]), k=st.integers(1, 40),
    levels=st.sampled_from([1, 3, 1000]), masked=st.sampled_from([0.0, 0.5, 0.99]), n_changed=st.integers(0, 20), bad=st.booleans(),
    seed=st.integers(0, 10_000),
)  # fmt: skip
def test_the_largest_of_a_row(
    instruction_set: str, n: int, k: int, levels: int, masked: float, n_changed: int, bad: bool, seed: int
) -> None:  # fmt: skip
    """By definition: sorted by value, then by number. levels: how many different values there are."""
    random = np.random.default_rng(seed)
    row = (random.integers(-levels, levels, n) / 8).astype(np.float32)
    changes: dict[int, float] = {int(i): float(random.integers(-levels, levels) / 8) for i in random.integers(0, n, n_changed)}
    changes |= {int(i): -np.inf for i in np.flatnonzero(random.random(n) < masked)}
    if bad:
        row[random.integers(n)] = random.choice([np.nan, np.inf])
    found = found_by(instruction_set, row, k, changes)
    if bad:
        assert found is None
        return
    for i, value in changes.items():
        row[i] = value
    assert found == [i for i in sorted(range(n), key=lambda i: (-row[i], i)) if row[i] > -np.inf][:k]


@pytest.mark.parametrize("instruction_set", isa.available())
@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("n", [1, 16, 127, 128, 129, 1000, 4096])
def test_largest_of_each_block(instruction_set: str, size: int, n: int) -> None:
    rows = np.full((3, -(-n // 16) * 16), 1e30, np.float32)  # what lies behind a row does not count
    rows[:, :n] = np.random.default_rng(n).normal(size=(3, n)) * 5
    rows[1, :n] = -np.abs(rows[1, :n])
    rows[2, n // 2], rows[2, n - 1] = np.nan, -np.inf
    blocks = -(-n // size)
    out = np.full((4, blocks), GUARD)
    args = [rows.ctypes.data, rows.strides[0], n, out.ctypes.data, out.strides[0], PARTS, -(-blocks // PARTS)]
    call(instruction_set, KernelSpec("peaks", "peaks", (size,)), args, 3 * PARTS)
    for row, found in zip(rows[:, :n], out, strict=False):
        for block, peak in enumerate(found):
            values = row[block * size : (block + 1) * size]
            assert peak == values.max() if np.isfinite(values).all() else np.isnan(peak)
    assert (out[3] == GUARD).all()
