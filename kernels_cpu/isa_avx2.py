"""Integer dot products and table lookup of AVX2 and AVX-VNNI, on the two 32-byte halves of a vector."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from localrun.kernels_cpu.simd import call, splat

_i32 = ir.IntType(32)


def _by_halves(
    builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value, each: Callable[[ir.Value, ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Cuts three vectors in halves, applies `each` to both, joins the results."""

    def part(value: ir.Value, high: bool) -> ir.Value:
        n = value.type.count // 2
        index = [i + n if high else i for i in range(n)]
        return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), ir.Constant(ir.VectorType(_i32, n), index))

    low, high = (each(part(acc, side), part(a, side), part(b, side)) for side in (False, True))
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_i32, 16), list(range(16))))


def _bytes(builder: ir.IRBuilder, w: ir.Value, x: ir.Value) -> ir.Value:
    """vpmaddubsw then vpmaddwd by ones: sums of four products. Exact while a pair of products stays below 2**15."""
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(ir.IntType(16), 16), [w, x])
    ones = ir.Constant(pairs.type, [1] * 16)
    return call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_i32, 8), [pairs, ones])


def dot4_us(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """w up to 127: two products are at most 2 * 127 * 128 < 2**15."""
    return _by_halves(builder, acc, w, x, lambda c, a, b: builder.add(c, _bytes(builder, a, b)))


def dot4_us_full(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """w up to 255: the top bit is multiplied apart, since its products would saturate."""

    def each(c: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        byte = ir.IntType(8)
        low = builder.and_(a, splat(builder, ir.Constant(byte, 0x7F), 32))
        top = builder.lshr(a, splat(builder, ir.Constant(byte, 7), 32))
        shifted = builder.shl(_bytes(builder, top, b), splat(builder, ir.Constant(_i32, 7), 8))
        return builder.add(c, builder.add(_bytes(builder, low, b), shifted))

    return _by_halves(builder, acc, w, x, each)


def dot4_us_vnni(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """vpdpbusd in its 32-byte form."""
    return _by_halves(builder, acc, w, x, lambda c, a, b: call(builder, "llvm.x86.avx512.vpdpbusd.256", c.type, [c, a, b]))


def dot2(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """vpmaddwd and an addition."""

    def each(c: ir.Value, left: ir.Value, right: ir.Value) -> ir.Value:
        return builder.add(c, call(builder, "llvm.x86.avx2.pmadd.wd", c.type, [left, right]))

    return _by_halves(builder, acc, a, b, each)


def lookup(builder: ir.IRBuilder, table: tuple[int, ...], index: ir.Value) -> ir.Value:
    """vpshufb: the same 16 bytes in each quarter."""
    half = ir.VectorType(ir.IntType(8), 32)
    constant = ir.Constant(half, list(table) * 2)
    undefined = ir.Constant(index.type, ir.Undefined)
    parts = [ir.Constant(ir.VectorType(_i32, 32), list(range(start, start + 32))) for start in (0, 32)]
    low, high = (call(builder, "llvm.x86.avx2.pshuf.b", half, [constant, builder.shuffle_vector(index, undefined, p)]) for p in parts)
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_i32, 64), list(range(64))))
