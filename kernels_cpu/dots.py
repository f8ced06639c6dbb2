"""Dot products and table lookup of an instruction set as Numba intrinsics; dot products take one weight vector against several tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from localrun.kernels_cpu import isa_avx2, isa_avx512, isa_generic, isa_neon
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import i16x32, pointer, splat, tile_map, u8x64

Lower = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
Lookup = Callable[[ir.IRBuilder, tuple[int, ...], ir.Value], ir.Value]

_i32 = ir.IntType(32)


def _operations(name: str) -> tuple[Lower, Lower, Lower, Lookup]:
    """By an instruction set's name:

    (builder, acc i32x16, w u8x64, x i8x64) -> acc + sums of four products, for w up to 127; the same for w up to 255;
    (builder, acc i32x16, a i16x32, b i16x32) -> acc + sums of two products;
    (builder, table of 16 bytes, index u8x64 below 16) -> table[index].
    """
    if name in ("amx", "avx512"):
        return isa_avx512.dot4_us, isa_avx512.dot4_us, isa_avx512.dot2, isa_avx512.lookup
    if name == "avxvnni":
        return isa_avx2.dot4_us_vnni, isa_avx2.dot4_us_vnni, isa_avx2.dot2, isa_avx2.lookup
    if name == "avx2":
        return isa_avx2.dot4_us, isa_avx2.dot4_us_full, isa_avx2.dot2, isa_avx2.lookup
    if name == "neon":
        return isa_neon.dot4_us, isa_neon.dot4_us_full, isa_neon.dot2, isa_neon.lookup
    return isa_generic.dot4, isa_generic.dot4, isa_generic.dot2, isa_generic.lookup


def _tile_dot(lower: Lower, weights: Any) -> Any:
    """acc[t] += dot(w, the 4 bytes at x + t * stride in all lanes), for each token t of the tile."""

    @intrinsic  # type: ignore[untyped-decorator]
    def dot(typingctx: Any, acc: Any, w: Any, x: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            acc_value, w_value, x_value, stride_value = args

            def each(i: int) -> ir.Value:
                at = builder.add(x_value, builder.mul(stride_value, ir.Constant(stride_value.type, i)))
                word = builder.load(pointer(builder, at, _i32), align=1)
                spread = builder.bitcast(splat(builder, word, 16), w_value.type)
                return lower(builder, builder.extract_value(acc_value, i), w_value, spread)

            return tile_map(builder, acc, each)

        return acc(acc, weights, types.int64, types.int64), codegen

    return dot


class Dots:
    """tile_dot4(acc, w u8x64 <= 127, x address, stride), tile_dot4_full (w <= 255) and tile_dot2 (w i16x32 pairs, x int16 pairs)."""

    def __init__(self, isa: Isa) -> None:
        dot4, dot4_full, dot2, self._lookup = _operations(isa.name)
        self.tile_dot4 = _tile_dot(dot4, u8x64)
        self.tile_dot4_full = _tile_dot(dot4_full, u8x64)
        self.tile_dot2 = _tile_dot(dot2, i16x32)

    def lookup(self, table: tuple[int, ...]) -> Any:
        """lookup(index u8x64) -> u8x64: 16 unsigned bytes by index 0..15."""
        if len(table) != 16 or not all(0 <= value < 256 for value in table):
            raise ValueError(f"a table is 16 bytes, not {table}")
        lower = self._lookup

        @intrinsic  # type: ignore[untyped-decorator]
        def look(typingctx: Any, index: Any) -> Any:
            def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
                return lower(builder, table, args[0])

            return u8x64(u8x64), codegen

        return look
