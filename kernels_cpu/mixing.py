"""Operations of one token's row on another of its rows, value by value: products, and mixtures of a token with the one before it.

A chunk is one row. Rows are float32 with room up to a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import sigmoid
from localrun.kernels_cpu.simd import fma, load_f32x16, load_i64, store

f = numba.float32


def multiply(isa: Isa) -> Any:
    """Kernel: y = a * b.

    args: 0 a, 1 its row stride, 2 b, 3 its stride, 4 y, 5 its stride, 6 vectors of 16 values.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        a = load_i64(args) + t * load_i64(args + 8)
        b = load_i64(args + 16) + t * load_i64(args + 24)
        y = load_i64(args + 32) + t * load_i64(args + 40)
        for i in range(load_i64(args + 48)):
            store(y + i * 64, load_f32x16(a + i * 64) * load_f32x16(b + i * 64))

    return kernel


def lerp(isa: Isa) -> Any:
    """Kernel: y = x + (p - x) * (m + d), with one m a value, and one d a value of each row, if there is any.

    args: 0 x, 1 its row stride, 2 p, 3 its stride, 4 m, 5 d (0: none), 6 its stride, 7 y, 8 its stride, 9 vectors of 16 values.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        p = load_i64(args + 16) + t * load_i64(args + 24)
        m = load_i64(args + 32)
        d = load_i64(args + 40)
        y = load_i64(args + 56) + t * load_i64(args + 64)
        for i in range(load_i64(args + 72)):
            share = load_f32x16(m + i * 64)
            if d:
                share = share + load_f32x16(d + t * load_i64(args + 48) + i * 64)
            v = load_f32x16(x + i * 64)
            store(y + i * 64, fma(load_f32x16(p + i * 64) - v, share, v))

    return kernel


def lerp_by_gate(isa: Isa) -> Any:
    """Kernel: x += (p - x) * sigmoid(g).

    args: 0 x, 1 its row stride, 2 p, 3 its stride, 4 g, 5 its stride, 6 vectors of 16 values.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        p = load_i64(args + 16) + t * load_i64(args + 24)
        g = load_i64(args + 32) + t * load_i64(args + 40)
        for i in range(load_i64(args + 48)):
            v = load_f32x16(x + i * 64)
            store(x + i * 64, fma(load_f32x16(p + i * 64) - v, sigmoid(load_f32x16(g + i * 64)), v))

    return kernel
