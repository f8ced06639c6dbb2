"""Integer dot products and table lookup of AVX-512: one instruction each, 64 bytes wide (Intel's manual, VPDPBUSD, VPDPWSSD, VPSHUFB)."""

from __future__ import annotations

from llvmlite import ir

from localrun.kernels_cpu.simd import call


def dot4_us(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, x: ir.Value) -> ir.Value:
    """vpdpbusd: products of unsigned and signed bytes, four to a lane, added without saturation."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", acc.type, [acc, w, x])


def dot2(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """vpdpwssd: products of signed 16-bit numbers, two to a lane."""
    return call(builder, "llvm.x86.avx512.vpdpwssd.512", acc.type, [acc, a, b])


def lookup(builder: ir.IRBuilder, table: tuple[int, ...], index: ir.Value) -> ir.Value:
    """vpshufb: the same 16 bytes in each quarter."""
    return call(builder, "llvm.x86.avx512.pshuf.b.512", index.type, [ir.Constant(index.type, list(table) * 4), index])
