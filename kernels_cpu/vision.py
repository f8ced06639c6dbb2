"""What a vision transformer (Dosovitskiy et al. 2020) has that decoders have not: attention of all patches to all, pooling of neighbours.

Scores and sums of values are products of float matmuls' tiles, so what a patch gets does not depend on which others are taken with it. A
whole row of scores is kept: an image has thousands of patches, not more.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import vexp
from localrun.kernels_cpu.matmul import make_tile
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    lanes_below,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32,
    splat_f32,
    store,
    store_scalar,
    sum_f32,
    tile_store_all,
    vmax,
    where,
)
from localrun.kernels_cpu.vision_sizes import ROWS

MASKED = -1e30
f = numba.float32


def keys_values(isa: Isa) -> Any:
    """Kernel, a chunk is 16 patches: their keys and values as tiles read them, K [head][16 patches][dim][16], V [head][16 values][patch]
    [16]. What of K has no patch, and of V no value, stays as it is: zero.

    args: 0 k, 1 its row stride, 2 v, 3 its row stride, 4 heads, 5 dim, 6 patches, 7 K, 8 bytes of a head of K, 9 V, 10 bytes of a head
    of V.
    """

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        dim = load_i64(args + 40)
        n = load_i64(args + 48)
        first = chunk * 16
        for h in range(load_i64(args + 32)):
            keys = load_i64(args + 56) + h * load_i64(args + 64) + chunk * dim * 64
            values = load_i64(args + 72) + h * load_i64(args + 80)
            for t in range(first, min(first + 16, n)):
                k = load_i64(args) + t * load_i64(args + 8) + h * dim * 4
                v = load_i64(args + 16) + t * load_i64(args + 24) + h * dim * 4
                for d in range(dim):
                    store_scalar(keys + d * 64 + (t - first) * 4, load_f32(k + d * 4))
                    store_scalar(values + (d >> 4) * n * 64 + t * 64 + (d & 15) * 4, load_f32(v + d * 4))

    return kernel


def attend(isa: Isa) -> Any:
    """Kernel, a chunk is ROWS patches of one head: softmax(q k) v over all patches.

    args: 0 q, 1 its row stride, 2 heads, 3 dim, 4 patches, 5 K, 6 bytes of a head of K, 7 V, 8 bytes of a head of V, 9 out, 10 its row
    stride, 11 scale (float bits), 12 scratch, 13 bytes of scratch a thread. q has room for ROWS more rows.
    """
    tile = make_tile(isa, "F32", ROWS)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        heads = load_i64(args + 16)
        dim = load_i64(args + 24)
        n = load_i64(args + 32)
        h = chunk % heads
        first = chunk // heads * ROWS
        rows = min(n - first, ROWS)
        keys = load_i64(args + 40) + h * load_i64(args + 48)
        values = load_i64(args + 56) + h * load_i64(args + 64)
        scale = splat_f32(f32_from_bits(load_i64(args + 88)))
        blocks = (n + 15) >> 4
        width = blocks * 64
        sums = load_i64(args + 96) + thread * load_i64(args + 104)
        scores = sums + ROWS * 64
        q = load_i64(args) + first * load_i64(args + 8) + h * dim * 4
        for b in range(blocks):
            tile_store_all(tile(keys + b * dim * 64, dim, q, load_i64(args + 8)), scores + b * 64, width)
        for i in range(rows):
            row = scores + i * width
            peak = splat_f32(f(MASKED))
            for b in range(blocks):
                s = where(lanes_below(n - b * 16), load_f32x16(row + b * 64) * scale, splat_f32(f(MASKED)))
                store(row + b * 64, s)
                peak = vmax(peak, s)
            highest = splat_f32(max_f32(peak))
            total = splat_f32(f(0.0))
            for b in range(blocks):
                p = vexp(load_f32x16(row + b * 64) - highest)
                store(row + b * 64, p)
                total = total + p
            inverse = splat_f32(f(1.0) / sum_f32(total))
            for b in range(blocks):
                store(row + b * 64, load_f32x16(row + b * 64) * inverse)
        for g in range((dim + 15) >> 4):
            tile_store_all(tile(values + g * n * 64, n, scores, width), sums, 64)
            for i in range(rows):
                out = load_i64(args + 72) + (first + i) * load_i64(args + 80) + (h * dim + g * 16) * 4
                for d in range(min(dim - g * 16, 16)):
                    store_scalar(out + d * 4, load_f32(sums + i * 64 + d * 4))

    return kernel


def pool(isa: Isa) -> Any:
    """Kernel, a chunk is one row of out: the mean of a square of patches.

    args: 0 x, 1 its row stride, 2 width, 3 patches of a side of the image, 4 patches of a side of the square, 5 out, 6 its row stride.
    """

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        side = load_i64(args + 24)
        square = load_i64(args + 32)
        squares = side // square
        corner = chunk // squares * square * side + chunk % squares * square
        out = load_i64(args + 40) + chunk * load_i64(args + 48)
        share = splat_f32(f(1.0) / f(square * square))
        for i in range((load_i64(args + 16) + 15) >> 4):
            total = splat_f32(f(0.0))
            for y in range(square):
                for x in range(square):
                    total = total + load_f32x16(load_i64(args) + (corner + y * side + x) * load_i64(args + 8) + i * 64)
            store(out + i * 64, total * share)

    return kernel


def place_rows(isa: Isa) -> Any:
    """Kernel, one row a chunk: a row that is given takes the place of what was there.

    args: 0 x, 1 its row stride, 2 width, 3 address of the address of each row's values float32 (0: it stays).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        source = load_i64(load_i64(args + 24) + 8 * t)
        if source:
            x = load_i64(args) + t * load_i64(args + 8)
            n = load_i64(args + 16)
            for i in range(n >> 4):
                store(x + i * 64, load_f32x16(source + i * 64))
            for i in range(n & -16, n):
                store_scalar(x + i * 4, load_f32(source + i * 4))

    return kernel
