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

from localrun.kernels_cpu.activations import TILE_QUAD, TILE_SUPER
from localrun.kernels_cpu.expand import expand_32, expand_256
from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.octets import OCTETS
from localrun.kernels_cpu.pack import PACKINGS
from localrun.kernels_cpu.simd import (
    f16_to_f32,
    load_f16x16,
    load_i8x32,
    splat_i32,
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
from localrun.kernels_cpu.tiles_table import block_scale

ROWS = 16
"""Tokens of a tile."""
CONFIG, PARTS, SUMS, FLOATS = 0, 64, 64 + 8192, 64 + 8192 + 8192
"""Scratch: tile configuration, expanded weights, products, then 64 bytes of float sums a token."""


def scratch_bytes(max_tokens: int) -> int:
    """Scratch memory a thread needs."""
    return FLOATS + 64 * (max_tokens + ROWS)


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


# ---- kind '256' ---------------------------------------------------------------------------------------------------------------


def _group_256(isa: Isa, type_name: str) -> Any:
    expand = expand_256(isa, type_name)
    packing = PACKINGS[BY_NAME[type_name].id]
    step = packing.quants + packing.scales
    # where the parts of a packed block lie, and the sums that go with its minima
    if type_name in OCTETS:
        o = OCTETS[type_name]
        with_mins, size, factor = o.minimum is not None, 256 // o.sub * 16, o.factor
        mins_at, pairs, sums_at = packing.quants + size, size // 32, 32 if o.sub == 16 else 8
        d_at = packing.quants + size * (2 if with_mins else 1)
    else:
        with_mins, factor = type_name != "Q6_K", 1.0
        mins_at, pairs, sums_at = packing.quants + 128, 4, 8
        d_at = packing.quants + 256
    dot2 = isa.ops.tile_dot2
    configure = _configure(64)

    @numba.njit
    def floats(w: int, x: int, low: int, sums: int, first: int) -> None:
        """Adds the products of one super-block, low bytes at `low`, high bytes 1024 behind, to the float sums of eight tokens."""
        high = tile_load(zeros_i32(8), low + 1024, 64)
        total = tile_scale_add(tile_load(zeros_i32(8), low, 64), high, splat_i32(numba.int32(256)))
        d = f16_to_f32(load_f16x16(w + d_at)) * numba.float32(factor)
        if with_mins:
            mins = zeros_i32(8)
            for j in range(pairs):
                mins = dot2(mins, u8_to_i16(load_i8x32(w + mins_at + j * 32)), x + sums_at + j * 4, 64)
            dmin = f16_to_f32(load_f16x16(w + d_at + 32))
            value = tile_fma(tile_mul(tile_to_f32(total), d), tile_to_f32(mins), dmin * numba.float32(-1.0))
        else:
            value = tile_mul(tile_to_f32(total), d)
        acc = zeros_f32(8)
        if first == 0:
            acc = tile_load(acc, sums, 64)
        tile_store_all(tile_fma(acc, value, tile_splat_f32(acc, x, 64)), sums, 64)

    @numba.njit
    def group(w: int, n: int, x: int, tokens: int, scratch: int) -> None:
        """Float sums of `tokens` (a multiple of 16) tokens into scratch.

        The float work of 32 tokens is issued between the tile products of the next 32: they take as long and need other parts of the core.
        """
        configure(scratch + CONFIG)
        step16 = n * TILE_SUPER
        low = scratch + PARTS
        high = low + 4096
        for b in range(n):
            expand(w, low, high)
            first = numba.int64(b == 0)
            products = scratch + SUMS
            other = products + 4096
            before = 0
            for t in range(0, tokens, 32):
                at = x + (t >> 4) * step16
                two = tokens - t >= 32
                tile_zero(0)
                tile_zero(1)
                tile_zero(2)
                tile_zero(3)
                for k in range(4):
                    load_tile(4, at + k * 1024, 64)
                    load_tile(6, low + k * 1024, 64)
                    dot_signed_unsigned(0, 4, 6)
                    load_tile(7, high + k * 1024, 64)
                    dot_signed_signed(1, 4, 7)
                    if two:
                        load_tile(5, at + step16 + k * 1024, 64)
                        dot_signed_unsigned(2, 5, 6)
                        dot_signed_signed(3, 5, 7)
                    if t > 0:
                        meta = x + ((before >> 4) + (k >> 1)) * step16 + 4096 + (k & 1) * 512
                        floats(w, meta, other + (k >> 1) * 2048 + (k & 1) * 512, scratch + FLOATS + before * 64 + k * 512, first)
                store_tile(0, products, 64)
                store_tile(1, products + 1024, 64)
                store_tile(2, products + 2048, 64)
                store_tile(3, products + 3072, 64)
                before = t
                products, other = other, products
            for k in range(min(tokens - before, 32) >> 3):
                meta = x + ((before >> 4) + (k >> 1)) * step16 + 4096 + (k & 1) * 512
                floats(w, meta, other + (k >> 1) * 2048 + (k & 1) * 512, scratch + FLOATS + before * 64 + k * 512, first)
            w += step
            x += TILE_SUPER
        release()

    return group


# ---- kind '32' ----------------------------------------------------------------------------------------------------------------


def _group_32(isa: Isa, type_name: str) -> Any:
    packing = PACKINGS[BY_NAME[type_name].id]
    quants, scales = packing.quants, packing.scales
    with_min = type_name in ("Q4_1", "Q5_1")
    expand = expand_32(isa, type_name)
    scale = block_scale(type_name)
    configure = _configure(32)

    @numba.njit
    def floats(u: int, count: int, meta: int, products: int, sums: int, first: int) -> None:
        """Adds the products of up to four blocks to the float sums of eight tokens."""
        acc = zeros_f32(8)
        if first == 0:
            acc = tile_load(acc, sums, 64)
        for b in range(count):
            dots = tile_load(zeros_i32(8), products + b * 1024, 64)
            scaled = tile_mul(tile_to_f32(dots), tile_splat_f32(acc, meta + b * 128, 4))
            acc = tile_fma(acc, scaled, scale(u + b * scales))
            if with_min:
                acc = tile_fma(acc, tile_splat_f32(acc, meta + b * 128 + 64, 4), f16_to_f32(load_f16x16(u + b * scales + 32)))
        tile_store_all(acc, sums, 64)

    @numba.njit
    def group(w: int, n: int, x: int, tokens: int, scratch: int) -> None:
        """Float sums of `tokens` (a multiple of 16) tokens into scratch; float work between tile products as for kind '256'.

        Four blocks at a time; of the last ones, those that are not there are multiplied as well (by what lies in memory) and never read.
        """
        configure(scratch + CONFIG)
        parts = scratch + PARTS
        u = w + n * quants
        step16 = ((n + 3) >> 2) * TILE_QUAD
        for b in range(0, n, 4):
            count = min(n - b, 4)
            for i in range(count):
                expand(w + i * quants, parts + i * 512)
            first = numba.int64(b == 0)
            products = scratch + SUMS
            other = products + 4096
            before = 0
            for t in range(0, tokens, 16):
                at = x + (t >> 4) * step16
                meta = x + (before >> 4) * step16 + 2048
                done = scratch + FLOATS + before * 64
                tile_zero(0)
                load_tile(4, at, 32)
                load_tile(6, parts, 64)
                dot_signed_signed(0, 4, 6)
                tile_zero(1)
                load_tile(5, at + 512, 32)
                load_tile(7, parts + 512, 64)
                dot_signed_signed(1, 5, 7)
                if t > 0:
                    floats(u, count, meta, other, done, first)
                tile_zero(2)
                load_tile(4, at + 1024, 32)
                load_tile(6, parts + 1024, 64)
                dot_signed_signed(2, 4, 6)
                tile_zero(3)
                load_tile(5, at + 1536, 32)
                load_tile(7, parts + 1536, 64)
                dot_signed_signed(3, 5, 7)
                if t > 0:
                    floats(u, count, meta + 32, other + 512, done + 512, first)
                store_tile(0, products, 64)
                store_tile(1, products + 1024, 64)
                store_tile(2, products + 2048, 64)
                store_tile(3, products + 3072, 64)
                before = t
                products, other = other, products
            meta = x + (before >> 4) * step16 + 2048
            floats(u, count, meta, other, scratch + FLOATS + before * 64, first)
            floats(u, count, meta + 32, other + 512, scratch + FLOATS + before * 64 + 512, first)
            w += count * quants
            u += count * scales
            x += TILE_QUAD
        release()

    return group


SUPPORTED = tuple(p.format.name for p in PACKINGS.values() if p.kind != "f" and p.format.name != "NVFP4")
"""All but floats and NVFP4, which has two scales in 32 values."""


def make_group(isa: Isa, type_name: str) -> Any:
    """The compiled function (packed group, blocks, tiles of activations, tokens, scratch, out, bytes between tokens of out, bias, add)
    that writes the results of a multiple of 16 tokens.
    """
    sums = _group_32(isa, type_name) if PACKINGS[BY_NAME[type_name].id].kind == "32" else _group_256(isa, type_name)

    @numba.njit
    def group(w: int, n: int, x: int, tokens: int, scratch: int, out: int, out_stride: int, bias: Any, add: int) -> None:
        sums(w, n, x, tokens, scratch)
        for t in range(0, tokens, 8):
            tile_store(tile_load(zeros_f32(8), scratch + FLOATS + t * 64, 64), out + t * out_stride, out_stride, 8, bias, add)

    return group


def tile_step(type_name: str) -> Any:
    """A compiled function: blocks in a row -> bytes of the activation tiles of 16 tokens."""
    quads = PACKINGS[BY_NAME[type_name].id].kind == "32"

    @numba.njit
    def step(n: int) -> int:
        return ((n + 3) >> 2) * TILE_QUAD if quads else n * TILE_SUPER

    return step
