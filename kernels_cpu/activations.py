"""Activations as the matmul kernels read them: a row of n float32 values in up to three forms.

    kind '256'  n / 256 blocks of SUPER bytes
    kind '32'   n int8, room up to a multiple of 64, then n / 32 times META bytes
    kind 'f'    the floats

A scale is d = max|x| / 127, a quant rint(x * (127 / max|x|)), ties to even; both are 0 where max|x| is below TINY.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.simd import (
    f32_to_i32,
    i32_to_i8,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32,
    splat_f32,
    store,
    store_scalar,
    sum_i32,
    vabs,
    vmax,
    vround,
)

SUPER = 320
"""Bytes of 256 quantized activations: 256 int8, then from 256 d f32, 260 pad, 264 eight int16 sums of 32, 288 sixteen int16 sums of 16."""
META = 28
"""Bytes of what belongs to 32 quantized activations: d f32, d * sum f32, then int32: -8, -16, -128 times sum, -16 times the sums of either half."""
TINY = 1e-30
"""Smaller activations are zero: 127 / max|x| must be finite."""

f = numba.float32
i32 = numba.int32


@numba.njit
def _scale(peak: Any, target: int) -> Any:
    """Writes d = peak / 127 and returns 127 / peak in all lanes; zeros where there is next to nothing."""
    d = f(0.0)
    inverse = f(0.0)
    if peak >= f(TINY):
        d = f(peak / f(127.0))
        inverse = f(127.0) / peak
    store_scalar(target, d)
    return splat_f32(inverse)


@numba.njit
def _quants(source: int, inverse: Any, target: int) -> Any:
    """Sixteen quants written; returns them as i32x16."""
    q = f32_to_i32(vround(load_f32x16(source) * inverse))
    store(target, i32_to_i8(q))
    return q


@numba.njit
def quantize_256(row: int, n: int, out: int) -> None:
    """n float32 at `row` (n a multiple of 256) to kind '256' at `out`."""
    for b in range(n >> 8):
        source = row + b * 1024
        target = out + b * SUPER
        peak = vabs(load_f32x16(source))
        for i in range(1, 16):
            peak = vmax(peak, vabs(load_f32x16(source + i * 64)))
        inverse = _scale(max_f32(peak), target + 256)
        for i in range(8):
            low = sum_i32(_quants(source + i * 128, inverse, target + i * 32))
            high = sum_i32(_quants(source + i * 128 + 64, inverse, target + i * 32 + 16))
            store_scalar(target + 264 + 2 * i, numba.int16(low + high))
            store_scalar(target + 288 + 4 * i, numba.int16(low))
            store_scalar(target + 290 + 4 * i, numba.int16(high))


@numba.njit
def quantize_32(row: int, n: int, out: int) -> None:
    """n float32 at `row` (n a multiple of 32) to kind '32' at `out`."""
    meta = out + ((n + 63) & -64)
    for b in range(n >> 5):
        source = row + b * 128
        target = meta + b * META
        peak = max_f32(vmax(vabs(load_f32x16(source)), vabs(load_f32x16(source + 64))))
        inverse = _scale(peak, target)
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
def give(row: int, n: int, args: int, t: int) -> None:
    """Quantizes a finished row for whoever reads it. args: address and row stride of each of '256', '32', 'f'; address 0: nobody does."""
    to_256 = load_i64(args)
    if to_256:
        quantize_256(row, n, to_256 + t * load_i64(args + 8))
    to_32 = load_i64(args + 16)
    if to_32:
        quantize_32(row, n, to_32 + t * load_i64(args + 24))
    to_f = load_i64(args + 32)
    if to_f:
        target = to_f + t * load_i64(args + 40)
        if target != row:
            for i in range((n + 15) >> 4):
                store(target + i * 64, load_f32x16(row + i * 64))
