"""Peaks of rows of logits, against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from localrun.kernels_cpu import isa
from localrun.kernels_cpu.spec import KernelSpec
from tests.kernels_cpu.running import GUARD, call

PARTS = 3


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
