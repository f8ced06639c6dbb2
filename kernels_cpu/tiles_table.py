"""Matmul tiles of the types of octets.py: indices into a table of 16 codes that lies in a register. The order of operations is matmul.py's.

Codes are made unsigned by an offset; what that adds to a dot product, offset * sum(x), is an integer that the activations' sums know.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.activation_sizes import META, MOST_OF_16, SUPER
from localrun.kernels_cpu.fetch import fetch_both, fetcher, split_fetcher
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS, Octets
from localrun.kernels_cpu.simd import (
    bits_f32,
    bytes_of,
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
    tile_to_f32,
    u8_to_i16,
    u16_to_i32,
    words_of,
    words_of_pairs,
    zeros_f32,
    zeros_i32,
)
from localrun.kernels_cpu.token_rows import rows_f32, rows_from, rows_i32

OFFSET_AT = {8: 8, 16: 12, 128: 16}
"""Where META has minus the sum times that offset."""


@numba.njit
def _same(index: Any) -> Any:
    return index


def decoder(isa: Isa, o: Octets) -> tuple[Any, Any]:
    """(compiled: index u8x64 -> unsigned code; the dot product that takes such codes)."""
    if o.linear:
        return _same, isa.ops.tile_dot4
    table = tuple(code + o.offset for code in o.table)
    return isa.ops.lookup(table), isa.ops.tile_dot4 if max(table) < 128 else isa.ops.tile_dot4_full


def _two_sub_blocks(isa: Isa, o: Octets, tokens: int, odd: int) -> Any:
    """(group, rows of activations, pair) -> integer dot products of sub-blocks 2 pair and 2 pair + 1 of a block of 256.

    odd: pair & 1, for the forms that shift by it, so that they shift by constants.
    """
    code, dot4 = decoder(isa, o)
    field = 2 * odd

    @numba.njit
    def nibbles_16(w: int, x: Any, pair: int) -> Any:
        first = zeros_i32(tokens)
        second = zeros_i32(tokens)
        x += pair * 32
        for g in range(4):
            packed = load_u8x64(w + (pair * 4 + g) * 64)
            first = dot4(first, code(packed & 15), x + g * 4)
            second = dot4(second, code((packed >> 4) & 15), x + 16 + g * 4)
        return first, second

    @numba.njit
    def nibbles_32(w: int, x: Any, pair: int) -> Any:
        first = zeros_i32(tokens)
        second = zeros_i32(tokens)
        x += pair * 64
        for g in range(4):
            packed = load_u8x64(w + (pair * 8 + g) * 64)
            first = dot4(first, code(packed & 15), x + g * 4)
            first = dot4(first, code((packed >> 4) & 15), x + 16 + g * 4)
            packed = load_u8x64(w + (pair * 8 + 4 + g) * 64)
            second = dot4(second, code(packed & 15), x + 32 + g * 4)
            second = dot4(second, code((packed >> 4) & 15), x + 48 + g * 4)
        return first, second

    @numba.njit
    def two_bits_16(w: int, x: Any, pair: int) -> Any:
        first = zeros_i32(tokens)
        second = zeros_i32(tokens)
        w += (pair >> 1) * 256
        x += pair * 32
        for g in range(4):
            packed = load_u8x64(w + g * 64)
            first = dot4(first, (packed >> (2 * field)) & 3, x + g * 4)
            second = dot4(second, (packed >> (2 * field + 2)) & 3, x + 16 + g * 4)
        return first, second

    @numba.njit
    def two_bits_32(w: int, x: Any, pair: int) -> Any:
        first = zeros_i32(tokens)
        second = zeros_i32(tokens)
        x += pair * 64
        for g in range(4):
            packed = load_u8x64(w + (pair * 4 + g) * 64)
            first = dot4(first, packed & 3, x + g * 4)
            first = dot4(first, (packed >> 2) & 3, x + 16 + g * 4)
            second = dot4(second, (packed >> 4) & 3, x + 32 + g * 4)
            second = dot4(second, (packed >> 6) & 3, x + 48 + g * 4)
        return first, second

    @numba.njit
    def three_bits(quants: Any, thirds: Any, field: int) -> Any:
        return code((bytes_of(quants >> (2 * field)) & 3) | (bytes_of((thirds >> field) << 2) & 4))

    @numba.njit
    def three_bits_16(w: int, x: Any, pair: int) -> Any:
        first = zeros_i32(tokens)
        second = zeros_i32(tokens)
        x += pair * 32
        third = 2 * (pair & 2)
        for g in range(4):
            quants = words_of(load_u8x64(w + ((pair >> 1) * 4 + g) * 64))
            thirds = words_of(load_u8x64(w + 1024 + ((pair >> 2) * 4 + g) * 64)) >> third
            first = dot4(first, three_bits(quants, thirds, field), x + g * 4)
            second = dot4(second, three_bits(quants, thirds, field + 1), x + 16 + g * 4)
        return first, second

    @numba.njit
    def three_bits_32(w: int, x: Any, pair: int) -> Any:
        first = zeros_i32(tokens)
        second = zeros_i32(tokens)
        x += pair * 64
        third = 4 * (pair & 1)
        for g in range(4):
            quants = words_of(load_u8x64(w + (pair * 4 + g) * 64))
            thirds = words_of(load_u8x64(w + 1024 + ((pair >> 1) * 4 + g) * 64)) >> third
            first = dot4(first, three_bits(quants, thirds, 0), x + g * 4)
            first = dot4(first, three_bits(quants, thirds, 1), x + 16 + g * 4)
            second = dot4(second, three_bits(quants, thirds, 2), x + 32 + g * 4)
            second = dot4(second, three_bits(quants, thirds, 3), x + 48 + g * 4)
        return first, second

    if o.bits == 3:
        return three_bits_16 if o.sub == 16 else three_bits_32
    if o.bits == 2:
        return two_bits_16 if o.sub == 16 else two_bits_32
    return nibbles_16 if o.sub == 16 else nibbles_32


def _sub_block_adder(isa: Isa, o: Octets, tokens: int, odd: int) -> Any:
    """(total, offsets, group, rows of activations, pair) -> both with two sub-blocks added: scale * dot, scale * sum of the activations."""
    two = _two_sub_blocks(isa, o, tokens, odd)
    dot2 = isa.ops.tile_dot2
    quants, sums, offset = o.quants, 288 if o.sub == 16 else 264, o.offset
    largest = max(o.table) + offset
    weigh = isa.ops.tile_weigh if largest * (o.sub // 16) * MOST_OF_16 < 1 << 15 else tile_scale_add

    @numba.njit
    def add(total: Any, offsets: Any, w: int, x: Any, pair: int) -> Any:
        scales = i8_to_i16(load_i8x32(w + quants + pair * 32))
        first, second = two(w, x, pair)
        total = weigh(total, first, sar(words_of_pairs(scales) << 16, 16))
        total = weigh(total, second, sar(words_of_pairs(scales), 16))
        if offset:
            offsets = dot2(offsets, scales, x + sums + pair * 4)
        return total, offsets

    return add


def _tile_256(isa: Isa, o: Octets, tokens: int) -> Any:
    add, add_odd = (_sub_block_adder(isa, o, tokens, odd) for odd in (0, 1))
    by_two = o.bits < 4 and o.sub == 16
    dot2 = isa.ops.tile_dot2
    quants, step, size = o.quants, o.quants + o.scales, 256 // o.sub * 16
    sums, with_min = 288 if o.sub == 16 else 264, o.minimum is not None
    offset, factor = o.offset, o.factor
    d_at = quants + size * (2 if with_min else 1)
    lines, fetch = step // 64, fetcher(step)

    @numba.njit
    def tile(w: int, n: int, at: int, stride: int) -> Any:
        x = rows_from(at, stride, tokens)
        acc = zeros_f32(tokens)
        for _ in range(n):
            for line in range(lines):
                fetch(w + line * 64)
            total = zeros_i32(tokens)
            offsets = zeros_i32(tokens)
            if by_two:
                for pair in range(0, 8, 2):
                    total, offsets = add(total, offsets, w, x, pair)
                    total, offsets = add_odd(total, offsets, w, x, pair + 1)
            else:
                for pair in range(size // 32):
                    total, offsets = add(total, offsets, w, x, pair)
            if offset:
                total = tile_scale_add(total, offsets, splat_i32(numba.int32(-offset)))
            value = tile_mul(tile_to_f32(total), f16_to_f32(load_f16x16(w + d_at)) * numba.float32(factor))
            if with_min:
                mins = zeros_i32(tokens)
                for pair in range(size // 32):
                    mins = dot2(mins, u8_to_i16(load_i8x32(w + quants + size + pair * 32)), x + sums + pair * 4)
                value = tile_fma(value, tile_to_f32(mins), f16_to_f32(load_f16x16(w + d_at + 32)) * numba.float32(-1.0))
            acc = tile_fma(acc, value, rows_f32(x + 256))
            w += step
            x += SUPER
        return acc

    return tile


def block_scale(type_name: str) -> Any:
    """A compiled function: address of the packed scales of a block of kind '32' -> f32x16."""

    @numba.njit
    def half(at: int) -> Any:
        return f16_to_f32(load_f16x16(at))

    @numba.njit
    def brain(at: int) -> Any:
        return bits_f32(u16_to_i32(load_i16x16(at)) << 16)

    return brain if type_name in OCTETS and OCTETS[type_name].brain else half


def _tile_32(isa: Isa, o: Octets, tokens: int) -> Any:
    code, dot4 = decoder(isa, o)
    quants, scales, halves = o.quants, o.scales, o.sub == 16
    scale = block_scale(o.name)
    first_at = 20 if halves else OFFSET_AT[o.offset]
    ahead = split_fetcher(quants, scales)

    @numba.njit
    def tile(w: int, n: int, at: int, stride: int) -> Any:
        x = rows_from(at, stride, tokens)
        acc = zeros_f32(tokens)
        end = w + n * quants
        u = end
        meta = x + ((n * 32 + 63) & -64)
        for _ in range(n):
            far, near = ahead(w, u, end, n)
            first = rows_i32(meta + first_at)
            second = rows_i32(meta + 24)
            for g in range(4):
                fetch_both(far + g * 64, near + g * 64)
                nibbles = load_u8x64(w + g * 64)
                first = dot4(first, code(nibbles & 15), x + g * 4)
                if halves:
                    second = dot4(second, code((nibbles >> 4) & 15), x + 16 + g * 4)
                else:
                    first = dot4(first, code((nibbles >> 4) & 15), x + 16 + g * 4)
            dx = rows_f32(meta)
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
