"""What works on the heads of one token's row, in place: norms of their own, rotation of a part of each.

A chunk is one row. Heads lie side by side, so nothing beyond a head's own values is written. A whole row is a row of one head.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.activations import give
from localrun.kernels_cpu.elementwise import _rotate_halves, _rotate_pairs
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    splat_f32,
    store,
    store_scalar,
    sum_f32,
)

f = numba.float32


@numba.njit
def _mean(head: int, n: int) -> Any:
    total = splat_f32(f(0.0))
    i = 0
    while i + 16 <= n:
        total = total + load_f32x16(head + i * 4)
        i += 16
    rest = f(0.0)
    while i < n:
        rest = f(rest + load_f32(head + i * 4))
        i += 1
    return f(f(sum_f32(total) + rest) / f(n))


@numba.njit
def _squares(head: int, n: int, mean: Any) -> Any:
    """Sum of (x - mean)^2."""
    total = splat_f32(f(0.0))
    i = 0
    while i + 16 <= n:
        v = load_f32x16(head + i * 4) - splat_f32(mean)
        total = fma(v, v, total)
        i += 16
    rest = f(0.0)
    while i < n:
        v = f(load_f32(head + i * 4) - mean)
        rest = fma(v, v, rest)
        i += 1
    return f(sum_f32(total) + rest)


@numba.njit
def _norm(head: int, n: int, kind: int, eps: Any, weight: int, bias: int) -> None:
    mean = f(0.0)
    if kind == 2:
        mean = _mean(head, n)
    squares = _squares(head, n, mean)
    if kind == 3:
        scale = f(f(1.0) / max(f(np.sqrt(squares)), eps))
    else:
        scale = f(f(1.0) / f(np.sqrt(f(squares / f(n)) + eps)))
    i = 0
    while i + 16 <= n:
        v = (load_f32x16(head + i * 4) - splat_f32(mean)) * splat_f32(scale)
        if weight:
            v = v * load_f32x16(weight + i * 4)
        if bias:
            v = v + load_f32x16(bias + i * 4)
        store(head + i * 4, v)
        i += 16
    while i < n:
        x = f(f(load_f32(head + i * 4) - mean) * scale)
        if weight:
            x = f(x * load_f32(weight + i * 4))
        if bias:
            x = f(x + load_f32(bias + i * 4))
        store_scalar(head + i * 4, x)
        i += 1


def norm_heads(isa: Isa) -> Any:
    """Kernel: the norm of each head of a row.

    args: 0 x, 1 its row stride, 2 heads, 3 values of a head, 4 weight (0: none), 5 bytes from one head's weight to the next's (0: one for
    all), 6 bias (0: none; spaced as the weight), 7 eps (float bits), 8 kind (1 RMS, 2 layer, 3 L2: x / max(sqrt(sum(x^2)), eps)).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        dim = load_i64(args + 24)
        step = load_i64(args + 40)
        eps = f32_from_bits(load_i64(args + 56))
        for h in range(load_i64(args + 16)):
            at = load_i64(args) + t * load_i64(args + 8) + h * dim * 4
            weight = load_i64(args + 32)
            bias = load_i64(args + 48)
            if weight:
                weight += h * step
            if bias:
                bias += h * step
            _norm(at, dim, load_i64(args + 64), eps, weight, bias)

    return kernel


def rotate(isa: Isa) -> Any:
    """Kernel: rotates a part of each head of a row by its position's angles.

    args: 0 first rotated value of the first head, 1 row stride, 2 heads, 3 bytes from head to head, 4 values to rotate, 5 offset in the
    head of the angle table, 6 whether pairs are halves apart.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        n_rot = load_i64(args + 32)
        position = numba.int64(load_i32(load_i64(head + H.POSITIONS) + 4 * t))
        table = load_i64(head + load_i64(args + 40)) + position * n_rot * 4
        for h in range(load_i64(args + 16)):
            at = load_i64(args) + t * load_i64(args + 8) + h * load_i64(args + 24)
            if load_i64(args + 48):
                _rotate_halves(at, n_rot, table)
            else:
                _rotate_pairs(at, n_rot, table)

    return kernel


def by_head(isa: Isa) -> Any:
    """Kernel, one head of a row a chunk: its first values, quantized for their readers.

    args: 0 x, 1 its row stride, 2 n, 3 heads, 4 bytes from head to head, 5.. readers (see give).
    """

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        n_heads = load_i64(args + 24)
        at = load_i64(args) + chunk // n_heads * load_i64(args + 8) + chunk % n_heads * load_i64(args + 32)
        give(at, load_i64(args + 16), args + 40, chunk, 1)

    return kernel


def copy_part(isa: Isa) -> Any:
    """Kernel, one row a chunk: a part of each head of a row to its place in the heads of another.

    args: 0 first value of the first head's part, 1 row stride, 2 bytes from head to head (0: the same part for all), 3 values, 4 heads, 5
    first value of the first head's place, 6 row stride, 7 bytes from head to head.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        for h in range(load_i64(args + 32)):
            source = load_i64(args) + t * load_i64(args + 8) + h * load_i64(args + 16)
            target = load_i64(args + 40) + t * load_i64(args + 48) + h * load_i64(args + 56)
            for i in range(load_i64(args + 24)):
                store_scalar(target + 4 * i, load_f32(source + 4 * i))

    return kernel
