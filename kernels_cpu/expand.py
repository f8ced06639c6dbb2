"""Packed weights expanded to what matrix instructions multiply: whole signed bytes, four k-values of 16 rows in 64 bytes.

Kind '256' becomes scale times code, an integer of at most 16 bits, cut into a low (unsigned) and a high (signed) byte; kind '32' the codes.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS, Octets
from localrun.kernels_cpu.simd import (
    bytes_of,
    i8_to_i16,
    load_i8x16,
    load_i8x32,
    load_u8x64,
    pairs_of,
    sar,
    store,
    u8_to_i32,
    words_of,
    words_of_pairs,
)
from localrun.kernels_cpu.tiles_table import decoder


@numba.njit
def _spread(quants: Any, scale: Any, low: int, high: int) -> None:
    """Low and high bytes of quant * scale to memory, 4 k-values of 16 rows. quants: bytes as i16x32; scale: i16x32, one value a pair."""
    even = (quants & 255) * scale
    odd = ((quants >> 8) & 255) * scale
    store(low, (even & 255) | (odd << 8))
    store(high, ((even >> 8) & 255) | (odd & -256))


@numba.njit
def _twice(scale: Any) -> Any:
    """i32x16 to i16x32 with the value in both halves of each lane."""
    return pairs_of((scale & 0xFFFF) | (scale << 16))


@numba.njit
def _one_of_pairs(scales: int, j: int) -> Any:
    """Scale j of those that lie in pairs, int8, as _twice gives it."""
    pair = words_of_pairs(i8_to_i16(load_i8x32(scales + (j >> 1) * 32)))
    return _twice(sar(pair << (16 - 16 * (j & 1)), 16))


def _expand_q4_k(high_bits: bool) -> Any:
    scales = 2560 if high_bits else 2048

    @numba.njit
    def expand(w: int, low: int, high: int) -> None:
        for j in range(4):
            first = _twice(u8_to_i32(load_i8x16(w + scales + j * 32)))
            second = _twice(u8_to_i32(load_i8x16(w + scales + j * 32 + 16)))
            for g in range(8):
                nibbles = load_u8x64(w + (j * 8 + g) * 64)
                a = nibbles & 15
                b = (nibbles >> 4) & 15
                if high_bits:
                    fifth = words_of(load_u8x64(w + 2048 + g * 64)) >> (2 * j)
                    a = a | (bytes_of(fifth << 4) & 16)
                    b = b | (bytes_of(fifth << 3) & 16)
                at = j * 1024 + g * 64
                _spread(pairs_of(words_of(a)), first, low + at, high + at)
                _spread(pairs_of(words_of(b)), second, low + at + 512, high + at + 512)

    return expand


@numba.njit
def _spread_signed(quants: Any, zero: int, scale: Any, low: int, high: int) -> None:
    """As _spread for quants that are `zero` too large."""
    even = ((quants & 255) - zero) * scale
    odd = (((quants >> 8) & 255) - zero) * scale
    store(low, (even & 255) | (odd << 8))
    store(high, ((even >> 8) & 255) | (odd & -256))


@numba.njit
def _expand_q6_k(w: int, low: int, high: int) -> None:
    for part in range(8):
        half, side, pair = part >> 2, (part >> 1) & 1, part & 1
        k = half * 128 + pair * 32 + side * 16
        first = _one_of_pairs(w + 3072, 8 * half + 2 * pair + side)
        second = _one_of_pairs(w + 3072, 8 * half + 4 + 2 * pair + side)
        for g in range(4):
            nibbles = load_u8x64(w + (half * 16 + pair * 8 + side * 4 + g) * 64)
            top = words_of(load_u8x64(w + 2048 + (half * 8 + side * 4 + g) * 64)) >> (2 * pair)
            at = (k + 4 * g) * 16
            _spread_signed(pairs_of(words_of((nibbles & 15) | (bytes_of(top << 4) & 48))), 32, first, low + at, high + at)
            at += 64 * 16
            _spread_signed(pairs_of(words_of(((nibbles >> 4) & 15) | (bytes_of(top) & 48))), 32, second, low + at, high + at)


def _expand_octets_256(isa: Isa, o: Octets) -> Any:
    code, _ = decoder(isa, o)
    quants, zero, fine, fields, third_bits = o.quants, o.offset, o.sub == 16, o.bits < 4, o.bits == 3

    @numba.njit
    def expand(w: int, low: int, high: int) -> None:
        scales = w + quants
        if fields:
            for field in range(16):  # 16 values each
                scale = _one_of_pairs(scales, field if fine else field >> 1)
                for g in range(4):
                    packed = words_of(load_u8x64(w + ((field >> 2) * 4 + g) * 64)) >> (2 * (field & 3))
                    index = bytes_of(packed) & 3
                    if third_bits:
                        thirds = words_of(load_u8x64(w + 1024 + ((field >> 3) * 4 + g) * 64)) >> (field & 7)
                        index = index | (bytes_of(thirds << 2) & 4)
                    at = field * 256 + g * 64
                    _spread_signed(pairs_of(words_of(code(index))), zero, scale, low + at, high + at)
        else:
            for block in range(8):  # 32 values each
                first = _one_of_pairs(scales, 2 * block if fine else block)
                second = _one_of_pairs(scales, 2 * block + 1 if fine else block)
                for g in range(4):
                    nibbles = load_u8x64(w + (block * 4 + g) * 64)
                    at = block * 512 + g * 64
                    _spread_signed(pairs_of(words_of(code(nibbles & 15))), zero, first, low + at, high + at)
                    at += 256
                    _spread_signed(pairs_of(words_of(code((nibbles >> 4) & 15))), zero, second, low + at, high + at)

    return expand


def _expand_octets_32(isa: Isa, o: Octets) -> Any:
    code, _ = decoder(isa, o)
    zero = o.offset

    @numba.njit
    def expand(w: int, out: int) -> None:
        for g in range(4):
            nibbles = load_u8x64(w + g * 64)
            store(out + g * 64, code(nibbles & 15) - zero)
            store(out + 256 + g * 64, code((nibbles >> 4) & 15) - zero)

    return expand


def expand_256(isa: Isa, type_name: str) -> Any:
    """A compiled function (packed super-block, low, high): scale times code, of 256 values in 16 rows, as 4096 low and 4096 high bytes."""
    if type_name in OCTETS:
        return _expand_octets_256(isa, OCTETS[type_name])
    return _expand_q6_k if type_name == "Q6_K" else _expand_q4_k(type_name == "Q5_K")


def expand_32(isa: Isa, type_name: str) -> Any:
    """A compiled function (packed quants of a block, out): the signed quants as one tile of 8 rows of 64 bytes."""
    if type_name in OCTETS:
        return _expand_octets_32(isa, OCTETS[type_name])
    five_bits = type_name in ("Q5_0", "Q5_1")
    zero = {"Q4_0": 8, "Q5_0": 16}.get(type_name, 0)

    @numba.njit
    def expand(w: int, out: int) -> None:
        if type_name == "Q8_0":
            for g in range(8):
                store(out + g * 64, load_u8x64(w + g * 64) ^ 128)
            return
        if five_bits:
            bits = words_of(load_u8x64(w + 256))
        for g in range(4):
            nibbles = load_u8x64(w + g * 64)
            a = nibbles & 15
            b = (nibbles >> 4) & 15
            if five_bits:
                a = a | (bytes_of((bits >> g) << 4) & 16)
                b = b | (bytes_of(bits >> g) & 16)
            store(out + g * 64, a - zero)
            store(out + 256 + g * 64, b - zero)

    return expand
