"""Gemma 3n's own operations: four streams of a token's row that predict and correct each other (AltUp, Baykal et al. 2023), sparse gates.

A chunk is one row. Streams are float32 rows with room up to a multiple of 16, of one width and stride.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.heads import _mean, _squares
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import relu, tanh
from localrun.kernels_cpu.simd import f32_from_bits, fma, lanes_below, load_f32, load_f32x16, load_i64, splat_f32, store, where

f = numba.float32
STREAMS = 4


def predict(isa: Isa) -> Any:
    """Kernel: out_j = in_j + sum over i of c[4 j + i] in_i.

    args: 0-3 in, 4-7 out, 8 row stride of all, 9 n, 10 c, 11 its row stride.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        offset = t * load_i64(args + 64)
        c = load_i64(args + 80) + t * load_i64(args + 88)
        for k in range((load_i64(args + 72) + 15) >> 4):
            for j in range(STREAMS):
                total = load_f32x16(load_i64(args + 8 * j) + offset + k * 64)
                for i in range(STREAMS):
                    v = load_f32x16(load_i64(args + 8 * i) + offset + k * 64)
                    total = fma(v, splat_f32(load_f32(c + 4 * (STREAMS * j + i))), total)
                store(load_i64(args + 32 + 8 * j) + offset + k * 64, total)

    return kernel


def correct(isa: Isa) -> Any:
    """Kernel: out_j = in_j + (1 + c[j]) (y - in_0).

    args: 0-3 in, 4-7 out, 8 row stride of all, 9 n, 10 c, 11 its row stride, 12 y (of the same stride).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        offset = t * load_i64(args + 64)
        c = load_i64(args + 80) + t * load_i64(args + 88)
        for k in range((load_i64(args + 72) + 15) >> 4):
            news = load_f32x16(load_i64(args + 96) + offset + k * 64) - load_f32x16(load_i64(args) + offset + k * 64)
            for j in range(STREAMS):
                v = load_f32x16(load_i64(args + 8 * j) + offset + k * 64)
                store(load_i64(args + 32 + 8 * j) + offset + k * 64, fma(news, splat_f32(f(f(1.0) + load_f32(c + 4 * j))), v))

    return kernel


def match_length(isa: Isa) -> Any:
    """Kernel: y *= |x| / |y|.

    args: 0 y, 1 its row stride, 2 x, 3 its row stride, 4 n.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        y = load_i64(args) + t * load_i64(args + 8)
        x = load_i64(args + 16) + t * load_i64(args + 24)
        n = load_i64(args + 32)
        zero = f(0.0)
        factor = splat_f32(f(f(np.sqrt(_squares(x, n, zero))) / f(np.sqrt(_squares(y, n, zero)))))
        for i in range((n + 15) >> 4):
            store(y + i * 64, load_f32x16(y + i * 64) * factor)

    return kernel


def sparse(isa: Isa) -> Any:
    """Kernel: x = max(0, x - (mean + m * standard deviation)): what a normal distribution would leave of its upper end.

    args: 0 x, 1 its row stride, 2 n, 3 m (float bits).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        n = load_i64(args + 16)
        mean = _mean(x, n)
        spread = f(np.sqrt(_squares(x, n, mean) / f(n - 1)))
        least = splat_f32(f(mean + spread * f32_from_bits(load_i64(args + 24))))
        for i in range((n + 15) >> 4):
            store(x + i * 64, where(lanes_below(n - i * 16), relu(load_f32x16(x + i * 64) - least), splat_f32(f(0.0))))

    return kernel


def squash(isa: Isa) -> Any:
    """Kernel: x = tanh x.

    args: 0 x, 1 its row stride, 2 n.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        for i in range((load_i64(args + 16) + 15) >> 4):
            store(x + i * 64, tanh(load_f32x16(x + i * 64)))

    return kernel
