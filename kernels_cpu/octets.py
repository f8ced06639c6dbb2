"""Tensor types whose values are at most 16 different integers, read eight values at a time.

Nibbles of a table, points of a grid with signs, digits base 3, single bits: a block of every such type can be asked for *octet* i, its
values 8 i to 8 i + 7, as eight bytes of a 64-bit word that index one table of 16 codes, the first value in the lowest byte. Packing
(below), tiles (tiles_table.py) and embedding rows (rows.py) are written once over that. Where the bits lie is said in formats/, whose
NumPy functions are the reference for this file.

    kind '256'   value = d * factor * scale(j) * table[index] - dmin * minimum(j), sub-blocks of `sub` values
    kind '32'    value = d(j) * table[index], one d for `sub` values
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import BY_NAME, fp4, iquants
from localrun.kernels_cpu.formats.grids import grid, levels
from localrun.kernels_cpu.simd import load_i32, load_i64, load_u8, store_scalar

i64 = numba.int64

ONES = 0x0101010101010101
_LANES = 0x00FF00FF00FF00FF
SIGN = {3: 4, 8: 8}
"""By the number of levels of a grid: index of level l with a minus sign is l + SIGN."""


@dataclass(frozen=True)
class Octets:
    """A type. The functions are compiled, take a block's address, and give int64.

    table: 16 codes by index; octet(s, i); d16(s, j): bits of d as float16, or bfloat16 with `brain`; scale(s, j), minimum(s, j),
    dmin16(s, 0): of kind '256' only, the last two None in types without minima.
    """

    name: str
    kind: str
    sub: int
    table: tuple[int, ...]
    octet: Any
    d16: Any
    brain: bool = False
    factor: float = 1.0
    scale: Any = None
    minimum: Any = None
    dmin16: Any = None
    bits: int = 4

    @property
    def linear(self) -> bool:
        """Whether codes are indices minus a constant, so that kernels need no table."""
        return self.table == tuple(range(self.table[0], self.table[0] + 16))

    @property
    def offset(self) -> int:
        """What kernels add to codes to make them unsigned, and take away again: 8, 16 or 128 for kind '32', see META."""
        least = -min(self.table)
        if self.kind == "256" or self.linear:
            return least
        return 16 if least <= 16 else 128

    @property
    def block(self) -> int:
        """Values that a step of the kernel takes."""
        return 256 if self.kind == "256" else 32

    @property
    def quants(self) -> int:
        """Packed bytes of a block's indices, 16 rows."""
        return self.block * 2 * self.bits

    @property
    def scales(self) -> int:
        """Packed bytes of the rest, a multiple of 64 for kind '256'."""
        if self.kind == "32":
            return 32 * max(1, 32 // self.sub)
        size = 256 // self.sub * 16 + 32
        return (size * (2 if self.minimum else 1) + 63) // 64 * 64


def baked(data: bytes) -> Any:
    """An intrinsic () -> int64, the address of these bytes in the kernel's own read-only memory."""
    name = f"baked.{hashlib.sha256(data).hexdigest()[:12]}"

    @intrinsic  # type: ignore[untyped-decorator]
    def address(typingctx: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value = ir.Constant(ir.ArrayType(ir.IntType(8), len(data)), bytearray(data))
            return builder.ptrtoint(cgutils.global_constant(builder, name, value), ir.IntType(64))

        return types.int64(), codegen

    return address


# ---- what blocks are read by ---------------------------------------------------------------------------------------------------


@numba.njit
def u8(at: int) -> Any:
    return i64(load_u8(at))


@numba.njit
def u16(at: int) -> Any:
    return u8(at) | (u8(at + 1) << 8)


@numba.njit
def u32(at: int) -> Any:
    return i64(load_i32(at)) & 0xFFFFFFFF


def _half_at(offset: int) -> Any:
    @numba.njit
    def bits(s: int, j: int) -> Any:
        return u16(s + offset)

    return bits


@numba.njit
def _one(s: int, j: int) -> Any:
    return i64(1)


def _nibble_scales(offset: int) -> Any:
    """2 n + 1 of the 4-bit numbers from `offset` on, low nibbles first."""

    @numba.njit
    def scale(s: int, j: int) -> Any:
        return ((u8(s + offset + (j >> 1)) >> (4 * (j & 1))) & 15) * 2 + 1

    return scale


@numba.njit
def _two_bits(packed: Any) -> Any:
    """16 bits to eight bytes of two bits."""
    x = (packed | (packed << 24)) & 0x000000FF000000FF
    x = (x | (x << 12)) & 0x000F000F000F000F
    return (x | (x << 6)) & 0x0303030303030303


def _spread(signs: NDArray[np.uint8]) -> Any:
    """baked: for each of the bytes given, its bits as eight bytes of 0 or 1."""
    return baked(np.unpackbits(signs[:, None], axis=1, bitorder="little").tobytes())


_BITS = _spread(np.arange(256, dtype=np.uint8))
_EVEN_SIGNS = _spread(iquants._even_signs(np.arange(128)).astype(np.uint8))


def _points(name: str) -> Any:
    """baked: the points of a grid as indices of their levels, a byte a coordinate."""
    return baked(np.searchsorted(levels(name), grid(name)).astype(np.uint8).tobytes())


def _signed_table(name: str) -> tuple[int, ...]:
    some = levels(name)
    gap = (0,) * (SIGN[len(some)] - len(some))
    table = (*some, *gap, *(-level for level in some), *gap)
    return table + (0,) * (16 - len(table))


# ---- K-quants and ternary -------------------------------------------------------------------------------------------------------


def _four_planes(offset: int) -> Any:
    """2-bit values of two halves of 128: byte l holds values l, l + 32, l + 64, l + 96."""

    @numba.njit
    def octet(s: int, i: int) -> Any:
        return (load_i64(s + offset + (i >> 4) * 32 + (i & 3) * 8) >> (2 * ((i >> 2) & 3))) & (3 * ONES)

    return octet


@numba.njit
def _q2_k_scale(s: int, j: int) -> Any:
    return u8(s + j) & 15


@numba.njit
def _q2_k_minimum(s: int, j: int) -> Any:
    return u8(s + j) >> 4


_q3_k_low = _four_planes(32)


@numba.njit
def _q3_k_octet(s: int, i: int) -> Any:
    return _q3_k_low(s, i) | (((load_i64(s + (i & 3) * 8) >> (i >> 2)) & ONES) << 2)


@numba.njit
def _q3_k_scale(s: int, j: int) -> Any:
    low = (u8(s + 96 + (j & 7)) >> (4 * (j >> 3))) & 15
    high = (u8(s + 104 + (j & 3)) >> (2 * (j >> 2))) & 3
    return (low | (high << 4)) - 32


@numba.njit
def _times_3(fractions: int) -> Any:
    """Four bytes in 16-bit lanes, each times 3 modulo 256."""
    return (fractions * 3) & _LANES


@numba.njit
def _tq1_0_octet(s: int, i: int) -> Any:
    """Digit n of eight bytes; the last two octets are digits n and n + 1 of four bytes. In 16-bit lanes, even and odd bytes apart."""
    if i < 20:
        word, n = load_i64(s + (i & 3) * 8), i >> 2
    elif i < 30:
        word, n = load_i64(s + 32 + (i & 1) * 8), (i - 20) >> 1
    else:
        word, n = u32(s + 48), (i & 1) * 2
        word |= word << 32
    even, odd = word & _LANES, (word >> 8) & _LANES
    for _ in range(n):
        even, odd = _times_3(even), _times_3(odd)
    if i >= 30:
        even = (even & 0xFFFFFFFF) | (_times_3(even) & -0x100000000)
        odd = (odd & 0xFFFFFFFF) | (_times_3(odd) & -0x100000000)
    return (((even * 3) >> 8) & _LANES) | (((odd * 3) >> 8 & _LANES) << 8)


@numba.njit
def _q1_0_octet(s: int, i: int) -> Any:
    return load_i64(_BITS() + 8 * u8(s + 2 + i)) * 2 + 7 * ONES


@numba.njit
def _q2_0_octet(s: int, i: int) -> Any:
    return _two_bits(u16(s + 2 + 2 * i)) + 7 * ONES


# ---- nibbles of a table ---------------------------------------------------------------------------------------------------------


def _nibbles(offset: int) -> Any:
    """16 bytes for 32 values, the low nibbles first."""

    @numba.njit
    def octet(s: int, i: int) -> Any:
        return (load_i64(s + offset + (i >> 2) * 16 + (i & 1) * 8) >> (4 * ((i >> 1) & 1))) & (15 * ONES)

    return octet


@numba.njit
def _iq4_xs_scale(s: int, j: int) -> Any:
    low = (u8(s + 4 + (j >> 1)) >> (4 * (j & 1))) & 15
    high = (u8(s + 2 + (j >> 2)) >> (2 * (j & 3))) & 3
    return (low | (high << 4)) - 32


_MXFP4_D = baked((fp4.unpack_mxfp4(np.arange(256, dtype=np.uint8)[:, None].repeat(17, 1)).d.view(np.uint32) >> 16).astype("<u2").tobytes())
_NVFP4_D = baked(fp4.unpack_nvfp4(np.arange(256, dtype=np.uint8)[:, None].repeat(36, 1)).d[::4].astype("<f2").tobytes())
"""Bits of the bfloat16 or float16 that each scale byte stands for; all are exact."""


@numba.njit
def _mxfp4_d(s: int, j: int) -> Any:
    return u16(_MXFP4_D() + 2 * u8(s))


@numba.njit
def _nvfp4_d(s: int, j: int) -> Any:
    return u16(_NVFP4_D() + 2 * u8(s + j))


@numba.njit
def _nvfp4_octet(s: int, i: int) -> Any:
    return (load_i64(s + 4 + (i >> 1) * 8) >> (4 * (i & 1))) & (15 * ONES)


# ---- points of a grid -----------------------------------------------------------------------------------------------------------

_IQ2_XXS, _IQ2_XS, _IQ2_S, _IQ3_XXS, _IQ3_S, _IQ1 = map(_points, ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1"))


@numba.njit
def _iq2_xxs_octet(s: int, i: int) -> Any:
    at = s + 2 + (i >> 2) * 8
    signs = (u32(at + 4) >> (7 * (i & 3))) & 127
    return load_i64(_IQ2_XXS() + 8 * u8(at + (i & 3))) | (load_i64(_EVEN_SIGNS() + 8 * signs) << 2)


@numba.njit
def _iq2_xxs_scale(s: int, j: int) -> Any:
    return (u32(s + 6 + 8 * j) >> 28) * 2 + 1


@numba.njit
def _iq2_xs_octet(s: int, i: int) -> Any:
    both = u16(s + 2 + 2 * i)
    return load_i64(_IQ2_XS() + 8 * (both & 511)) | (load_i64(_EVEN_SIGNS() + 8 * (both >> 9)) << 2)


@numba.njit
def _iq2_s_octet(s: int, i: int) -> Any:
    index = u8(s + 2 + i) | (((u8(s + 66 + (i >> 2)) >> (2 * (i & 3))) & 3) << 8)
    return load_i64(_IQ2_S() + 8 * index) | (load_i64(_BITS() + 8 * u8(s + 34 + i)) << 2)


@numba.njit
def _iq3_xxs_octet(s: int, i: int) -> Any:
    low = u32(_IQ3_XXS() + 4 * u8(s + 2 + 2 * i))
    high = u32(_IQ3_XXS() + 4 * u8(s + 3 + 2 * i))
    signs = (u32(s + 66 + (i >> 2) * 4) >> (7 * (i & 3))) & 127
    return low | (high << 32) | (load_i64(_EVEN_SIGNS() + 8 * signs) << 3)


@numba.njit
def _iq3_xxs_scale(s: int, j: int) -> Any:
    return (u32(s + 66 + 4 * j) >> 28) * 2 + 1


@numba.njit
def _iq3_s_octet(s: int, i: int) -> Any:
    ninth = u8(s + 66 + (i >> 2)) >> (2 * (i & 3))
    low = u32(_IQ3_S() + 4 * (u8(s + 2 + 2 * i) | ((ninth & 1) << 8)))
    high = u32(_IQ3_S() + 4 * (u8(s + 3 + 2 * i) | ((ninth & 2) << 7)))
    return low | (high << 32) | (load_i64(_BITS() + 8 * u8(s + 74 + i)) << 3)


@numba.njit
def _iq1_s_octet(s: int, i: int) -> Any:
    high = u16(s + 34 + (i >> 2) * 2)
    index = u8(s + 2 + i) | (((high >> (3 * (i & 3))) & 7) << 8)
    return load_i64(_IQ1() + 8 * index) | ((high >> 15) * (4 * ONES))


@numba.njit
def _iq1_s_scale(s: int, j: int) -> Any:
    return ((u16(s + 34 + 2 * j) >> 12) & 7) * 2 + 1


@numba.njit
def _iq1_m_octet(s: int, i: int) -> Any:
    high = (u8(s + 32 + (i >> 1)) >> (4 * (i & 1))) & 15
    return load_i64(_IQ1() + 8 * (u8(s + i) | ((high & 7) << 8))) | ((high >> 3) * (4 * ONES))


@numba.njit
def _iq1_m_scale(s: int, j: int) -> Any:
    return ((u16(s + 48 + (j >> 2) * 2) >> (3 * (j & 3))) & 7) * 2 + 1


@numba.njit
def _iq1_m_d(s: int, j: int) -> Any:
    bits = i64(0)
    for i in range(4):
        bits |= (u8(s + 49 + 2 * i) >> 4) << (4 * i)
    return bits


_IQ1_TABLE = (-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""8 * {-1, 0, 1}, one up, or from index 4 on one down."""


# ---- all of them ----------------------------------------------------------------------------------------------------------------


def _counting(first: int) -> tuple[int, ...]:
    return tuple(range(first, first + 16))


def _table(values: NDArray[np.int8]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


OCTETS: dict[str, Octets] = {
    o.name: o
    for o in (
        Octets("Q2_K", "256", 16, _counting(0), _four_planes(16), _half_at(80), False, 1.0, _q2_k_scale, _q2_k_minimum, _half_at(82), 2),
        Octets("Q3_K", "256", 16, _counting(-4), _q3_k_octet, _half_at(108), scale=_q3_k_scale, bits=3),
        Octets("TQ1_0", "256", 32, _counting(-1), _tq1_0_octet, _half_at(52), scale=_one, bits=2),
        Octets("TQ2_0", "256", 32, _counting(-1), _four_planes(0), _half_at(64), scale=_one, bits=2),
        Octets("IQ4_XS", "256", 32, _table(iquants.NONLINEAR), _nibbles(8), _half_at(0), scale=_iq4_xs_scale),
        Octets("IQ2_XXS", "256", 32, _signed_table("iq2_xxs"), _iq2_xxs_octet, _half_at(0), factor=1 / 8, scale=_iq2_xxs_scale, bits=3),
        Octets("IQ2_XS", "256", 16, _signed_table("iq2_xs"), _iq2_xs_octet, _half_at(0), factor=1 / 8, scale=_nibble_scales(66), bits=3),
        Octets("IQ2_S", "256", 16, _signed_table("iq2_s"), _iq2_s_octet, _half_at(0), factor=1 / 8, scale=_nibble_scales(74), bits=3),
        Octets("IQ3_XXS", "256", 32, _signed_table("iq3_xxs"), _iq3_xxs_octet, _half_at(0), factor=1 / 4, scale=_iq3_xxs_scale),
        Octets("IQ3_S", "256", 32, _signed_table("iq3_s"), _iq3_s_octet, _half_at(0), scale=_nibble_scales(106)),
        Octets("IQ1_S", "256", 32, _IQ1_TABLE, _iq1_s_octet, _half_at(0), factor=1 / 8, scale=_iq1_s_scale, bits=3),
        Octets("IQ1_M", "256", 16, _IQ1_TABLE, _iq1_m_octet, _iq1_m_d, factor=1 / 8, scale=_iq1_m_scale, bits=3),
        Octets("IQ4_NL", "32", 32, _table(iquants.NONLINEAR), _nibbles(2), _half_at(0)),
        Octets("MXFP4", "32", 32, _table(fp4.E2M1_DOUBLED), _nibbles(1), _mxfp4_d, brain=True),
        Octets("NVFP4", "32", 16, _table(fp4.E2M1_DOUBLED), _nvfp4_octet, _nvfp4_d),
        Octets("Q1_0", "32", 128, _counting(-8), _q1_0_octet, _half_at(0)),
        Octets("Q2_0", "32", 64, _counting(-8), _q2_0_octet, _half_at(0)),
    )
}
"""By type name."""


# ---- packing --------------------------------------------------------------------------------------------------------------------


@numba.njit
def _store_word(target: int, value: int) -> None:
    """Two words of a row of a group, one under the other."""
    store_scalar(target, numba.int32(value))
    store_scalar(target + 64, numba.int32(value >> 32))


def _row_packer_32(o: Octets) -> Any:
    form = BY_NAME[o.name]
    octet, d16, size, ratio = o.octet, o.d16, form.block_bytes, form.block // 32
    quants, scales, halves = o.quants, o.scales, o.sub == 16

    @numba.njit
    def rows(source: int, n_blocks: int, target: int, row: int) -> None:
        for b in range(n_blocks):
            s = source + b // ratio * size
            part = b % ratio
            t = target + b * quants + row * 4
            u = target + n_blocks * quants + b * scales + row * 2
            _store_word(t, octet(s, part * 4) | (octet(s, part * 4 + 2) << 4))
            _store_word(t + 128, octet(s, part * 4 + 1) | (octet(s, part * 4 + 3) << 4))
            if halves:
                store_scalar(u, numba.uint16(d16(s, 2 * part)))
                store_scalar(u + 32, numba.uint16(d16(s, 2 * part + 1)))
            else:
                store_scalar(u, numba.uint16(d16(s, part)))

    return rows


def _quants_packer(o: Octets) -> Any:
    """(block, target, row): the indices of a block of 256 to a group."""
    octet, quants, third_bits = o.octet, o.quants, o.bits == 3

    @numba.njit
    def nibbles(s: int, target: int, row: int) -> None:
        for i in range(16):  # two words each
            k = (i >> 1) * 4 + (i & 1)
            _store_word(target + i * 128 + row * 4, octet(s, k) | (octet(s, k + 2) << 4))

    @numba.njit
    def two_bits(s: int, target: int, row: int) -> None:
        for i in range(8):
            k = (i >> 1) * 8 + (i & 1)
            word = octet(s, k) & (3 * ONES)
            for field in range(1, 4):
                word |= (octet(s, k + 2 * field) & (3 * ONES)) << (2 * field)
            _store_word(target + i * 128 + row * 4, word)
        if third_bits:
            for i in range(4):
                k = (i >> 1) * 16 + (i & 1)
                word = i64(0)
                for field in range(8):
                    word |= ((octet(s, k + 2 * field) >> 2) & ONES) << field
                _store_word(target + 1024 + i * 128 + row * 4, word)

    return nibbles if quants == 2048 else two_bits


def _row_packer_256(o: Octets) -> Any:
    d16, scale, size = o.d16, o.scale, BY_NAME[o.name].block_bytes
    pack_quants, quants = _quants_packer(o), o.quants
    step, subs = o.quants + o.scales, 256 // o.sub
    with_min = o.minimum is not None
    minimum, dmin16 = (o.minimum, o.dmin16) if with_min else (o.scale, o.d16)

    @numba.njit
    def rows(source: int, n_blocks: int, target: int, row: int) -> None:
        for b in range(n_blocks):
            s = source + b * size
            t = target + b * step
            pack_quants(s, t, row)
            t += quants
            for j in range(subs):
                store_scalar(t + (j >> 1) * 32 + row * 2 + (j & 1), numba.int8(scale(s, j)))
            t += subs * 16
            if with_min:
                for j in range(subs):
                    store_scalar(t + (j >> 1) * 32 + row * 2 + (j & 1), numba.int8(minimum(s, j)))
                t += subs * 16
            store_scalar(t + row * 2, numba.uint16(d16(s, 0)))
            if with_min:
                store_scalar(t + 32 + row * 2, numba.uint16(dmin16(s, 0)))

    return rows


def octet_packer(name: str) -> Any:
    """A compiled function (source row, blocks, target group, row in group) that packs one row of such a type, see pack.py."""
    o = OCTETS[name]
    return _row_packer_256(o) if o.kind == "256" else _row_packer_32(o)
