"""Matrix tiles of AMX (Intel's architecture manual, chapter on TMUL): 16 rows of W against 16 or 32 tokens an instruction.

A tile register holds 16 rows of 64 bytes; one TDPB*D adds the products of a 16 x 64 and a 64 x 16 tile of bytes to 16 x 16 int32, 16,384
multiply-adds in 16 cycles. Integers are exact and the float operations are the ones of the plain tiles in the same order, so results are
the same bits.

Kind '256': scale times quant is an integer of at most 16 bits; it is cut into a low byte (unsigned) and a high byte (signed), each a
tile, and both products run over the whole super-block: total = low + 256 * high. Floats are touched once every 256 values.
Kind '32': one tile product a block, half as deep, with signed quants.

A packed group already is what the instruction wants on its right side (4 k-values of 16 rows in 64 bytes), activations are on its left.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from localrun.kernels_cpu.activation_sizes import TILE_PAIR, TILE_SUPER
from localrun.kernels_cpu.amx_sizes import (
    CONFIG,
    DEPTH,
    DEPTH_32,
    FLOATS,
    PART_BYTES,
    PART_BYTES_32,
    PARTS,
    ROWS,
    SUMS,
)
from localrun.kernels_cpu.expand import expand_32, expand_256
from localrun.kernels_cpu.fetch import prefetch
from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS
from localrun.kernels_cpu.simd import (
    f16_to_f32,
    load_f16x16,
    load_f32x16,
    load_i8x32,
    load_i16x32,
    splat_f32,
    splat_i32,
    store,
    store_scalar,
    tile_fma,
    tile_load,
    tile_mul,
    tile_scale_add,
    tile_splat_f32,
    tile_store,
    tile_store_all,
    tile_to_f32,
    u8_to_i16,
    zeros_f32,
    zeros_i32,
)
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_cpu.tiles_table import block_scale
from localrun.kernels_cpu.token_rows import rows_from

AHEAD = 4096
"""Bytes between weights that are expanded and those that are asked for, in one step: each block is read once for many tokens."""

# ---- instructions -------------------------------------------------------------------------------------------------------------


def _plain(name: str, n_immediates: int, n_values: int) -> Any:
    """An intrinsic whose first arguments are compile-time tile numbers, the rest int64 values (the first of them an address)."""

    def emit(typingctx: Any, *args: Any) -> Any:
        numbers = [a.literal_value for a in args[:n_immediates]]

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, values: Any) -> ir.Value:
            byte = ir.IntType(8)
            operands = [ir.Constant(byte, n) for n in numbers]
            rest = list(values[n_immediates:])
            if rest:
                operands.append(builder.inttoptr(rest[0], byte.as_pointer()))
                operands.extend(rest[1:])
            fnty = ir.FunctionType(ir.VoidType(), [o.type for o in operands])
            function = builder.module.globals.get(name) or ir.Function(builder.module, fnty, name)
            builder.call(function, operands)
            return context.get_dummy_value()

        return types.void(*args[:n_immediates], *[types.int64] * n_values), codegen

    count = n_immediates + n_values
    body = {
        1: lambda ctx, a: emit(ctx, a),
        2: lambda ctx, a, b: emit(ctx, a, b),
        3: lambda ctx, a, b, c: emit(ctx, a, b, c),
    }
    if count == 0:
        return intrinsic(lambda ctx: emit(ctx))
    return intrinsic(prefer_literal=True)(body[count])


load_config = _plain("llvm.x86.ldtilecfg", 0, 1)
release = _plain("llvm.x86.tilerelease", 0, 0)
tile_zero = _plain("llvm.x86.tilezero", 1, 0)
load_tile = _plain("llvm.x86.tileloadd64", 1, 2)
store_tile = _plain("llvm.x86.tilestored64", 1, 2)
dot_signed_unsigned = _plain("llvm.x86.tdpbsud", 3, 0)
dot_signed_signed = _plain("llvm.x86.tdpbssd", 3, 0)


def _configure(depth: int) -> Any:
    """Writes and loads a configuration: tiles 0..3 sums, 4 and 5 activations, 6 and 7 weights, `depth` bytes of k."""

    @numba.njit
    def configure(at: int) -> None:
        for i in range(64):
            store_scalar(at + i, numba.uint8(0))
        store_scalar(at, numba.uint8(1))
        for tile in range(8):
            store_scalar(at + 16 + 2 * tile, numba.uint8(depth if 4 <= tile < 6 else 64))
            store_scalar(at + 48 + tile, numba.uint8(depth // 4 if tile >= 6 else 16))
        load_config(at)

    return configure


def _sixteen(even: Any, odd: Any, floats: Any, unit: int, part_bytes: int, tile_bytes: int) -> Any:
    """A compiled function: products of 16 tokens with expanded blocks, `unit` of them at a time, added to their float sums.

    even, odd: issue the tile products of a unit, into tiles 0 and 1 or 2 and 3. Products are stored only after those of the next unit
    have been issued: what a store waits for, later loads that look alike to the processor (their addresses agree in the last 12 bits) wait
    for as well.
    """

    @numba.njit
    def sixteen(parts: int, count: int, x: int, sums: int, first: int, products: int) -> None:
        a0 = zeros_f32(4)
        a1 = zeros_f32(4)
        a2 = zeros_f32(4)
        a3 = zeros_f32(4)
        if first == 0:
            a0 = tile_load(a0, sums, 64)
            a1 = tile_load(a1, sums + 256, 64)
            a2 = tile_load(a2, sums + 512, 64)
            a3 = tile_load(a3, sums + 768, 64)
        even(x, parts)
        left = count
        while left > 0:
            if left > unit:
                odd(x + tile_bytes, parts + part_bytes)
            store_tile(0, products, 64)
            store_tile(1, products + 1024, 64)
            if left < count:
                a0 = floats(a0, parts - part_bytes, x - tile_bytes, products + 2048, 0, unit)
                a1 = floats(a1, parts - part_bytes, x - tile_bytes, products + 2048, 4, unit)
                a2 = floats(a2, parts - part_bytes, x - tile_bytes, products + 2048, 8, unit)
                a3 = floats(a3, parts - part_bytes, x - tile_bytes, products + 2048, 12, unit)
            if left > 2 * unit:
                even(x + 2 * tile_bytes, parts + 2 * part_bytes)
            if left > unit:
                store_tile(2, products + 2048, 64)
                store_tile(3, products + 3072, 64)
            a0 = floats(a0, parts, x, products, 0, left)
            a1 = floats(a1, parts, x, products, 4, left)
            a2 = floats(a2, parts, x, products, 8, left)
            a3 = floats(a3, parts, x, products, 12, left)
            left -= 2 * unit
            x += 2 * tile_bytes
            parts += 2 * part_bytes
        if left > -unit:
            a0 = floats(a0, parts - part_bytes, x - tile_bytes, products + 2048, 0, left + unit)
            a1 = floats(a1, parts - part_bytes, x - tile_bytes, products + 2048, 4, left + unit)
            a2 = floats(a2, parts - part_bytes, x - tile_bytes, products + 2048, 8, left + unit)
            a3 = floats(a3, parts - part_bytes, x - tile_bytes, products + 2048, 12, left + unit)
        tile_store_all(a0, sums, 64)
        tile_store_all(a1, sums + 256, 64)
        tile_store_all(a2, sums + 512, 64)
        tile_store_all(a3, sums + 768, 64)

    return sixteen


# ---- kind '256' ---------------------------------------------------------------------------------------------------------------


def _layout_256(type_name: str) -> tuple[bool, float, int, int, int, int]:
    """(whether there are minima, the scale's factor; where in a packed block minima lie, their pairs, their sums, the scale)."""
    packing = PACKINGS[BY_NAME[type_name].id]
    if type_name in OCTETS:
        o = OCTETS[type_name]
        size = 256 // o.sub * 16
        with_mins = o.minimum is not None
        d_at = packing.quants + size * (2 if with_mins else 1)
        return with_mins, o.factor, packing.quants + size, size // 32, 32 if o.sub == 16 else 8, d_at
    return type_name != "Q6_K", 1.0, packing.quants + 128, 4, 8, packing.quants + 256


def _products_256(sums: int) -> Any:
    """A compiled function: 16 tokens times a super-block, low bytes into tile `sums`, high bytes into the one behind."""
    high, tokens = sums + 1, 4 + sums // 2

    @numba.njit
    def products(x: int, parts: int) -> None:
        tile_zero(sums)
        tile_zero(high)
        for k in range(4):
            load_tile(tokens, x + k * 1024, 64)
            load_tile(6, parts + k * 1024, 64)
            dot_signed_unsigned(sums, tokens, 6)
            load_tile(7, parts + 4096 + k * 1024, 64)
            dot_signed_signed(high, tokens, 7)

    return products


def _panel_256(isa: Isa, type_name: str) -> tuple[Any, Any]:
    """(expand a packed block, products of 16 tokens with the expanded blocks)."""
    spread = expand_256(isa, type_name)
    with_mins, factor, mins_at, pairs, sums_at, d_at = _layout_256(type_name)
    dot2 = isa.ops.tile_dot2

    @numba.njit
    def expand(w: int, u: int, parts: int) -> None:
        spread(w, parts, parts + 4096)
        constants = parts + 8192
        store(constants, f16_to_f32(load_f16x16(w + d_at)) * numba.float32(factor))
        if with_mins:
            store(constants + 64, f16_to_f32(load_f16x16(w + d_at + 32)) * numba.float32(-1.0))
            for j in range(pairs):
                store(constants + 128 + j * 64, u8_to_i16(load_i8x32(w + mins_at + j * 32)))

    @numba.njit
    def floats(acc: Any, parts: int, x: int, low: int, token: int, left: int) -> Any:
        """acc + the products of one super-block, low bytes at `low`, high bytes 1024 behind, of four tokens from `token` on."""
        constants = parts + 8192
        x += 4096 + token * 64
        low += token * 64
        high = tile_load(zeros_i32(4), low + 1024, 64)
        total = tile_scale_add(tile_load(zeros_i32(4), low, 64), high, splat_i32(numba.int32(256)))
        value = tile_mul(tile_to_f32(total), load_f32x16(constants))
        if with_mins:
            mins = zeros_i32(4)
            for j in range(pairs):
                mins = dot2(mins, load_i16x32(constants + 128 + j * 64), rows_from(x + sums_at + j * 4, 64, 4))
            value = tile_fma(value, tile_to_f32(mins), load_f32x16(constants + 64))
        return tile_fma(acc, value, tile_splat_f32(acc, x, 64))

    return expand, _sixteen(_products_256(0), _products_256(2), floats, 1, PART_BYTES, TILE_SUPER)


# ---- kind '32' ----------------------------------------------------------------------------------------------------------------


def _products_32(sums: int) -> Any:
    """A compiled function: 16 tokens times a block into tile `sums`, times the next block into the one behind."""
    second = sums + 1

    @numba.njit
    def products(x: int, parts: int) -> None:
        tile_zero(sums)
        load_tile(4, x, 32)
        load_tile(6, parts, 64)
        dot_signed_signed(sums, 4, 6)
        tile_zero(second)
        load_tile(5, x + 512, 32)
        load_tile(7, parts + PART_BYTES_32, 64)
        dot_signed_signed(second, 5, 7)

    return products


def _panel_32(isa: Isa, type_name: str) -> tuple[Any, Any]:
    """(expand a packed block, products of 16 tokens with the expanded blocks)."""
    with_min = type_name in ("Q4_1", "Q5_1")
    spread = expand_32(isa, type_name)
    scale = block_scale(type_name)

    @numba.njit
    def expand(w: int, u: int, parts: int) -> None:
        spread(w, parts)
        store(parts + 512, scale(u))
        if with_min:
            store(parts + 576, f16_to_f32(load_f16x16(u + 32)))

    @numba.njit
    def floats(acc: Any, parts: int, x: int, products: int, token: int, left: int) -> Any:
        """acc + the products of two blocks (of one, if no more are left), of four tokens from `token` on."""
        x += 1024 + token * 4
        products += token * 64
        for i in range(2):
            if i < left:
                constants = parts + i * PART_BYTES_32 + 512
                dots = tile_load(zeros_i32(4), products + i * 1024, 64)
                acc = tile_fma(acc, tile_mul(tile_to_f32(dots), tile_splat_f32(acc, x + i * 128, 4)), load_f32x16(constants))
                if with_min:
                    acc = tile_fma(acc, tile_splat_f32(acc, x + i * 128 + 64, 4), load_f32x16(constants + 64))
        return acc

    return expand, _sixteen(_products_32(0), _products_32(2), floats, 2, 2 * PART_BYTES_32, TILE_PAIR)


# ---- both ---------------------------------------------------------------------------------------------------------------------


SUPPORTED = tuple(p.format.name for p in PACKINGS.values() if p.kind != "f" and p.format.name != "NVFP4")
"""All but floats and NVFP4, which has two scales in 32 values."""


def make_groups(isa: Isa, type_name: str) -> Any:
    """The compiled function (packed groups, bytes of one, how many, blocks in a row, tiles of activations, tokens, scratch, out, bytes
    between tokens of out, bias, add) that writes the results of up to MOST_GROUPS groups and MOST_TOKENS tokens. They are computed sixteen
    at a time, whatever lies behind the last one, and only results of tokens that are there are written.

    DEPTH blocks of all groups at a time, so that all groups but the first read their part of the activations from the second-level cache;
    a group's expanded weights stay in the first-level cache while the tokens go by, sixteen tokens' sums in registers.
    """
    pairs = PACKINGS[BY_NAME[type_name].id].kind == "32"
    expand, sixteen = _panel_32(isa, type_name) if pairs else _panel_256(isa, type_name)
    packing = PACKINGS[BY_NAME[type_name].id]
    quants, scales = packing.quants, packing.scales
    step = quants if pairs else quants + scales
    lines = step // 64
    configure = _configure(32 if pairs else 64)
    tile_bytes = tile_step(type_name)

    @numba.njit
    def groups(
        w: int, group_bytes: int, count: int, n: int, x: int, tokens: int, scratch: int, out: int, out_stride: int, bias_at: int, add: int
    ) -> None:
        configure(scratch + CONFIG)
        parts = scratch + PARTS
        step16 = tile_bytes(n)
        sums_bytes = (tokens + 15 & -16) * 64
        depth = DEPTH_32 if pairs else DEPTH
        for b in range(0, n, depth):
            blocks = min(n - b, depth)
            panel = x + ((b >> 1) * TILE_PAIR if pairs else b * TILE_SUPER)
            for g in range(count):
                packed = w + g * group_bytes
                sums = scratch + FLOATS + g * sums_bytes
                for i in range(b, b + blocks):
                    prefetch(packed + i * step + AHEAD, lines)
                    if pairs:
                        expand(packed + i * quants, packed + n * quants + i * scales, parts + (i - b) * PART_BYTES_32)
                    else:
                        expand(packed + i * step, 0, parts + (i - b) * PART_BYTES)
                for t in range(0, tokens, ROWS):
                    sixteen(parts, blocks, panel + (t >> 4) * step16, sums + t * 64, numba.int64(b == 0), scratch + SUMS)
        release()
        # A token's results of all groups lie together: its page, and the lines next to each other, are gone to once.
        for t in range(0, tokens, 8):
            there = min(tokens - t, 8)
            for g in range(count):
                bias = splat_f32(numba.float32(0.0))
                if bias_at:
                    bias = load_f32x16(bias_at + g * 64)
                at = scratch + FLOATS + g * sums_bytes + t * 64
                tile_store(tile_load(zeros_f32(8), at, 64), out + t * out_stride + g * 64, out_stride, there, bias, add)

    return groups


def tile_step(type_name: str) -> Any:
    """A compiled function: blocks in a row -> bytes of the activation tiles of 16 tokens."""
    pairs = PACKINGS[BY_NAME[type_name].id].kind == "32"

    @numba.njit
    def step(n: int) -> int:
        return ((n + 1) >> 1) * TILE_PAIR if pairs else n * TILE_SUPER

    return step
