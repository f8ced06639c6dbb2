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
from localrun.kernels_cpu.simd import i32_to_i16, load_i32x16, load_i64, load_u8, pick, store, store_scalar, tile_store_all
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_cpu.transpose import byte_pairs, bytes_apart, halves_apart, turned

LOW_6, LOW_4, HIGH_2 = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
PLUS_128 = -0x7F7F7F80
"""0x80 in every byte: xored to signed bytes it adds 128."""

# A packer is a compiled function (source, stride, last, n_blocks, target): rows 0..last of a group, at most 15, `stride` bytes apart.


def _k_packer(type_name: str) -> Any:
    """Q4_K and Q5_K. A row's block: d, dmin, 12 bytes of eight 6-bit scales and mins, fifth bits, nibbles."""
    high_bits = type_name == "Q5_K"
    step, size = (2880, 176) if high_bits else (2368, 144)

    @numba.njit
    def scales(source: int, stride: int, last: int, target: int) -> None:
        words = turned(source, stride, last, 4, 0)
        a, b, c = pick(words, 1), pick(words, 2), pick(words, 3)
        store(target, bytes_apart(a & LOW_6))
        store(target + 64, bytes_apart((c & LOW_4) | ((a >> 2) & HIGH_2)))
        store(target + 128, byte_pairs(b & LOW_6))
        store(target + 192, byte_pairs(((c >> 4) & LOW_4) | ((b >> 2) & HIGH_2)))
        store(target + 256, halves_apart(pick(words, 0)))

    @numba.njit
    def group(source: int, stride: int, last: int, n_blocks: int, target: int) -> None:
        for b in range(n_blocks):
            s = source + b * size
            t = target + b * step
            for i in range(2):
                tile_store_all(turned(s + size - 128 + 64 * i, stride, last, 16, 0), t + 1024 * i, 64)
            if high_bits:
                tile_store_all(turned(s + 16, stride, last, 8, 0), t + 2048, 64)
            scales(s, stride, last, t + step - 320)

    return group


@numba.njit
def _q6_k(source: int, stride: int, last: int, n_blocks: int, target: int) -> None:
    for b in range(n_blocks):
        s = source + b * 210
        t = target + b * 3392
        for i in range(3):
            tile_store_all(turned(s + 64 * i, stride, last, 16, 0), t + 1024 * i, 64)
        scales = turned(s + 192, stride, last, 4, 0)
        store(t + 3072, byte_pairs(pick(scales, 0)))
        store(t + 3136, byte_pairs(pick(scales, 1)))
        store(t + 3200, byte_pairs(pick(scales, 2)))
        store(t + 3264, byte_pairs(pick(scales, 3)))
        store(t + 3328, i32_to_i16(pick(turned(s + 206, stride, last, 1, 0), 0) >> 16))


@numba.njit
def _fifth_bits(bits: Any) -> Any:
    """ggml keeps bit k of value k in a 32-bit word; the kernels want byte i, bit g for value 4 g + i.

    So the lowest two binary digits of a bit's number become its highest. Two digits are exchanged by moving the bits that have the lower
    one only up by the difference, those that have the higher one only down (delta swaps: Knuth, The Art of Computer Programming, 7.1.3).
    """
    t = (bits ^ (bits >> 14)) & 0x0000CCCC  # digits 4 and 1
    bits = bits ^ t ^ (t << 14)
    t = (bits ^ (bits >> 7)) & 0x00AA00AA  # 3 and 0
    bits = bits ^ t ^ (t << 7)
    t = (bits ^ (bits >> 2)) & 0x0C0C0C0C  # 2 and 1
    bits = bits ^ t ^ (t << 2)
    t = (bits ^ (bits >> 1)) & 0x22222222  # 1 and 0
    return bits ^ t ^ (t << 1)


def _32_packer(fmt: Format) -> Any:
    """Q4_0 to Q5_1 and Q8_0. A row's block: d, min, fifth bits, 16 bytes of nibbles or 32 of values."""
    packing = PACKINGS[fmt.id]
    five_bits, with_min = fmt.name in ("Q5_0", "Q5_1"), fmt.name in ("Q4_1", "Q5_1")
    size, quants, scales = fmt.block_bytes, packing.quants, packing.scales
    header = 4 if with_min else 2
    words, flip = (8, PLUS_128) if fmt.name == "Q8_0" else (4, 0)

    @numba.njit
    def group(source: int, stride: int, last: int, n_blocks: int, target: int) -> None:
        for b in range(n_blocks):
            s = source + b * size
            t = target + b * quants
            u = target + n_blocks * quants + b * scales
            tile_store_all(turned(s + size - words * 4, stride, last, words, flip), t, 64)
            if five_bits:
                store(t + 256, _fifth_bits(pick(turned(s + header, stride, last, 1, 0), 0)))
            d = pick(turned(s, stride, last, 1, 0), 0)
            if with_min:
                store(u, halves_apart(d))
            else:
                store(u, i32_to_i16(d))

    return group


def _float_packer(size: int) -> Any:
    """Values of 4 or 2 bytes."""

    @numba.njit
    def group(source: int, stride: int, last: int, n_blocks: int, target: int) -> None:
        whole = n_blocks * size // 64
        for i in range(whole):
            t = target + i * 1024
            tile_store_all(turned(source + i * 64, stride, last, 16, 0), t, 64)
            if size == 2:
                for at in range(t, t + 1024, 64):
                    store(at, halves_apart(load_i32x16(at)))
        for k in range(whole * 64 // size, n_blocks):
            for row in range(last + 1):
                for byte in range(size):
                    store_scalar(target + (k * 16 + row) * size + byte, load_u8(source + row * stride + k * size + byte))

    return group


def _octet_group(type_name: str) -> Any:
    pack_row = octet_packer(type_name)

    @numba.njit
    def group(source: int, stride: int, last: int, n_blocks: int, target: int) -> None:
        for row in range(last + 1):
            pack_row(source + row * stride, n_blocks, target, row)

    return group


def _packer(type_name: str) -> Any:
    if type_name in OCTETS:
        return _octet_group(type_name)
    if type_name in ("Q4_K", "Q5_K"):
        return _k_packer(type_name)
    if type_name == "Q6_K":
        return _q6_k
    if type_name in ("F32", "F16", "BF16"):
        return _float_packer(BY_NAME[type_name].block_bytes)
    return _32_packer(BY_NAME[type_name])


def group_packer(type_name: str) -> Any:
    """A compiled function (first source row, bytes of a source row, rows left, blocks, bytes of a group, target) that packs one group."""
    packed = _packer(type_name)

    @numba.njit
    def pack_group(source: int, row_bytes: int, n_rows: int, n_blocks: int, group_bytes: int, target: int) -> None:
        if n_rows < 16:
            for i in range(group_bytes >> 2):
                store_scalar(target + 4 * i, numba.int32(0))
        packed(source, row_bytes, min(n_rows, 16) - 1, n_blocks, target)

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
