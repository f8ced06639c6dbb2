"""Selective state spaces: the scan of Mamba (Gu and Dao 2023) and that of Mamba 2 (Dao and Gu 2024), token by token.

Both keep, for each channel, a vector of N numbers that decays and takes up the input: h = e**(dt A) h + dt B x, y = C h + D x. In the
first, A is a number for each channel and each of the N; in the second one for each head. Channels lie in lanes, so that no sum runs across
a vector, and a decoded token reads and writes the state once.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import silu, vexp
from localrun.kernels_cpu.simd import (
    fma,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32,
    store,
    tile_fma,
    tile_load,
    tile_mul,
    tile_splat_f32,
    tile_store_all,
    zeros_f32,
)
from localrun.kernels_cpu.slots import over_spans
from localrun.kernels_cpu.softplus import softplus
from localrun.kernels_cpu.state_sizes import SCAN_CHANNELS

f = numba.float32

WIDE = SCAN_CHANNELS // 16
"""Vectors of 16 channels of a part of `selective_scan`."""


def selective_scan(isa: Isa) -> Any:
    """Kernel: Mamba's scan, times silu(z); dt is softplus of what is given.

    args: 3 x, 4 its row stride, 5 dt, 6 its stride, 7 B, 8 its stride, 9 C, 10 its stride, 11 z, 12 its stride, 13 y, 14 its stride, 15 A
    float32 [vector][N][16], 16 D, 17 N, 18 vectors of 16 channels. State: [vector][N][16].
    """

    @numba.njit
    def one(args: int, state: int, v: int, first: int, rows: int) -> None:
        n_state = load_i64(args + 136)
        a = load_i64(args + 120) + v * n_state * 64
        d = load_f32x16(load_i64(args + 128) + v * 64)
        for t in range(first, first + rows):
            x = load_f32x16(load_i64(args + 24) + t * load_i64(args + 32) + v * 64)
            dt = softplus(load_f32x16(load_i64(args + 40) + t * load_i64(args + 48) + v * 64))
            b = load_i64(args + 56) + t * load_i64(args + 64)
            c = load_i64(args + 72) + t * load_i64(args + 80)
            taken = dt * x
            y = splat_f32(f(0.0))
            for n in range(n_state):
                h = load_f32x16(state + n * 64) * vexp(dt * load_f32x16(a + n * 64))
                h = fma(taken, splat_f32(load_f32(b + n * 4)), h)
                store(state + n * 64, h)
                y = fma(h, splat_f32(load_f32(c + n * 4)), y)
            z = load_f32x16(load_i64(args + 88) + t * load_i64(args + 96) + v * 64)
            store(load_i64(args + 104) + t * load_i64(args + 112) + v * 64, fma(d, x, y) * silu(z))

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        n_state = load_i64(args + 136)
        for v in range(part * WIDE, min((part + 1) * WIDE, load_i64(args + 144))):
            one(args, state + (v - part * WIDE) * n_state * 64, v, first, rows)

    return over_spans(run)


def head_scan(isa: Isa, vectors: int) -> Any:
    """Kernel: Mamba 2's scan, times silu(z); a part is 16 * `vectors` channels of a head.

    args: 3 x, 4 its row stride, 5 B, 6 C, 7 row stride of both, 8 dt (T, heads), 9 its stride, 10 bias of dt, 11 z, 12 its stride, 13 y, 14
    its stride, 15 A a head, 16 D a head, 17 N, 18 parts of a head, 19 heads of a group. State: [part][N][16 * vectors].
    """
    wide = 64 * vectors

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        n_state = load_i64(args + 136)
        h = part // load_i64(args + 144)
        group = h // load_i64(args + 152) * n_state * 4
        a, d = load_f32(load_i64(args + 120) + h * 4), splat_f32(load_f32(load_i64(args + 128) + h * 4))
        bias = load_f32(load_i64(args + 80) + h * 4)
        stride = load_i64(args + 56)
        for t in range(first, first + rows):
            x = tile_load(zeros_f32(vectors), load_i64(args + 24) + t * load_i64(args + 32) + part * wide, 64)
            b = load_i64(args + 40) + t * stride + group
            c = load_i64(args + 48) + t * stride + group
            dt = softplus(splat_f32(f(load_f32(load_i64(args + 64) + t * load_i64(args + 72) + h * 4) + bias)))
            decay = vexp(dt * splat_f32(a))
            taken = tile_mul(x, dt)
            y = zeros_f32(vectors)
            for n in range(n_state):
                kept = tile_load(y, state + n * wide, 64)
                kept = tile_fma(tile_mul(kept, decay), taken, tile_splat_f32(y, b + n * 4, 0))
                tile_store_all(kept, state + n * wide, 64)
                y = tile_fma(y, kept, tile_splat_f32(y, c + n * 4, 0))
            y = tile_fma(y, x, d)
            out = load_i64(args + 104) + t * load_i64(args + 112) + part * wide
            tile_store_all(y, out, 64)
            z = load_i64(args + 88) + t * load_i64(args + 96) + part * wide
            for v in range(vectors):
                store(out + v * 64, load_f32x16(out + v * 64) * silu(load_f32x16(z + v * 64)))

    return over_spans(run)
