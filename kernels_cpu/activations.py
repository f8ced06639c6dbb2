"""Activations as the matmul kernels read them: a row of n float32 values in up to three forms.

    kind '256'  n / 256 blocks of SUPER bytes
    kind '32'   n int8, room up to a multiple of 64, then n / 32 times META bytes
    kind 'f'    the floats

For matrix instructions (amx.py) the rows of a batch of MANY tokens or more are also laid out by blocks of 16 tokens, so that what one
instruction reads lies together:

    kind '256'  per 16 tokens and super-block TILE_SUPER bytes: 4 x (16 tokens x 64 int8), then 16 x the last 64 bytes of SUPER
    kind '32'   per 16 tokens and 2 blocks TILE_PAIR bytes: 2 x (16 tokens x 32 int8), then 2 x (16 d f32, 16 d * sum f32)

A scale is d = max|x| / 127, a quant rint(x * (127 / max|x|)), ties to even; both are 0 where max|x| is below TINY. A block of 256 in which
sixteen successive quants then have magnitudes that add up to more than MOST_OF_16 (it is flat: no value stands out) is quantized with 63
instead of 127, so that products of 16 with weights of up to 6 bits always are numbers of 16 bits.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.activation_sizes import FEWER_LEVELS, LEVELS, MANY, META, MOST_OF_16, SUPER, TILE_PAIR, TILE_SUPER
from localrun.kernels_cpu.simd import (
    f32_to_i32,
    i32_to_i8,
    iabs,
    load_f32,
    load_f32x16,
    load_i8x32,
    load_i64,
    load_u8x64,
    max_f32,
    splat_f32,
    store,
    store_scalar,
    sum_i32,
    vabs,
    vmax,
    vround,
)

TINY = 1e-30
"""Smaller activations are zero: 127 / max|x| must be finite."""

f = numba.float32
i32 = numba.int32


@numba.njit
def _scale(peak: Any, levels: Any, target: int) -> Any:
    """Writes d = peak / levels and returns levels / peak in all lanes; zeros where there is next to nothing."""
    d = f(0.0)
    inverse = f(0.0)
    if peak >= f(TINY):
        d = f(peak / levels)
        inverse = f(levels / peak)
    store_scalar(target, d)
    return splat_f32(inverse)


@numba.njit
def _quants(source: int, inverse: Any, target: int) -> Any:
    """Sixteen quants written; returns them as i32x16."""
    q = f32_to_i32(vround(load_f32x16(source) * inverse))
    store(target, i32_to_i8(q))
    return q


@numba.njit
def _super_block(source: int, peak: Any, levels: Any, target: int) -> int:
    """Writes one block of kind '256'; returns the largest sum of |q| over 16 successive quants."""
    inverse = _scale(peak, levels, target + 256)
    most = i32(0)
    for i in range(8):
        a = _quants(source + i * 128, inverse, target + i * 32)
        b = _quants(source + i * 128 + 64, inverse, target + i * 32 + 16)
        low, high = sum_i32(a), sum_i32(b)
        store_scalar(target + 264 + 2 * i, numba.int16(low + high))
        store_scalar(target + 288 + 4 * i, numba.int16(low))
        store_scalar(target + 290 + 4 * i, numba.int16(high))
        store_scalar(target + 320 + 8 * i, i32(low * -32))
        store_scalar(target + 324 + 8 * i, i32(high * -32))
        most = max(most, sum_i32(iabs(a)), sum_i32(iabs(b)))
    return most


@numba.njit
def quantize_256(row: int, n: int, out: int) -> None:
    """n float32 at `row` (n a multiple of 256) to kind '256' at `out`."""
    for b in range(n >> 8):
        source = row + b * 1024
        target = out + b * SUPER
        peak = vabs(load_f32x16(source))
        for i in range(1, 16):
            peak = vmax(peak, vabs(load_f32x16(source + i * 64)))
        largest = max_f32(peak)
        if _super_block(source, largest, f(LEVELS), target) > MOST_OF_16:
            _super_block(source, largest, f(FEWER_LEVELS), target)


@numba.njit
def quantize_32(row: int, n: int, out: int) -> None:
    """n float32 at `row` (n a multiple of 32) to kind '32' at `out`."""
    meta = out + ((n + 63) & -64)
    for b in range(n >> 5):
        source = row + b * 128
        target = meta + b * META
        peak = max_f32(vmax(vabs(load_f32x16(source)), vabs(load_f32x16(source + 64))))
        inverse = _scale(peak, f(LEVELS), target)
        first = sum_i32(_quants(source, inverse, out + b * 32))
        second = sum_i32(_quants(source + 64, inverse, out + b * 32 + 16))
        total = first + second
        store_scalar(target + 4, f(load_f32(target) * f(total)))
        store_scalar(target + 8, i32(total * -8))
        store_scalar(target + 12, i32(total * -16))
        store_scalar(target + 16, i32(total * -128))
        store_scalar(target + 20, i32(first * -16))
        store_scalar(target + 24, i32(second * -16))


@numba.njit
def _tiles_256(row: int, n: int, tiles: int, t: int) -> None:
    """A row of kind '256' to its place among the tiles."""
    for b in range(n >> 8):
        source = row + b * SUPER
        target = tiles + ((t >> 4) * (n >> 8) + b) * TILE_SUPER + (t & 15) * 64
        for i in range(5):
            store(target + i * 1024, load_u8x64(source + i * 64))


@numba.njit
def _tiles_32(row: int, n: int, tiles: int, t: int) -> None:
    """A row of kind '32' to its place among the tiles."""
    meta = row + ((n + 63) & -64)
    pairs = (n + 63) >> 6
    for b in range(n >> 5):
        target = tiles + ((t >> 4) * pairs + (b >> 1)) * TILE_PAIR
        store(target + (b & 1) * 512 + (t & 15) * 32, load_i8x32(row + b * 32))
        scales = target + 1024 + (b & 1) * 128 + (t & 15) * 4
        store_scalar(scales, load_f32(meta + b * META))
        store_scalar(scales + 64, load_f32(meta + b * META + 4))


@numba.njit
def give(row: int, n: int, args: int, t: int, tokens: int) -> None:
    """Quantizes finished row t of `tokens` for whoever reads it.

    args: address and row stride of each of '256', '32', 'f', then the addresses of the tiles of '256' and '32'; address 0: nobody reads
    that.
    """
    to_256 = load_i64(args)
    if to_256:
        target = to_256 + t * load_i64(args + 8)
        quantize_256(row, n, target)
        if tokens >= MANY and load_i64(args + 48):
            _tiles_256(target, n, load_i64(args + 48), t)
    to_32 = load_i64(args + 16)
    if to_32:
        target = to_32 + t * load_i64(args + 24)
        quantize_32(row, n, target)
        if tokens >= MANY and load_i64(args + 56):
            _tiles_32(target, n, load_i64(args + 56), t)
    to_f = load_i64(args + 32)
    if to_f:
        target = to_f + t * load_i64(args + 40)
        if target != row:
            for i in range((n + 15) >> 4):
                store(target + i * 64, load_f32x16(row + i * 64))
