"""Weights as the matmul kernels read them: sixteen rows interleaved.

Rows come in groups of 16 (the last group is filled up with zeros). Inside a group the quant bytes of all rows are cut into 4-byte words,
and word i of the 16 rows lie side by side: one 64-byte load holds four successive k-values (or eight, as nibbles) of 16 rows, and a
dot-product instruction against four broadcast activation bytes needs no horizontal sum. Scales are spread to whole bytes beside them.

    kind '256' (K-quants), per group and super-block of 256 values, LAYOUT[name] bytes:
        Q4_K   32 x 64 nibbles | 8 x 16 scales u8 | 4 x (16 x 2) mins u8 | 16 d f16 | 16 dmin f16
        Q5_K   32 x 64 nibbles | 8 x 64 fifth bits | as Q4_K
        Q6_K   32 x 64 nibbles | 16 x 64 high bits | 8 x (16 x 2) scales i8 | 16 d f16 | pad 32
    kind '32', per group: all quants of the row group, then all scales, GROUP bytes a block each:
        Q4_0   4 x 64 nibbles            | 16 d f16
        Q4_1   4 x 64 nibbles            | 16 d f16 | 16 m f16
        Q5_0   4 x 64 nibbles | 64 bits  | 16 d f16        (byte i, bit g: fifth bit of value 4 g + i)
        Q5_1   4 x 64 nibbles | 64 bits  | 16 d f16 | 16 m f16
        Q8_0   8 x 64 bytes + 128        | 16 d f16
    kind 'f': F32, F16, BF16: per k, 16 values in the file's type
    all others (octets.py), by the bits of an index
        4   32 values at a time: 4 x 64 nibbles, the low ones the first 16 values, the high ones the rest
        2   (Q2_K, TQ1_0, TQ2_0) 64 values at a time: 4 x 64 bytes of four 2-bit values, the lowest bits the first 16, and so on
        3   (Q3_K, IQ2, IQ1) 16 x 64 as for 2 bits | 8 x 64 third bits, 128 values at a time, the lowest bits the first 16, and so on
        kind '256'   quants | 8 or 4 x (16 x 2) scales i8 | likewise mins u8, if any | 16 d f16 | 16 dmin f16, if any | room to 64
        kind '32'    4 x 64 nibbles            | 16 d f16 (bfloat16 for MXFP4), twice where 16 values have one

Word order inside a block is the file's: packing is a transposition, the arithmetic knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.formats import BY_NAME, Format
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS, octet_packer
from localrun.kernels_cpu.simd import load_i32, load_i64, load_u8, store_scalar
from localrun.kernels_cpu.sizes import PACKINGS


@numba.njit
def _word(source: int, target: int) -> None:
    store_scalar(target, load_i32(source))


@numba.njit
def _half(source: int, target: int) -> None:
    store_scalar(target, load_u8(source))
    store_scalar(target + 1, load_u8(source + 1))


@numba.njit
def _words(source: int, target: int, first: int, count: int, row: int) -> None:
    """Words 0..count-1 of one row's block to the words first, first+1, ... of the group."""
    for i in range(count):
        _word(source + 4 * i, target + ((first + i) * 16 + row) * 4)


@numba.njit
def _fifth_bits(source: int, target: int) -> None:
    """ggml keeps bit k of value k in a 32-bit word; the kernels want byte i, bit g for value 4 g + i."""
    bits = numba.int64(load_i32(source)) & 0xFFFFFFFF
    for i in range(4):
        byte = 0
        for g in range(8):
            byte |= ((bits >> (4 * g + i)) & 1) << g
        store_scalar(target + i, numba.uint8(byte))


@numba.njit
def _k_scales(scales: int, target: int, row: int) -> None:
    """The 12 bytes of eight 6-bit scales and mins (Q4_K, Q5_K): scales one vector a sub-block, mins in pairs of sub-blocks."""
    for j in range(8):
        if j < 4:
            sc = load_u8(scales + j) & 63
            m = load_u8(scales + j + 4) & 63
        else:
            high = load_u8(scales + j + 4)
            sc = (high & 15) | ((load_u8(scales + j - 4) >> 6) << 4)
            m = (high >> 4) | ((load_u8(scales + j) >> 6) << 4)
        store_scalar(target + j * 16 + row, numba.uint8(sc))
        store_scalar(target + 128 + (j >> 1) * 32 + row * 2 + (j & 1), numba.uint8(m))


def _rows_q4_k(high_bits: bool) -> Any:
    @numba.njit
    def rows(source: int, n_blocks: int, target: int, row: int) -> None:
        step = 2880 if high_bits else 2368
        size = 176 if high_bits else 144
        for b in range(n_blocks):
            s = source + b * size
            t = target + b * step
            quants = s + (48 if high_bits else 16)
            scales = t + (2560 if high_bits else 2048)
            _words(quants, t, 0, 32, row)
            if high_bits:
                _words(s + 16, t, 32, 8, row)
            _k_scales(s + 4, scales, row)
            _half(s, scales + 256 + row * 2)
            _half(s + 2, scales + 288 + row * 2)

    return rows


@numba.njit
def _rows_q6_k(source: int, n_blocks: int, target: int, row: int) -> None:
    for b in range(n_blocks):
        s = source + b * 210
        t = target + b * 3392
        _words(s, t, 0, 48, row)
        for j in range(16):
            store_scalar(t + 3072 + (j >> 1) * 32 + row * 2 + (j & 1), load_u8(s + 192 + j))
        _half(s + 208, t + 3328 + row * 2)


def _rows_32(fmt: Format, five_bits: bool, with_min: bool) -> Any:
    packing = PACKINGS[fmt.id]
    size, quants, scales = fmt.block_bytes, packing.quants, packing.scales
    header = 4 if with_min else 2
    nibbles = header + (4 if five_bits else 0)

    @numba.njit
    def rows(source: int, n_blocks: int, target: int, row: int) -> None:
        for b in range(n_blocks):
            s = source + b * size
            t = target + b * quants
            u = target + n_blocks * quants + b * scales
            _words(s + nibbles, t, 0, 4, row)
            if five_bits:
                _fifth_bits(s + header, t + 256 + row * 4)
            _half(s, u + row * 2)
            if with_min:
                _half(s + 2, u + 32 + row * 2)

    return rows


@numba.njit
def _rows_q8_0(source: int, n_blocks: int, target: int, row: int) -> None:
    for b in range(n_blocks):
        s = source + b * 34
        t = target + b * 512
        for i in range(8):
            word = load_i32(s + 2 + 4 * i) ^ numba.int32(-2139062144)  # every byte plus 128
            store_scalar(t + (i * 16 + row) * 4, numba.int32(word))
        _half(s, target + n_blocks * 512 + b * 32 + row * 2)


def _rows_float(size: int) -> Any:
    @numba.njit
    def rows(source: int, n_blocks: int, target: int, row: int) -> None:
        for k in range(n_blocks):
            if size == 4:
                _word(source + k * 4, target + (k * 16 + row) * 4)
            else:
                _half(source + k * 2, target + (k * 16 + row) * 2)

    return rows


def row_packer(type_name: str) -> Any:
    """A compiled function (source row, blocks, target group, row in group) that packs one row."""
    fmt = BY_NAME[type_name]
    if type_name in OCTETS:
        return octet_packer(type_name)
    if type_name in ("Q4_K", "Q5_K"):
        return _rows_q4_k(type_name == "Q5_K")
    if type_name == "Q6_K":
        return _rows_q6_k
    if type_name == "Q8_0":
        return _rows_q8_0
    if type_name in ("F32", "F16", "BF16"):
        return _rows_float(fmt.block_bytes)
    return _rows_32(fmt, type_name in ("Q5_0", "Q5_1"), type_name in ("Q4_1", "Q5_1"))


def group_packer(type_name: str) -> Any:
    """A compiled function (first source row, bytes of a source row, rows left, blocks, bytes of a group, target) that packs one group."""
    pack_row = row_packer(type_name)

    @numba.njit
    def pack_group(source: int, row_bytes: int, n_rows: int, n_blocks: int, group_bytes: int, target: int) -> None:
        if n_rows < 16:
            for i in range(group_bytes >> 2):
                store_scalar(target + 4 * i, numba.int32(0))
        for row in range(min(n_rows, 16)):
            pack_row(source + row * row_bytes, n_blocks, target, row)

    return pack_group


def pack(isa: Isa, type_name: str) -> Any:
    """Kernel: packs rows of a tensor.

    args: 0 source, 1 bytes of a source row, 2 rows, 3 blocks in a row, 4 bytes of a group, 5 target, 6 groups a chunk.
    """
    pack_group = group_packer(type_name)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        source = load_i64(args)
        row_bytes = load_i64(args + 8)
        n_rows = load_i64(args + 16)
        n_blocks = load_i64(args + 24)
        group_bytes = load_i64(args + 32)
        target = load_i64(args + 40)
        per_chunk = load_i64(args + 48)
        first = chunk * per_chunk
        for group in range(first, min(first + per_chunk, (n_rows + 15) >> 4)):
            row = group * 16
            pack_group(source + row * row_bytes, row_bytes, n_rows - row, n_blocks, group_bytes, target + group * group_bytes)

    return kernel
