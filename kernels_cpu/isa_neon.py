"""Integer dot products of Armv8.2 dotprod and table lookup, on the four 16-byte quarters of a vector (Arm's manual: SDOT, ADDP, TBL)."""

from __future__ import annotations

from llvmlite import ir

from localrun.kernels_cpu.simd import call, splat

_i32 = ir.IntType(32)


def _quarter(builder: ir.IRBuilder, value: ir.Value, i: int) -> ir.Value:
    n = value.type.count // 4
    index = ir.Constant(ir.VectorType(_i32, n), list(range(i * n, (i + 1) * n)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), index)


def _join(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    while len(parts) > 1:
        n = parts[0].type.count
        index = ir.Constant(ir.VectorType(_i32, 2 * n), list(range(2 * n)))
        parts = [builder.shuffle_vector(a, b, index) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def dot4_us(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """sdot: w up to 127 is the same number signed."""
    parts = []
    for i in range(4):
        c = _quarter(builder, acc, i)
        parts.append(call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", c.type, [c, _quarter(builder, w, i), _quarter(builder, x, i)]))
    return _join(builder, parts)


def dot4_us_full(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """w up to 255: sdot takes signed bytes only, so that of w - 128, plus 128 times the sum of x, which is the same for all rows."""
    byte = ir.IntType(8)
    signed = builder.xor(w, splat(builder, ir.Constant(byte, 0x80), 64))
    sums = dot4_us(builder, ir.Constant(acc.type, None), ir.Constant(w.type, [64] * 64), x)
    return builder.add(dot4_us(builder, acc, signed, x), builder.shl(sums, splat(builder, ir.Constant(_i32, 1), 16)))


def dot2(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """smull of both halves, then addp."""
    wide, four = ir.VectorType(_i32, 8), ir.VectorType(_i32, 4)
    parts = []
    for i in range(4):
        products = builder.mul(builder.sext(_quarter(builder, a, i), wide), builder.sext(_quarter(builder, b, i), wide))
        halves = [builder.shuffle_vector(products, products, ir.Constant(four, list(range(at, at + 4)))) for at in (0, 4)]
        parts.append(builder.add(_quarter(builder, acc, i), call(builder, "llvm.aarch64.neon.addp.v4i32", four, halves)))
    return _join(builder, parts)


def lookup(builder: ir.IRBuilder, table: tuple[int, ...], index: ir.Value) -> ir.Value:
    """tbl with one table register."""
    quarters = [_quarter(builder, index, i) for i in range(4)]
    constant = ir.Constant(quarters[0].type, list(table))
    return _join(builder, [call(builder, "llvm.aarch64.neon.tbl1.v16i8", q.type, [constant, q]) for q in quarters])
