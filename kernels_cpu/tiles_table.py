"""Matmul tiles of the types of octets.py: nibbles that index a table of 16 codes, in registers. The order of operations is matmul.py's.

Codes are made unsigned by an offset; what that adds to a dot product, offset * sum(x), is an integer that the activations' sums know.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.activations import META, SUPER
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS, Octets
from localrun.kernels_cpu.simd import (
    bits_f32,
    f16_to_f32,
    i8_to_i16,
    load_f16x16,
    load_i8x32,
    load_i16x16,
    load_u8x64,
    sar,
    splat_i32,
    tile_fma,
    tile_mul,
    tile_scale_add,
    tile_splat_f32,
    tile_splat_i32,
    tile_to_f32,
    u8_to_i16,
    u16_to_i32,
    words_of_pairs,
    zeros_f32,
    zeros_i32,
)

OFFSET_AT = {8: 8, 16: 12, 128: 16}
"""Where META has minus the sum times that offset."""


@numba.njit
def _same(index: Any) -> Any:
    return index


def _decoder(isa: Isa, o: Octets) -> tuple[Any, Any]:
    """(index u8x64 -> unsigned code, the dot product that takes such codes)."""
    if o.linear:
        return _same, isa.ops.tile_dot4
    table = tuple(code + o.offset for code in o.table)
    return isa.ops.lookup(table), isa.ops.tile_dot4 if max(table) < 128 else isa.ops.tile_dot4_full


def _tile_256(isa: Isa, o: Octets, tokens: int) -> Any:
    code, dot4 = _decoder(isa, o)
    dot2 = isa.ops.tile_dot2
    size, step = 256 // o.sub * 16, o.quants + o.scales
    fine, with_min = o.sub == 16, o.minimum is not None
    sums = 288 if fine else 264
    offset, factor = o.offset, o.factor
    d_at = 2048 + size * (2 if with_min else 1)

    @numba.njit
    def tile(w: int, n: int, x: int, stride: int) -> Any:
        acc = zeros_f32(tokens)
        for _ in range(n):
            total = zeros_i32(tokens)
            offsets = zeros_i32(tokens)
            for pair in range(size // 32):  # two sub-blocks
                pairs = i8_to_i16(load_i8x32(w + 2048 + pair * 32))
                even = sar(words_of_pairs(pairs) << 16, 16)
                odd = sar(words_of_pairs(pairs), 16)
                first = zeros_i32(tokens)
                second = zeros_i32(tokens)
                if fine:
                    for g in range(4):
                        nibbles = load_u8x64(w + (pair * 4 + g) * 64)
                        first = dot4(first, code(nibbles & 15), x + pair * 32 + g * 4, stride)
                        second = dot4(second, code((nibbles >> 4) & 15), x + pair * 32 + 16 + g * 4, stride)
                else:
                    for g in range(4):
                        nibbles = load_u8x64(w + (pair * 8 + g) * 64)
                        first = dot4(first, code(nibbles & 15), x + pair * 64 + g * 4, stride)
                        first = dot4(first, code((nibbles >> 4) & 15), x + pair * 64 + 16 + g * 4, stride)
                        nibbles = load_u8x64(w + (pair * 8 + 4 + g) * 64)
                        second = dot4(second, code(nibbles & 15), x + pair * 64 + 32 + g * 4, stride)
                        second = dot4(second, code((nibbles >> 4) & 15), x + pair * 64 + 48 + g * 4, stride)
                total = tile_scale_add(total, first, even)
                total = tile_scale_add(total, second, odd)
                if offset:
                    offsets = dot2(offsets, pairs, x + sums + pair * 4, stride)
            if offset:
                total = tile_scale_add(total, offsets, splat_i32(numba.int32(-offset)))
            value = tile_mul(tile_to_f32(total), f16_to_f32(load_f16x16(w + d_at)) * numba.float32(factor))
            if with_min:
                mins = zeros_i32(tokens)
                for pair in range(size // 32):
                    mins = dot2(mins, u8_to_i16(load_i8x32(w + 2048 + size + pair * 32)), x + sums + pair * 4, stride)
                value = tile_fma(value, tile_to_f32(mins), f16_to_f32(load_f16x16(w + d_at + 32)) * numba.float32(-1.0))
            acc = tile_fma(acc, value, tile_splat_f32(acc, x + 256, stride))
            w += step
            x += SUPER
        return acc

    return tile


def _tile_32(isa: Isa, o: Octets, tokens: int) -> Any:
    code, dot4 = _decoder(isa, o)
    quants, scales, halves, brain = o.quants, o.scales, o.sub == 16, o.brain
    first_at = 20 if halves else OFFSET_AT[o.offset]

    @numba.njit
    def scale(u: int) -> Any:
        if brain:
            return bits_f32(u16_to_i32(load_i16x16(u)) << 16)
        return f16_to_f32(load_f16x16(u))

    @numba.njit
    def tile(w: int, n: int, x: int, stride: int) -> Any:
        acc = zeros_f32(tokens)
        u = w + n * quants
        meta = x + ((n * 32 + 63) & -64)
        for _ in range(n):
            first = tile_splat_i32(acc, meta + first_at, stride)
            second = tile_splat_i32(acc, meta + 24, stride)
            for g in range(4):
                nibbles = load_u8x64(w + g * 64)
                first = dot4(first, code(nibbles & 15), x + g * 4, stride)
                if halves:
                    second = dot4(second, code((nibbles >> 4) & 15), x + 16 + g * 4, stride)
                else:
                    first = dot4(first, code((nibbles >> 4) & 15), x + 16 + g * 4, stride)
            dx = tile_splat_f32(acc, meta, stride)
            acc = tile_fma(acc, tile_mul(tile_to_f32(first), dx), scale(u))
            if halves:
                acc = tile_fma(acc, tile_mul(tile_to_f32(second), dx), scale(u + 32))
            w += quants
            u += scales
            x += 32
            meta += META
        return acc

    return tile


def table_tile(isa: Isa, type_name: str, tokens: int) -> Any:
    """The compiled tile of such a type, see matmul.make_tile."""
    o = OCTETS[type_name]
    return _tile_256(isa, o, tokens) if o.kind == "256" else _tile_32(isa, o, tokens)
