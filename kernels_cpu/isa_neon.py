"""Integer dot products of Armv8.2 dotprod and table lookup, on the four 16-byte quarters of a vector (Arm's manual, SDOT and TBL)."""

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
    """w up to 255, as its low seven bits and its top bit, since sdot takes signed bytes only."""
    byte = ir.IntType(8)
    low = builder.and_(w, splat(builder, ir.Constant(byte, 0x7F), 64))
    top = builder.lshr(w, splat(builder, ir.Constant(byte, 7), 64))
    tops = dot4_us(builder, ir.Constant(acc.type, None), top, x)
    return builder.add(dot4_us(builder, acc, low, x), builder.shl(tops, splat(builder, ir.Constant(_i32, 7), 16)))


def lookup(builder: ir.IRBuilder, table: tuple[int, ...], index: ir.Value) -> ir.Value:
    """tbl with one table register."""
    quarters = [_quarter(builder, index, i) for i in range(4)]
    constant = ir.Constant(quarters[0].type, list(table))
    return _join(builder, [call(builder, "llvm.aarch64.neon.tbl1.v16i8", q.type, [constant, q]) for q in quarters])
