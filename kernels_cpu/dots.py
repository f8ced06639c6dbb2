"""Dot products and table lookup of an instruction set as Numba intrinsics; dot products take one weight vector against several tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core.extending import intrinsic

from localrun.kernels_cpu import isa_avx2, isa_avx512, isa_generic, isa_neon
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import i16x32, i32x16, tile_map, u8x64
from localrun.kernels_cpu.token_rows import words_at

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
    """acc[t] += dot(w, the 4 bytes at row t in all lanes), for each token t of the tile."""

    @intrinsic  # type: ignore[untyped-decorator]
    def dot(typingctx: Any, acc: Any, w: Any, rows: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            acc_value, w_value, rows_value = args

            def each(i: int) -> ir.Value:
                spread = builder.bitcast(words_at(builder, rows_value, i, _i32), w_value.type)
                return lower(builder, builder.extract_value(acc_value, i), w_value, spread)

            return tile_map(builder, acc, each)

        return acc(acc, weights, rows), codegen

    return dot


def _tile_weigh(lower: Lower | None) -> Any:
    """acc[t] + a[t] * scale in 32-bit integers, for lanes of `a` and `scale` that are numbers of 16 bits.

    Where there is a product of pairs (`lower`) it does this in one or two operations, taking the upper halves of the lanes times nothing.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def weigh(typingctx: Any, acc: Any, a: Any, scale: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            acc_value, a_value, scale_value = args
            pairs = i16x32.llvm
            low = builder.bitcast(builder.and_(scale_value, ir.Constant(scale_value.type, [0xFFFF] * 16)), pairs)

            def each(i: int) -> ir.Value:
                total, part = builder.extract_value(acc_value, i), builder.extract_value(a_value, i)
                if lower is None:
                    return builder.add(total, builder.mul(part, scale_value))
                return lower(builder, total, builder.bitcast(part, pairs), low)

            return tile_map(builder, acc, each)

        return acc(acc, a, i32x16), codegen

    return weigh


class Dots:
    """tile_dot4(acc, w u8x64 <= 127, rows), tile_dot4_full (w <= 255), tile_dot2 (w i16x32 pairs, int16 pairs at rows) and
    tile_weigh(acc, a, scale i32x16).
    """

    def __init__(self, isa: Isa) -> None:
        dot4, dot4_full, dot2, self._lookup = _operations(isa.name)
        self.tile_dot4 = _tile_dot(dot4, u8x64)
        self.tile_dot4_full = _tile_dot(dot4_full, u8x64)
        self.tile_dot2 = _tile_dot(dot2, i16x32)
        self.tile_weigh = _tile_weigh(dot2 if isa.name in ("amx", "avx512", "avxvnni", "avx2") else None)

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
