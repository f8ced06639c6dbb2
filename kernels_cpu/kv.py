"""The KV cache's memory: how keys and values of a block lie there, in which type, and how they are written and read.

A pool block holds BLOCK = 16 successive positions of one sequence for all layers. Inside it each layer has, at its own offset,

    K  for each kv head: [dim][16 positions]     one load gives 16 keys' values of one dimension: scores need no horizontal sum
    V  for each kv head: [16 positions][dim, room up to 16]

    f32, f16, bf16   the values
    q8_0             int8, then scales f16: K [dim / 32][16 positions], V [16 positions][dim / 32];
                     a scale is max|x| / 127 of 32 values of one position
    q4_0             nibbles 1..15 for -7..7, then scales f16 as for q8_0 with max|x| / 7;
                     K: byte [dim / 2][16], dimension 2 i in the low nibble,
                     V: byte [16][dim / 2], within 32 values the first 16 in the low nibbles
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.attention_sizes import STEP
from localrun.kernels_cpu.simd import (
    bits_f32,
    f16_to_f32,
    i8_to_i32,
    i32_to_f32,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i8x16,
    load_i16x16,
    load_u8,
    splat_f32,
    store,
    store_f16,
    store_scalar,
    u8_to_i32,
    u16_to_i32,
)
from localrun.kernels_cpu.sizes import BLOCK, GROUP, PLAIN

LEVELS = {"q8_0": 127, "q4_0": 7}

f = numba.float32


def _plain(kv_type: str) -> tuple[Any, Any]:
    """(read 16 at an address, write one) of a type without scales."""

    @numba.njit
    def read(address: int) -> Any:
        if kv_type == "f16":
            return f16_to_f32(load_f16x16(address))
        if kv_type == "bf16":
            return bits_f32(u16_to_i32(load_i16x16(address)) << 16)
        return load_f32x16(address)

    @numba.njit
    def write(address: int, source: int) -> None:
        if kv_type == "f16":
            store_f16(address, load_f32(source))
        elif kv_type == "bf16":
            # The upper half of the float, rounded to nearest even.
            low = numba.int64(load_u8(source)) | (numba.int64(load_u8(source + 1)) << 8)
            high = numba.int64(load_u8(source + 2)) | (numba.int64(load_u8(source + 3)) << 8)
            store_scalar(address, numba.int16(high + ((low + 0x7FFF + (high & 1)) >> 16)))
        else:
            store_scalar(address, load_f32(source))

    return read, write


@numba.njit
def _peak(source: int) -> Any:
    """max|x| of GROUP floats."""
    peak = f(0.0)
    for i in range(GROUP):
        peak = max(peak, abs(load_f32(source + 4 * i)))
    return peak


@numba.njit
def _put(address: int, value: int, shift: int) -> None:
    """Writes a nibble without touching the other one of its byte."""
    kept = numba.int64(load_u8(address)) & (0xF0 if shift == 0 else 0x0F)
    store_scalar(address, numba.uint8(kept | (value << shift)))


class Codec:
    """Compiled functions over one head's part of a block.

    write_k, write_v (block part, slot, source float32 values, n);
    expand_k (block part, dim, target): float32 [dim][16 positions], from one dimension to the next STEP positions;
    expand_v (block part, positions, room, target): float32 [positions][room], room a multiple of 16. All values exactly as they are kept.
    plain: of a type without scales, read(address) -> f32x16 of 16 values that lie side by side, and `size`, the bytes of one.
    """

    def __init__(self, kv_type: str) -> None:
        self.plain = kv_type in PLAIN
        self.size = PLAIN.get(kv_type, 0)
        self.read = _plain(kv_type)[0]
        self.write_k, self.write_v, self.expand_k, self.expand_v = _plain_codec(kv_type) if kv_type in PLAIN else _scaled_codec(kv_type)


def _plain_codec(kv_type: str) -> tuple[Any, Any, Any, Any]:
    size = PLAIN[kv_type]
    read, write = _plain(kv_type)

    @numba.njit
    def write_k(part: int, slot: int, source: int, n: int) -> None:
        for i in range(n):
            write(part + (i * BLOCK + slot) * size, source + 4 * i)

    @numba.njit
    def write_v(part: int, slot: int, source: int, n: int) -> None:
        wide = (n + 15) & -16
        for i in range(n):
            write(part + (slot * wide + i) * size, source + 4 * i)

    @numba.njit
    def expand_k(part: int, dim: int, target: int) -> None:
        for d in range(dim):
            store(target + d * STEP * 4, read(part + d * BLOCK * size))

    @numba.njit
    def expand_v(part: int, positions: int, wide: int, target: int) -> None:
        for i in range(0, positions * wide, 16):
            store(target + i * 4, read(part + i * size))

    return write_k, write_v, expand_k, expand_v


def _scaled_codec(kv_type: str) -> tuple[Any, Any, Any, Any]:
    levels = LEVELS[kv_type]
    nibbles = kv_type == "q4_0"
    half = 2 if nibbles else 1

    @numba.njit
    def quant(source: int, inverse: Any) -> Any:
        return numba.int64(np.rint(load_f32(source) * inverse))

    @numba.njit
    def scale_of(source: int, target: int) -> Any:
        """Writes the scale of GROUP values and returns what to multiply them by."""
        store_f16(target, f(_peak(source) / f(levels)))
        d = load_f16(target)
        return f(1.0) / d if d > f(0.0) else f(0.0)

    @numba.njit
    def clip(q: int) -> int:
        return min(max(q, -levels), levels)

    @numba.njit
    def write_k(part: int, slot: int, source: int, n: int) -> None:
        scales = part + n * BLOCK // half
        for g in range(n // GROUP):
            inverse = scale_of(source + g * GROUP * 4, scales + (g * BLOCK + slot) * 2)
            for i in range(g * GROUP, (g + 1) * GROUP):
                q = clip(quant(source + i * 4, inverse))
                if nibbles:
                    _put(part + (i >> 1) * BLOCK + slot, q + 8, 4 * (i & 1))
                else:
                    store_scalar(part + i * BLOCK + slot, numba.int8(q))

    @numba.njit
    def write_v(part: int, slot: int, source: int, n: int) -> None:
        scales = part + n * BLOCK // half
        for g in range(n // GROUP):
            inverse = scale_of(source + g * GROUP * 4, scales + (slot * (n // GROUP) + g) * 2)
            for i in range(GROUP):
                q = clip(quant(source + (g * GROUP + i) * 4, inverse))
                if nibbles:
                    _put(part + slot * (n // 2) + g * 16 + (i & 15), q + 8, 4 * (i >> 4))
                else:
                    store_scalar(part + slot * n + g * GROUP + i, numba.int8(q))

    @numba.njit
    def expand_k(part: int, dim: int, target: int) -> None:
        for g in range(dim // GROUP):
            scale = f16_to_f32(load_f16x16(part + dim * BLOCK // half + g * BLOCK * 2))
            for d in range(g * GROUP, (g + 1) * GROUP, half):
                if nibbles:
                    both = u8_to_i32(load_i8x16(part + (d >> 1) * BLOCK))
                    store(target + d * STEP * 4, i32_to_f32((both & 15) - 8) * scale)
                    store(target + (d + 1) * STEP * 4, i32_to_f32((both >> 4) - 8) * scale)
                else:
                    store(target + d * STEP * 4, i32_to_f32(i8_to_i32(load_i8x16(part + d * BLOCK))) * scale)

    @numba.njit
    def expand_v(part: int, positions: int, wide: int, target: int) -> None:
        scales = part + wide * BLOCK // half
        for i in range(0, positions * wide, GROUP):
            scale = splat_f32(load_f16(scales + i // GROUP * 2))
            if nibbles:
                both = u8_to_i32(load_i8x16(part + (i >> 1)))
                store(target + i * 4, i32_to_f32((both & 15) - 8) * scale)
                store(target + i * 4 + 64, i32_to_f32((both >> 4) - 8) * scale)
            else:
                store(target + i * 4, i32_to_f32(i8_to_i32(load_i8x16(part + i))) * scale)
                store(target + i * 4 + 64, i32_to_f32(i8_to_i32(load_i8x16(part + i + 16))) * scale)

    return write_k, write_v, expand_k, expand_v
