"""Products and folds of whole register tiles, for attention: vector values as in simd.py, one LLVM instruction after another.

Knows how many registers an instruction set has for them (`shape`), not what is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import Tile, call, f32x16, pointer, splat, tile_map

_i32 = ir.IntType(32)
_f32 = ir.FloatType()


def shape(isa: Isa) -> tuple[tuple[int, ...], int]:
    """(rows that a tile may have, the most first; its vectors of 16 a row): the largest sums that registers hold beside their factors."""
    if isa.by_processor:
        return (6, 4, 2), 4  # 24 of 32 registers
    if isa.name == "generic":
        return (2,), 1  # 8 of 16 registers of four lanes
    return (6, 4, 2), 1  # 12 of 16 registers of eight lanes, or 24 of 32 of four


def _at(builder: ir.IRBuilder, address: ir.Value, stride: ir.Value, i: int, offset: int) -> ir.Value:
    return builder.add(builder.add(address, builder.mul(stride, ir.Constant(stride.type, i))), ir.Constant(address.type, offset))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile_begin(typingctx: Any, rows: Any, vectors: Any, address: Any, stride: Any, factors: Any) -> Any:
    """A tile of rows x vectors (compile-time constants) f32x16: row i is the memory at address + i * stride times the float factors[i]."""
    tile, wide = Tile(f32x16, rows.literal_value * vectors.literal_value), vectors.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _, _, base, step, by = args

        def each(number: int) -> ir.Value:
            i, j = divmod(number, wide)
            factor = builder.load(pointer(builder, builder.add(by, ir.Constant(by.type, 4 * i)), _f32), align=1)
            vector = builder.load(pointer(builder, _at(builder, base, step, i, 64 * j), f32x16.llvm), align=1)
            return builder.fmul(vector, splat(builder, factor, 16))

        return tile_map(builder, tile, each)

    return tile(rows, vectors, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_outer(typingctx: Any, acc: Any, a: Any, stride: Any, b: Any) -> Any:
    """acc + a x b: a one float a row, `stride` bytes apart; b a tile, one row of acc; each product and sum rounded once."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        sums, left, step, row = args
        factors: dict[int, ir.Value] = {}

        def each(number: int) -> ir.Value:
            i, j = divmod(number, b.count)
            if i not in factors:
                factors[i] = splat(builder, builder.load(pointer(builder, _at(builder, left, step, i, 0), _f32), align=1), 16)
            c = builder.extract_value(sums, number)
            return call(builder, "llvm.fma.v16f32", c.type, [builder.extract_value(row, j), factors[i], c])

        return tile_map(builder, acc, each)

    return acc(acc, types.int64, types.int64, b), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def tile_end(typingctx: Any, tile: Any, vectors: Any, address: Any, stride: Any) -> Any:
    """Writes a tile's rows of so many vectors to address, address + stride, ..."""
    wide = vectors.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, _, base, step = args
        for number in range(tile.count):
            i, j = divmod(number, wide)
            builder.store(builder.extract_value(value, number), pointer(builder, _at(builder, base, step, i, 64 * j), f32x16.llvm), align=1)
        return context.get_dummy_value()

    return types.void(tile, vectors, types.int64, types.int64), codegen


def _folder(combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value], doc: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def fold(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            def load(i: int) -> ir.Value:
                return builder.load(pointer(builder, builder.add(args[0], ir.Constant(args[0].type, 64 * i)), f32x16.llvm), align=1)

            # Each entry: a vector, and whose values lie in it, one run of `width` lanes after another.
            level = [(load(i), [i]) for i in range(16)]
            width = 16
            while width > 1:
                width //= 2
                level = [_pair(builder, a, b, width, combine) for a, b in zip(level[: len(level) // 2], level[len(level) // 2 :])]
            vector, order = level[0]
            lanes = [order.index(i) for i in range(16)]
            return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_i32, 16), lanes))

        return f32x16(types.int64), codegen

    fold.__doc__ = doc
    return fold


def _pair(
    builder: ir.IRBuilder, a: tuple[ir.Value, list[int]], b: tuple[ir.Value, list[int]], width: int,
    combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value],
) -> tuple[ir.Value, list[int]]:  # fmt: skip
    """One vector of the runs of two, each folded from 2 * width lanes to width."""
    # A run of a, the same of b, the next of a: within a register's quarters where runs are that short.
    starts = [start + side for start in range(0, 16, 2 * width) for side in (0, 16)]
    owners = [owner for pair in zip(a[1], b[1]) for owner in pair]
    kind = ir.VectorType(_i32, 16)
    low = ir.Constant(kind, [start + lane for start in starts for lane in range(width)])
    high = ir.Constant(kind, [start + width + lane for start in starts for lane in range(width)])
    folded = combine(builder, builder.shuffle_vector(a[0], b[0], low), builder.shuffle_vector(a[0], b[0], high))
    return folded, owners


fold_max = _folder(
    lambda builder, a, b: call(builder, "llvm.maxnum.v16f32", a.type, [a, b]),
    "f32x16 whose lane i is the largest lane of the vector at address + 64 i.",
)
fold_sum = _folder(
    lambda builder, a, b: builder.fadd(a, b),
    "f32x16 whose lane i is the sum of the vector at address + 64 i, added in the order of simd.sum_f32.",
)
