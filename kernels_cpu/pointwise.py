"""Operations on one token's row, value by value: activation functions, sums, clamps, soft caps.

A chunk is one row. Rows are float32 with room up to a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu import math
from localrun.kernels_cpu.activations import give
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    keep_above,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    splat_f32,
    store,
    vmax,
    vmin,
)

f = numba.float32


def activated(isa: Isa, activation: str) -> Any:
    """Kernel: act(x), quantized for its readers; `activation` is a function of math.py.

    args: 0 x (overwritten), 1 its row stride, 2 n, 3.. readers (see give).
    """
    return activated_rows(activation, H.TOKENS)


def activated_rows(activation: str, count_at: int) -> Any:
    """The kernel `activated`, for the rows whose number lies at that offset in the head."""
    act = getattr(math, activation)

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        n = load_i64(args + 16)
        for i in range((n + 15) >> 4):
            store(x + i * 64, act(load_f32x16(x + i * 64)))
        give(x, n, args + 24, t, load_i64(head + count_at))

    return kernel


def xielu(isa: Isa) -> Any:
    """Kernel: xIELU (Huang and Schlag 2024), quantized for its readers: x > 0: p x^2 + b x; else n (e^min(x, eps) - 1 - x) + b x.

    args: 0 x (overwritten), 1 its row stride, 2 n, 3.. readers (see give), 11 p, 12 n, 13 b, 14 eps (float bits).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        n = load_i64(args + 16)
        p = f32_from_bits(load_i64(args + 88))
        m = f32_from_bits(load_i64(args + 96))
        b = f32_from_bits(load_i64(args + 104))
        eps = f32_from_bits(load_i64(args + 112))
        for i in range((n + 15) >> 4):
            v = load_f32x16(x + i * 64)
            low = vmin(v, splat_f32(f(0.0)))
            below = (math.vexp(vmin(low, splat_f32(eps))) - splat_f32(f(1.0)) - low) * splat_f32(m)
            store(x + i * 64, fma(v, splat_f32(b), keep_above(v, f(0.0), v * v * splat_f32(p)) + below))
        give(x, n, args + 24, t, load_i64(head + H.TOKENS))

    return kernel


def add(isa: Isa) -> Any:
    """Kernel: x += scale * y, or x += sigmoid(gate) * y with one gate a row.

    args: 0 y, 1 its row stride, 2 x, 3 its row stride, 4 n, 5 scale (float bits), 6 gate (0: none), 7 its row stride.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        y = load_i64(args) + t * load_i64(args + 8)
        x = load_i64(args + 16) + t * load_i64(args + 24)
        scale = splat_f32(f32_from_bits(load_i64(args + 40)))
        if load_i64(args + 48):
            scale = math.sigmoid(splat_f32(load_f32(load_i64(args + 48) + t * load_i64(args + 56))))
        for i in range((load_i64(args + 32) + 15) >> 4):
            store(x + i * 64, fma(load_f32x16(y + i * 64), scale, load_f32x16(x + i * 64)))

    return kernel


def clamp(isa: Isa) -> Any:
    """Kernel: every value of a row into -limit..limit.

    args: 0 x, 1 its row stride, 2 n, 3 limit (float bits).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        limit = splat_f32(f32_from_bits(load_i64(args + 24)))
        for i in range((load_i64(args + 16) + 15) >> 4):
            store(x + i * 64, vmax(vmin(load_f32x16(x + i * 64), limit), limit * f(-1.0)))

    return kernel


def scale_by_position(isa: Isa) -> Any:
    """Kernel: every value of a row times its position's factor.

    args: 0 x, 1 its row stride, 2 n, 3 offset in the head of the table of factors, float32 a position.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        position = numba.int64(load_i32(load_i64(head + H.POSITIONS) + 4 * t))
        factor = splat_f32(load_f32(load_i64(head + load_i64(args + 24)) + 4 * position))
        for i in range((load_i64(args + 16) + 15) >> 4):
            store(x + i * 64, load_f32x16(x + i * 64) * factor)

    return kernel


def soft_cap(isa: Isa) -> Any:
    """Kernel, for rows of logits: cap * tanh(x / cap).

    args: 0 address of the argument that holds the logits' address, 1 row stride, 2 n, 3 cap (float bits).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(load_i64(args)) + t * load_i64(args + 8)
        cap = splat_f32(f32_from_bits(load_i64(args + 24)))
        for i in range((load_i64(args + 16) + 15) >> 4):
            store(x + i * 64, math.tanh(load_f32x16(x + i * 64) / cap) * cap)

    return kernel


def scale(isa: Isa) -> Any:
    """Kernel: every value of a row times a factor, or times its own factor.

    args: 0 x, 1 its row stride, 2 n, 3 factor (float bits), 4 factors float32 (0: none).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        x = load_i64(args) + t * load_i64(args + 8)
        factor = splat_f32(f32_from_bits(load_i64(args + 24)))
        factors = load_i64(args + 32)
        for i in range((load_i64(args + 16) + 15) >> 4):
            v = load_f32x16(x + i * 64) * factor
            if factors:
                v = v * load_f32x16(factors + i * 64)
            store(x + i * 64, v)

    return kernel
