"""Everything that works on one token's row: embedding, norms, activation functions, rotary positions, quantizing activations.

A chunk is one row. Rows are float32 with room up to a multiple of 16, the rest zero; quantizing them is in activations.py.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu import math
from localrun.kernels_cpu.activations import give
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.rows import row_reader
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    lanes_below,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    shuffle,
    splat_f32,
    store,
    store_scalar,
    sum_f32,
    vsqrt,
    where,
)

f = numba.float32


@numba.njit
def rms_scale(row: int, n: int, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps) of n floats, in all lanes."""
    total = splat_f32(f(0.0))
    for i in range((n + 15) >> 4):
        v = load_f32x16(row + i * 64)
        total = fma(v, v, total)
    mean = sum_f32(total) / f(n)
    return splat_f32(f(1.0)) / vsqrt(splat_f32(mean + eps))


@numba.njit
def layer_norm(row: int, n: int, eps: Any, weight: int, bias: int, out: int) -> None:
    """(x - mean) / sqrt(variance + eps) * weight + bias (an address of 0: none) (Ba et al. 2016)."""
    total = splat_f32(f(0.0))
    for i in range((n + 15) >> 4):
        total = total + load_f32x16(row + i * 64)
    mean = splat_f32(sum_f32(total) / f(n))
    square = splat_f32(f(0.0))
    for i in range((n + 15) >> 4):
        v = where(lanes_below(n - i * 16), load_f32x16(row + i * 64) - mean, splat_f32(f(0.0)))
        square = fma(v, v, square)
    scale = splat_f32(f(1.0)) / vsqrt(splat_f32(sum_f32(square) / f(n) + eps))
    for i in range((n + 15) >> 4):
        v = where(lanes_below(n - i * 16), (load_f32x16(row + i * 64) - mean) * scale, splat_f32(f(0.0)))
        if weight:
            v = v * load_f32x16(weight + i * 64)
        if bias:
            v = v + load_f32x16(bias + i * 64)
        store(out + i * 64, v)


def norm(isa: Isa) -> Any:
    """Kernel: a row's norm, quantized for its readers.

    args: 0 x, 1 its row stride, 2 n, 3 weight (0: all ones), 4 eps (float bits), 5 norm (0 none, 1 RMS, 2 layer), 6 bias, 7 scratch
    float32 rows, 8 their stride, 9.. readers (see give), 17 offset in the head of the row numbers (0: row t is row t).
    RMS norm: x * weight / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        chosen = load_i64(args + 136)
        at = t
        if chosen:
            at = numba.int64(load_i32(load_i64(head + chosen) + 4 * t))
        source = load_i64(args) + at * load_i64(args + 8)
        n = load_i64(args + 16)
        weight = load_i64(args + 24)
        eps = f32_from_bits(load_i64(args + 32))
        kind = load_i64(args + 40)
        row = load_i64(args + 56) + t * load_i64(args + 64)
        if kind == 2:
            layer_norm(source, n, eps, weight, load_i64(args + 48), row)
        elif kind == 1:
            scale = rms_scale(source, n, eps)
            for i in range((n + 15) >> 4):
                v = load_f32x16(source + i * 64) * scale
                if weight:
                    v = v * load_f32x16(weight + i * 64)
                if load_i64(args + 48):
                    v = v + load_f32x16(load_i64(args + 48) + i * 64)
                store(row + i * 64, v)
        else:
            row = source
        give(row, n, args + 72, t, load_i64(head + (H.OUTPUTS if chosen else H.TOKENS)))

    return kernel


def norm_add(isa: Isa) -> Any:
    """Kernel: x += RMS norm of y (Gemma's norm after a block).

    args: 0 y, 1 its row stride, 2 n, 3 weight, 4 eps (float bits), 5 x, 6 its row stride.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        y = load_i64(args) + t * load_i64(args + 8)
        n = load_i64(args + 16)
        weight = load_i64(args + 24)
        x = load_i64(args + 40) + t * load_i64(args + 48)
        scale = rms_scale(y, n, f32_from_bits(load_i64(args + 32)))
        for i in range((n + 15) >> 4):
            v = load_f32x16(y + i * 64) * scale * load_f32x16(weight + i * 64)
            store(x + i * 64, load_f32x16(x + i * 64) + v)

    return kernel


def gated(isa: Isa, activation: str) -> Any:
    """Kernel: act(gate) * up, quantized for its readers; `activation` is a function of math.py.

    args: 0 gate (overwritten), 1 up, 2 their row stride, 3 n, 4.. readers (see give).
    """
    act = getattr(math, activation)

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        stride = load_i64(args + 16)
        gate = load_i64(args) + t * stride
        up = load_i64(args + 8) + t * stride
        n = load_i64(args + 24)
        for i in range((n + 15) >> 4):
            store(gate + i * 64, act(load_f32x16(gate + i * 64)) * load_f32x16(up + i * 64))
        give(gate, n, args + 32, t, load_i64(head + H.TOKENS))

    return kernel


# ---- rotary positions and the KV cache ----------------------------------------------------------------------------------------


@numba.njit
def _rotate_halves(head: int, n_rot: int, table: int) -> None:
    """Pairs (i, i + n_rot/2): the NeoX form. table: n_rot/2 cosines, then as many sines."""
    half = n_rot >> 1
    i = 0
    while i + 16 <= half:
        a = load_f32x16(head + i * 4)
        b = load_f32x16(head + (half + i) * 4)
        c = load_f32x16(table + i * 4)
        s = load_f32x16(table + (half + i) * 4)
        store(head + i * 4, fma(a, c, b * s * f(-1.0)))
        store(head + (half + i) * 4, fma(b, c, a * s))
        i += 16
    while i < half:
        x = load_f32(head + i * 4)
        y = load_f32(head + (half + i) * 4)
        cos = load_f32(table + i * 4)
        sin = load_f32(table + (half + i) * 4)
        store_scalar(head + i * 4, fma(x, cos, -(y * sin)))
        store_scalar(head + (half + i) * 4, fma(y, cos, x * sin))
        i += 1


_EVEN = tuple(range(0, 32, 2))
_ODD = tuple(range(1, 32, 2))
_FIRST = tuple(v for i in range(8) for v in (i, 16 + i))
_SECOND = tuple(v for i in range(8, 16) for v in (i, 16 + i))


@numba.njit
def _rotate_pairs(head: int, n_rot: int, table: int) -> None:
    """Pairs (2 i, 2 i + 1): the form of RoFormer (Su et al. 2021)."""
    half = n_rot >> 1
    i = 0
    while i + 16 <= half:
        low = load_f32x16(head + i * 8)
        high = load_f32x16(head + i * 8 + 64)
        a = shuffle(low, high, _EVEN)
        b = shuffle(low, high, _ODD)
        c = load_f32x16(table + i * 4)
        s = load_f32x16(table + (half + i) * 4)
        x = fma(a, c, b * s * f(-1.0))
        y = fma(b, c, a * s)
        store(head + i * 8, shuffle(x, y, _FIRST))
        store(head + i * 8 + 64, shuffle(x, y, _SECOND))
        i += 16
    while i < half:
        p = load_f32(head + i * 8)
        q = load_f32(head + i * 8 + 4)
        cos = load_f32(table + i * 4)
        sin = load_f32(table + (half + i) * 4)
        store_scalar(head + i * 8, fma(p, cos, -(q * sin)))
        store_scalar(head + i * 8 + 4, fma(q, cos, p * sin))
        i += 1


@numba.njit
def _prepare(head: int, dim: int, weight: int, eps: Any, n_rot: int, table: int, halves: int) -> None:
    """One head: its own RMS norm if it has one, then the rotation. Heads lie side by side, so nothing beyond `dim` is touched."""
    if weight and dim & 15:
        total = f(0.0)
        for i in range(dim):
            total += load_f32(head + i * 4) * load_f32(head + i * 4)
        inverse = f(1.0) / numba.float32(np.sqrt(total / f(dim) + eps))
        for i in range(dim):
            store_scalar(head + i * 4, f(load_f32(head + i * 4) * inverse * load_f32(weight + i * 4)))
    elif weight:
        scale = rms_scale(head, dim, eps)
        for i in range(dim >> 4):
            store(head + i * 64, load_f32x16(head + i * 64) * scale * load_f32x16(weight + i * 64))
    if n_rot:
        if halves:
            _rotate_halves(head, n_rot, table)
        else:
            _rotate_pairs(head, n_rot, table)


def embed(isa: Isa, type_name: str) -> Any:
    """Kernel: the embedding row of each token, times a scale.

    args: 0 table as the file has it, 1 bytes of its row, 2 n, 3 scale (float bits), 4 out, 5 its row stride, 6 rows of position embeddings
    float32 to add (0: none).
    """
    read = row_reader(type_name)

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        token = numba.int64(load_i32(load_i64(head + H.TOKEN_IDS) + 4 * t))
        n = load_i64(args + 16)
        scale = f32_from_bits(load_i64(args + 24))
        out = load_i64(args + 32) + t * load_i64(args + 40)
        positions = load_i64(args + 48)
        read(load_i64(args) + token * load_i64(args + 8), n, out)
        if scale != f(1.0):
            for i in range(n):
                store_scalar(out + i * 4, f(load_f32(out + i * 4) * scale))
        if positions:
            position = numba.int64(load_i32(load_i64(head + H.POSITIONS) + 4 * t))
            for i in range(n):
                store_scalar(out + i * 4, f(load_f32(out + i * 4) + load_f32(positions + (position * n + i) * 4)))

    return kernel
