"""Quantized matrix multiplication: out[t, r] = sum over k of W[r, k] * x[t, k].

One kernel a tensor type. A *tile* is 16 rows of W (a packed group, see pack.py) against 1, 2, 4 or 8 tokens: integers inside a block,
float32 across blocks. The order of operations of one result is the same in every tile, so a token's bits do not depend on how many
others are in the batch:

    kind '256'   for each super-block: S = sum_j scale_j * dot_j, M = sum_j min_j * sum_j(x), both exact integers
                 acc = fma(fma(M, -dmin, S * d), dx, acc)
    kind '32'    for each block: acc = fma(dot * dx, d, acc); with mins: acc = fma(m, dx * sum(x), acc)
    kind 'f'     four partial sums over k mod 4, each by fma, added as (p0 + p1) + (p2 + p3)

Activations are quantized by activations.py; their layout is there.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import amx
from localrun.kernels_cpu.activation_sizes import META, SUPER
from localrun.kernels_cpu.amx_sizes import MOST_GROUPS, MOST_TOKENS
from localrun.kernels_cpu.fetch import FIRST_LINES, fetch_both, fetcher, prefetch_far, split_fetcher
from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS
from localrun.kernels_cpu.pack import group_packer
from localrun.kernels_cpu.simd import (
    bits_f32,
    bytes_of,
    f16_to_f32,
    i8_to_i16,
    load_f16x16,
    load_f32x16,
    load_i8x16,
    load_i8x32,
    load_i16x16,
    load_i64,
    load_u8x64,
    sar,
    splat_f32,
    tile_fma,
    tile_mul,
    tile_scale_add,
    tile_store,
    tile_to_f32,
    u8_to_i16,
    u8_to_i32,
    u16_to_i32,
    words_of,
    words_of_pairs,
    zeros_f32,
    zeros_i32,
)
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_cpu.tiles_table import table_tile
from localrun.kernels_cpu.token_rows import rows_f32, rows_from, rows_i32

PANEL = 1 << 20
"""Bytes of activations that are worked on together."""

FEW_REGISTERS = ("avx2", "avxvnni", "neon")
"""Instruction sets whose registers hold the sums of 4 tokens and not of 8: those would go to memory and back with each multiplication."""

# ---- tiles of kind '256' ------------------------------------------------------------------------------------------------------


def _tile_q4_k(isa: Isa, tokens: int, high_bits: bool) -> Any:
    dot4, dot2 = isa.ops.tile_dot4, isa.ops.tile_dot2
    step = 2880 if high_bits else 2368
    scales = 2560 if high_bits else 2048
    fetch = fetcher(step)
    weigh = tile_scale_add if high_bits else isa.ops.tile_weigh
    apart = isa.name in FEW_REGISTERS and tokens == 4

    @numba.njit
    def one_side(w: int, fifth_at: int, shift: int, fifth_shift: int, x: Any) -> Any:
        """Dot products of 32 values: the upper or the lower halves of bytes, so that only one set of sums is in registers."""
        sums = zeros_i32(tokens)
        for g in range(8):
            a = (load_u8x64(w + g * 64) >> shift) & 15
            if high_bits:
                a = a | (bytes_of((words_of(load_u8x64(fifth_at + g * 64)) >> fifth_shift) << 4) & 16)
            sums = dot4(sums, a, x + g * 4)
        return sums

    @numba.njit
    def tile(w: int, n: int, at: int, stride: int) -> Any:
        x = rows_from(at, stride, tokens)
        acc = zeros_f32(tokens)
        for _ in range(n):
            total = zeros_i32(tokens)
            for j in range(4):
                if apart:
                    for line in range(8):
                        fetch(w + j * 512 + line * 64)
                    v = w + j * 512
                    low = one_side(v, w + 2048, 0, 2 * j, x + j * 64)
                    total = weigh(total, low, u8_to_i32(load_i8x16(w + scales + j * 32)))
                    high = one_side(v, w + 2048, 4, 2 * j + 1, x + j * 64 + 32)
                    total = weigh(total, high, u8_to_i32(load_i8x16(w + scales + j * 32 + 16)))
                    continue
                fetch(w + 2048 + j * 64)
                if high_bits:
                    fetch(w + 2304 + j * 64)
                    fetch(w + 2560 + j * 64)
                low = zeros_i32(tokens)
                high = zeros_i32(tokens)
                for g in range(8):
                    fetch(w + (j * 8 + g) * 64)
                    nibbles = load_u8x64(w + (j * 8 + g) * 64)
                    a = nibbles & 15
                    b = (nibbles >> 4) & 15
                    if high_bits:
                        fifth = words_of(load_u8x64(w + 2048 + g * 64)) >> (2 * j)
                        a = a | (bytes_of(fifth << 4) & 16)
                        b = b | (bytes_of(fifth << 3) & 16)
                    low = dot4(low, a, x + j * 64 + g * 4)
                    high = dot4(high, b, x + j * 64 + 32 + g * 4)
                total = weigh(total, low, u8_to_i32(load_i8x16(w + scales + j * 32)))
                total = weigh(total, high, u8_to_i32(load_i8x16(w + scales + j * 32 + 16)))
            fetch(w + step - 64)
            mins = zeros_i32(tokens)
            for j in range(4):
                mins = dot2(mins, u8_to_i16(load_i8x32(w + scales + 128 + j * 32)), x + 264 + j * 4)
            d = f16_to_f32(load_f16x16(w + scales + 256))
            dmin = f16_to_f32(load_f16x16(w + scales + 288))
            value = tile_fma(tile_mul(tile_to_f32(total), d), tile_to_f32(mins), dmin * numba.float32(-1.0))
            acc = tile_fma(acc, value, rows_f32(x + 256))
            w += step
            x += SUPER
        return acc

    return tile


def _tile_q6_k(isa: Isa, tokens: int) -> Any:
    dot4, weigh = isa.ops.tile_dot4, isa.ops.tile_weigh
    fetch = fetcher(3392)

    @numba.njit
    def tile(w: int, n: int, at: int, stride: int) -> Any:
        x = rows_from(at, stride, tokens)
        acc = zeros_f32(tokens)
        for _ in range(n):
            total = zeros_i32(tokens)
            for part in range(8):  # half of 128 values (2) x first or second 16 of each 32 (2) x lower or upper 32 of a byte pair (2)
                if part & 1:
                    fetch(w + 3072 + (part >> 1) * 64)
                half, side, pair = part >> 2, (part >> 1) & 1, part & 1
                k = half * 128 + pair * 32 + side * 16
                first = rows_i32(x + 320 + k // 4)
                second = rows_i32(x + 336 + k // 4)
                for g in range(4):
                    fetch(w + (half * 16 + pair * 8 + side * 4 + g) * 64)
                    if not pair:
                        fetch(w + 2048 + (half * 8 + side * 4 + g) * 64)
                    nibbles = load_u8x64(w + (half * 16 + pair * 8 + side * 4 + g) * 64)
                    top = words_of(load_u8x64(w + 2048 + (half * 8 + side * 4 + g) * 64)) >> (2 * pair)
                    a = (nibbles & 15) | (bytes_of(top << 4) & 48)
                    b = ((nibbles >> 4) & 15) | (bytes_of(top) & 48)
                    first = dot4(first, a, x + k + g * 4)
                    second = dot4(second, b, x + k + 64 + g * 4)
                pairs = w + 3072 + (half * 4 + pair) * 32
                lanes_a = words_of_pairs(i8_to_i16(load_i8x32(pairs)))
                lanes_b = words_of_pairs(i8_to_i16(load_i8x32(pairs + 64)))
                shift = 16 - 16 * side
                total = weigh(total, first, sar(lanes_a << shift, 16))
                total = weigh(total, second, sar(lanes_b << shift, 16))
            fetch(w + 3328)
            d = f16_to_f32(load_f16x16(w + 3328))
            acc = tile_fma(acc, tile_mul(tile_to_f32(total), d), rows_f32(x + 256))
            w += 3392
            x += SUPER
        return acc

    return tile


# ---- tiles of kind '32' -------------------------------------------------------------------------------------------------------


def _tile_32(isa: Isa, type_name: str, tokens: int) -> Any:
    packing = PACKINGS[BY_NAME[type_name].id]
    quants, scales = packing.quants, packing.scales
    five_bits = type_name in ("Q5_0", "Q5_1")
    with_min = type_name in ("Q4_1", "Q5_1")
    offset = {"Q4_0": 8, "Q5_0": 12}.get(type_name, 0)
    dot4 = isa.ops.tile_dot4
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
            dots = zeros_i32(tokens)
            if not with_min:
                dots = rows_i32(meta + offset)
            if five_bits:
                fetch_both(far + 256, near + 256)
                bits = words_of(load_u8x64(w + 256))
            for g in range(4):
                fetch_both(far + g * 64, near + g * 64)
                nibbles = load_u8x64(w + g * 64)
                a = nibbles & 15
                b = (nibbles >> 4) & 15
                if five_bits:
                    a = a | (bytes_of((bits >> g) << 4) & 16)
                    b = b | (bytes_of(bits >> g) & 16)
                dots = dot4(dots, a, x + g * 4)
                dots = dot4(dots, b, x + 16 + g * 4)
            scaled = tile_mul(tile_to_f32(dots), rows_f32(meta))
            acc = tile_fma(acc, scaled, f16_to_f32(load_f16x16(u)))
            if with_min:
                acc = tile_fma(acc, rows_f32(meta + 4), f16_to_f32(load_f16x16(u + 32)))
            w += quants
            u += scales
            x += 32
            meta += META
        return acc

    return tile


def _tile_q8_0(isa: Isa, tokens: int) -> Any:
    dot4 = isa.ops.tile_dot4_full
    ahead = split_fetcher(512, 32)

    @numba.njit
    def tile(w: int, n: int, at: int, stride: int) -> Any:
        x = rows_from(at, stride, tokens)
        acc = zeros_f32(tokens)
        end = w + n * 512
        u = end
        meta = x + ((n * 32 + 63) & -64)
        for _ in range(n):
            far, near = ahead(w, u, end, n)
            dots = rows_i32(meta + 16)
            for g in range(8):
                fetch_both(far + g * 64, near + g * 64)
                dots = dot4(dots, load_u8x64(w + g * 64), x + g * 4)
            scaled = tile_mul(tile_to_f32(dots), rows_f32(meta))
            acc = tile_fma(acc, scaled, f16_to_f32(load_f16x16(u)))
            w += 512
            u += 32
            x += 32
            meta += META
        return acc

    return tile


# ---- tiles of kind 'f' --------------------------------------------------------------------------------------------------------


def _tile_float(isa: Isa, type_name: str, tokens: int) -> Any:
    @numba.njit
    def column(w: int) -> Any:
        if type_name == "F32":
            return load_f32x16(w)
        if type_name == "F16":
            return f16_to_f32(load_f16x16(w))
        return bits_f32(u16_to_i32(load_i16x16(w)) << 16)

    size = 64 if type_name == "F32" else 32

    @numba.njit
    def tile(w: int, n: int, at: int, stride: int) -> Any:
        x = rows_from(at, stride, tokens)
        p0 = zeros_f32(tokens)
        p1 = zeros_f32(tokens)
        p2 = zeros_f32(tokens)
        p3 = zeros_f32(tokens)
        k = 0
        while k + 4 <= n:
            p0 = tile_fma(p0, rows_f32(x), column(w))
            p1 = tile_fma(p1, rows_f32(x + 4), column(w + size))
            p2 = tile_fma(p2, rows_f32(x + 8), column(w + 2 * size))
            p3 = tile_fma(p3, rows_f32(x + 12), column(w + 3 * size))
            w += 4 * size
            x += 16
            k += 4
        while k < n:
            p0 = tile_fma(p0, rows_f32(x), column(w))
            w += size
            x += 4
            k += 1
        one = splat_f32(numba.float32(1.0))
        return tile_fma(tile_fma(p1, p0, one), tile_fma(p3, p2, one), one)

    return tile


def make_tile(isa: Isa, type_name: str, tokens: int) -> Any:
    """The compiled tile (packed group, blocks, first token's activations, bytes from token to token) -> Tile of f32x16."""
    if type_name in OCTETS:
        return table_tile(isa, type_name, tokens)
    if type_name in ("Q4_K", "Q5_K"):
        return _tile_q4_k(isa, tokens, type_name == "Q5_K")
    if type_name == "Q6_K":
        return _tile_q6_k(isa, tokens)
    if type_name == "Q8_0":
        return _tile_q8_0(isa, tokens)
    if type_name in ("F32", "F16", "BF16"):
        return _tile_float(isa, type_name, tokens)
    return _tile_32(isa, type_name, tokens)


def make_group(isa: Isa, type_name: str) -> Any:
    """The compiled function (packed group, blocks, activations, bytes between tokens, tokens, out, bytes between tokens of out, bias, add,
    wide_from) that writes one group's results for any number of tokens by plain tiles. bias: address of 16 float32, 0: none; add: whether
    to add; wide_from: see shapes.Shape.
    """
    most = 4 if isa.name in FEW_REGISTERS else 8
    tile1, tile2, tile4 = (make_tile(isa, type_name, n) for n in (1, 2, 4))
    most_tile = tile4 if most == 4 else make_tile(isa, type_name, most)

    @numba.njit
    def group(w: int, n: int, x: int, stride: int, tokens: int, out: int, out_stride: int, bias_at: int, add: int, wide_from: int) -> None:
        bias = splat_f32(numba.float32(0.0))
        if bias_at:
            bias = load_f32x16(bias_at)
        while tokens > 4:
            taken = 4
            if most > 4 and tokens >= wide_from:
                tile_store(most_tile(w, n, x, stride), out, out_stride, tokens, bias, add)
                taken = most
            else:
                tile_store(tile4(w, n, x, stride), out, out_stride, tokens, bias, add)
            x += taken * stride
            out += taken * out_stride
            tokens -= taken
        if tokens > 2:
            tile_store(tile4(w, n, x, stride), out, out_stride, tokens, bias, add)
        elif tokens == 2:
            tile_store(tile2(w, n, x, stride), out, out_stride, tokens, bias, add)
        elif tokens == 1:
            tile_store(tile1(w, n, x, stride), out, out_stride, tokens, bias, add)

    return group


# ---- the kernel ---------------------------------------------------------------------------------------------------------------


def matmul(isa: Isa, type_name: str) -> Any:
    """Kernel: out = W x (+ bias) (+ out), for as many tokens as the step has.

    args: 0 packed weights (or the tensor as the file has it), 1 bytes of a group, 2 blocks in a row, 3 rows, 4 activations,
    5 bytes between tokens, 6 out float32, 7 bytes between tokens of out, 8 groups a chunk, 9 bias float32 (or 0), 10 whether to add to out,
    11 offset in the head of the number of tokens, 12 bytes of a row in the file (0: the weights are packed), 13 scratch,
    14 bytes of scratch a thread, 15 where in it groups are unpacked to, 16 activations as tiles (0: there are none), 17 groups a chunk with
    matrix tiles, 18 from how many tokens on these are used (MANY at least), 19 wide_from, see shapes.Shape. Rows of out, and the bias,
    have room for whole groups of 16; activations for 7 tokens more.
    """
    group = make_group(isa, type_name)
    pack_group = group_packer(type_name)
    use_amx = isa.amx and type_name in amx.SUPPORTED
    many: Any = amx.make_groups(isa, type_name) if use_amx else None
    tile_step = amx.tile_step(type_name)

    @numba.njit
    def few_tokens(args: int, first: int, last: int, tokens: int, unpacked: int) -> None:
        """Groups first..last-1, plain tiles."""
        group_bytes, n_blocks, row_bytes = load_i64(args + 8), load_i64(args + 16), load_i64(args + 96)
        stride, out_stride, bias_at = load_i64(args + 40), load_i64(args + 56), load_i64(args + 72)
        # Activations of a block of tokens stay in the second-level cache while the chunk's groups go by. A group that has to be unpacked
        # first is unpacked once, for all tokens.
        block = tokens
        if tokens > 8 and not row_bytes:
            block = max(PANEL // stride & -32, 32)
        if not row_bytes:
            prefetch_far(load_i64(args) + first * group_bytes, FIRST_LINES)
        for t in range(0, tokens, block):
            for g in range(first, last):
                w = load_i64(args) + g * group_bytes
                if row_bytes:
                    rows = load_i64(args) + g * 16 * row_bytes
                    pack_group(rows, row_bytes, load_i64(args + 24) - g * 16, n_blocks, group_bytes, unpacked)
                    w = unpacked
                group(
                    w, n_blocks, load_i64(args + 32) + t * stride, stride, min(block, tokens - t),
                    load_i64(args + 48) + t * out_stride + g * 64, out_stride, bias_at + g * 64 if bias_at else 0, load_i64(args + 80),
                    load_i64(args + 152),
                )

    @numba.njit
    def many_tokens(args: int, first: int, last: int, tokens: int, scratch: int, unpacked: int) -> None:
        """Groups first..last-1, matrix tiles."""
        group_bytes, n_blocks, row_bytes = load_i64(args + 8), load_i64(args + 16), load_i64(args + 96)
        out_stride, bias_at, add = load_i64(args + 56), load_i64(args + 72), load_i64(args + 80)
        tiles = load_i64(args + 128)
        for g in range(first, last, MOST_GROUPS):
            count = min(last - g, MOST_GROUPS)
            w = load_i64(args) + g * group_bytes
            if row_bytes:
                for i in range(g, g + count):
                    pack_group(
                        load_i64(args) + i * 16 * row_bytes, row_bytes, load_i64(args + 24) - i * 16, n_blocks, group_bytes,
                        unpacked + (i - g) * group_bytes,
                    )
                w = unpacked
            bias = bias_at + g * 64 if bias_at else 0
            out = load_i64(args + 48) + g * 64
            for t in range(0, tokens, MOST_TOKENS):
                many(
                    w, group_bytes, count, n_blocks, tiles + (t >> 4) * tile_step(n_blocks), min(tokens - t, MOST_TOKENS), scratch,
                    out + t * out_stride, out_stride, bias, add,
                )

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        tokens = load_i64(head + load_i64(args + 88))
        scratch = load_i64(args + 104) + thread * load_i64(args + 112)
        n_groups = (load_i64(args + 24) + 15) >> 4
        unpacked = scratch + load_i64(args + 120)
        if use_amx and load_i64(args + 128) and tokens >= load_i64(args + 144):
            first = chunk * load_i64(args + 136)
            many_tokens(args, first, min(first + load_i64(args + 136), n_groups), tokens, scratch, unpacked)
        else:
            first = chunk * load_i64(args + 64)
            few_tokens(args, first, min(first + load_i64(args + 64), n_groups), tokens, unpacked)

    return kernel
