"""Integer dot products and table lookup in plain LLVM vectors: every machine executes them, none of them quickly."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

_i32 = ir.IntType(32)


def _groups(
    builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value, size: int, widen: Callable[[ir.Value, ir.Type], ir.Value]
) -> ir.Value:
    """acc plus the sums of `size` neighbouring products; `widen` extends `a` to 32 bits, `b` is signed."""
    wide = ir.VectorType(_i32, a.type.count)
    products = builder.mul(widen(a, wide), builder.sext(b, wide))
    for i in range(size):
        index = ir.Constant(ir.VectorType(_i32, 16), [size * lane + i for lane in range(16)])
        acc = builder.add(acc, builder.shuffle_vector(products, ir.Constant(wide, ir.Undefined), index))
    return acc


def dot4(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """Unsigned times signed bytes, four to a lane."""
    return _groups(builder, acc, w, x, 4, builder.zext)


def dot2(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Signed 16-bit numbers, two to a lane."""
    return _groups(builder, acc, a, b, 2, builder.sext)


def lookup(builder: ir.IRBuilder, table: tuple[int, ...], index: ir.Value) -> ir.Value:
    """A comparison for each entry that is not 0."""
    result = ir.Constant(index.type, None)
    for i, value in enumerate(table):
        if value:
            hit = builder.icmp_unsigned("==", index, ir.Constant(index.type, [i] * 64))
            result = builder.select(hit, ir.Constant(index.type, [value] * 64), result)
    return result
