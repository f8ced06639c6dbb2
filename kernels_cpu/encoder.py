"""What encoders and ranking heads have of their own, row by row. A chunk is one row; rows are float32 with room up to a multiple of 16."""

from __future__ import annotations

from typing import Any

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.pointwise import activated_rows
from localrun.kernels_cpu.simd import load_f32x16, load_i64, store


def add_constant(isa: Isa) -> Any:
    """Kernel: x += a vector that is the same for all rows.

    args: 0 x, 1 its row stride, 2 n, 3 the vector float32.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        vector = load_i64(args + 24)
        for i in range((load_i64(args + 16) + 15) >> 4):
            store(x + i * 64, load_f32x16(x + i * 64) + load_f32x16(vector + i * 64))

    return kernel


def activated_outputs(isa: Isa, activation: str) -> Any:
    """Kernel, for the rows that are asked for: act(x), quantized for its readers; `activation` is a function of math.py.

    args as pointwise.activated's.
    """
    return activated_rows(activation, H.OUTPUTS)
