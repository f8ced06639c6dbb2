"""Time mixing of RWKV 6 (Peng et al. 2024, "Eagle and Finch") and 7 (Peng et al. 2025, "Goose"), token by token.

A head keeps a matrix from keys to values. RWKV 6 fades it by a decay of the token's own for each key and adds k v; the present token counts
by u instead. RWKV 7 also takes out what it says for one direction and puts it back along another (a generalised delta rule). Values lie in
lanes, so that no sum runs across a vector, but for those over a head's keys that stand before its own update.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import sigmoid, silu, vexp
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    load_f32x16,
    load_i64,
    splat_f32,
    store,
    sum_f32,
    tile_fma,
    tile_load,
    tile_mul,
    tile_splat_f32,
    tile_store_all,
    zeros_f32,
)
from localrun.kernels_cpu.slots import over_spans

f = numba.float32


@numba.njit
def _normed(y: int, vectors: int, eps: Any, weight: int, bias: int) -> None:
    """Layer norm of one head's result, in place."""
    n = f(16 * vectors)
    total = splat_f32(f(0.0))
    for i in range(vectors):
        total = total + load_f32x16(y + i * 64)
    mean = splat_f32(f(sum_f32(total) / n))
    square = splat_f32(f(0.0))
    for i in range(vectors):
        v = load_f32x16(y + i * 64) - mean
        square = fma(v, v, square)
    scale = splat_f32(f(f(1.0) / f(np.sqrt(f(f(sum_f32(square) / n) + eps)))))
    for i in range(vectors):
        v = (load_f32x16(y + i * 64) - mean) * scale
        store(y + i * 64, fma(v, load_f32x16(weight + i * 64), load_f32x16(bias + i * 64)))


def wkv6(isa: Isa, vectors: int) -> Any:
    """Kernel: RWKV 6's mixing of one head of 16 * `vectors` values, its norm, times silu(g). The decay is e**-e**w.

    args: 3 r, 4 its row stride (also of k, v, w, g and y), 5 k, 6 v, 7 w (overwritten), 8 g, 9 y, 10 u, 11 weight of the norm, 12 its
    bias, 13 its eps (float bits). State: [head][key][16 * vectors].
    """
    wide = 64 * vectors

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        at = part * wide
        u = load_i64(args + 80) + at
        for t in range(first, first + rows):
            row = t * load_i64(args + 32) + at
            r, k, w = load_i64(args + 24) + row, load_i64(args + 40) + row, load_i64(args + 56) + row
            for i in range(vectors):
                store(w + i * 64, vexp(vexp(load_f32x16(w + i * 64)) * f(-1.0)))
            v = tile_load(zeros_f32(vectors), load_i64(args + 48) + row, 64)
            y = zeros_f32(vectors)
            for i in range(16 * vectors):
                kept = tile_load(v, state + i * wide, 64)
                added = tile_mul(v, tile_splat_f32(v, k + i * 4, 0))
                seen = tile_fma(kept, added, tile_splat_f32(v, u + i * 4, 0))
                y = tile_fma(y, seen, tile_splat_f32(v, r + i * 4, 0))
                tile_store_all(tile_fma(added, kept, tile_splat_f32(v, w + i * 4, 0)), state + i * wide, 64)
            out = load_i64(args + 72) + row
            tile_store_all(y, out, 64)
            _normed(out, vectors, f32_from_bits(load_i64(args + 104)), load_i64(args + 88) + at, load_i64(args + 96) + at)
            g = load_i64(args + 64) + row
            for i in range(vectors):
                store(out + i * 64, load_f32x16(out + i * 64) * silu(load_f32x16(g + i * 64)))

    return over_spans(run)


def wkv7(isa: Isa, vectors: int) -> Any:
    """Kernel: RWKV 7's mixing of one head of 16 * `vectors` values, its norm, the bonus of the present token, times g.

    With a = sigmoid(a): decay e**(-e**-0.5 sigmoid(w)), direction taken out kk = k k_k / |k k_k|, put back along kk a, key k (1 + (a - 1)
    k_a), bonus v sum(r k r_k).
    args: 3 r, 4 its row stride (also of the others), 5 k, 6 v, 7 w, 8 a (k, w and a are overwritten), 9 g, 10 kk (scratch), 11 y, 12 k_k,
    13 k_a, 14 r_k, 15 weight of the norm, 16 its bias, 17 its eps (float bits). State: [head][key][16 * vectors].
    """
    wide = 64 * vectors

    @numba.njit
    def prepare(args: int, row: int, at: int) -> Any:
        """What the update reads of the token, and the sum that its bonus is."""
        k, w, a, kk = load_i64(args + 40) + row, load_i64(args + 56) + row, load_i64(args + 64) + row, load_i64(args + 80) + row
        square = splat_f32(f(0.0))
        for i in range(vectors):
            v = load_f32x16(k + i * 64) * load_f32x16(load_i64(args + 96) + at + i * 64)
            store(kk + i * 64, v)
            square = fma(v, v, square)
        scale = splat_f32(f(f(1.0) / max(f(np.sqrt(sum_f32(square))), f(1e-12))))
        bonus = splat_f32(f(0.0))
        for i in range(vectors):
            rate = sigmoid(load_f32x16(a + i * 64))
            unit = load_f32x16(kk + i * 64) * scale
            store(kk + i * 64, unit * f(-1.0))
            store(a + i * 64, unit * rate)
            store(w + i * 64, vexp(sigmoid(load_f32x16(w + i * 64)) * f(-0.606530659712633)))
            share = load_f32x16(k + i * 64) * load_f32x16(load_i64(args + 104) + at + i * 64)
            key = load_f32x16(k + i * 64) + (rate * share - share)
            store(k + i * 64, key)
            asked = load_f32x16(load_i64(args + 24) + row + i * 64) * load_f32x16(load_i64(args + 112) + at + i * 64)
            bonus = fma(key, asked, bonus)
        return splat_f32(sum_f32(bonus))

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        at = part * wide
        for t in range(first, first + rows):
            row = t * load_i64(args + 32) + at
            bonus = prepare(args, row, at)
            r, k, w = load_i64(args + 24) + row, load_i64(args + 40) + row, load_i64(args + 56) + row
            back, out_of = load_i64(args + 64) + row, load_i64(args + 80) + row
            v = tile_load(zeros_f32(vectors), load_i64(args + 48) + row, 64)
            said = zeros_f32(vectors)
            for i in range(16 * vectors):
                said = tile_fma(said, tile_load(v, state + i * wide, 64), tile_splat_f32(v, out_of + i * 4, 0))
            y = zeros_f32(vectors)
            for i in range(16 * vectors):
                kept = tile_mul(tile_load(v, state + i * wide, 64), tile_splat_f32(v, w + i * 4, 0))
                kept = tile_fma(kept, v, tile_splat_f32(v, k + i * 4, 0))
                kept = tile_fma(kept, said, tile_splat_f32(v, back + i * 4, 0))
                tile_store_all(kept, state + i * wide, 64)
                y = tile_fma(y, kept, tile_splat_f32(v, r + i * 4, 0))
            out = load_i64(args + 88) + row
            tile_store_all(y, out, 64)
            _normed(out, vectors, f32_from_bits(load_i64(args + 136)), load_i64(args + 120) + at, load_i64(args + 128) + at)
            g, value = load_i64(args + 72) + row, load_i64(args + 48) + row
            for i in range(vectors):
                total = fma(load_f32x16(value + i * 64), bonus, load_f32x16(out + i * 64))
                store(out + i * 64, total * load_f32x16(g + i * 64))

    return over_spans(run)
