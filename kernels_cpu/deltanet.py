"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), token by token.

A head keeps a matrix S from keys to values. A token fades it, looks up what it now says for the token's key, and writes the difference to
the token's value there: S = g S; S = S + k (beta (v - k S)); y = q S / sqrt(dk). Values lie in lanes, so that no sum runs across a vector.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import sigmoid, vexp
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    load_f32,
    load_i64,
    splat_f32,
    tile_fma,
    tile_load,
    tile_mul,
    tile_splat_f32,
    tile_store_all,
    zeros_f32,
)
from localrun.kernels_cpu.slots import over_spans
from localrun.kernels_cpu.softplus import softplus

f = numba.float32


def gated_delta(isa: Isa, vectors: int) -> Any:
    """Kernel: a part is 16 * `vectors` values of a head. g = e**(A softplus(a + bias)), beta = sigmoid(b).

    args: 3 q, 4 k, 5 v, 6 row stride of all three, 7 b, 8 its stride, 9 a, 10 its stride, 11 from one group's b and a to the next's, in
    values, 12 bias of a, 13 A a head, 14 y, 15 its stride, 16 dk, 17 parts of a head, 18 heads of a group, 19 key heads, 20 whether the
    heads of a group lie side by side (else head h reads key head h mod key heads), 21 factor of q (float bits).
    State: [part][dk][16 * vectors].
    """
    wide = 64 * vectors

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        dk, of_group, stride = load_i64(args + 128), load_i64(args + 144), load_i64(args + 48)
        h = part // load_i64(args + 136)
        key = (h // of_group if load_i64(args + 160) else h % load_i64(args + 152)) * dk * 4
        at = (h // of_group * load_i64(args + 88) + h % of_group) * 4
        bias, a = load_f32(load_i64(args + 96) + h * 4), splat_f32(load_f32(load_i64(args + 104) + h * 4))
        scale = splat_f32(f32_from_bits(load_i64(args + 168)))
        for t in range(first, first + rows):
            q, k = load_i64(args + 24) + t * stride + key, load_i64(args + 32) + t * stride + key
            v = tile_load(zeros_f32(vectors), load_i64(args + 40) + t * stride + part * wide, 64)
            beta = sigmoid(splat_f32(load_f32(load_i64(args + 56) + t * load_i64(args + 64) + at)))
            step = softplus(splat_f32(f(load_f32(load_i64(args + 72) + t * load_i64(args + 80) + at) + bias)))
            decay = vexp(step * a)
            known = zeros_f32(vectors)
            for i in range(dk):
                known = tile_fma(known, tile_load(v, state + i * wide, 64), tile_splat_f32(v, k + i * 4, 0))
            missing = tile_mul(tile_fma(v, known, decay * f(-1.0)), beta)
            y = zeros_f32(vectors)
            for i in range(dk):
                kept = tile_mul(tile_load(v, state + i * wide, 64), decay)
                kept = tile_fma(kept, missing, tile_splat_f32(v, k + i * 4, 0))
                tile_store_all(kept, state + i * wide, 64)
                y = tile_fma(y, kept, tile_splat_f32(v, q + i * 4, 0))
            tile_store_all(tile_mul(y, scale), load_i64(args + 112) + t * load_i64(args + 120) + part * wide, 64)

    return over_spans(run)
