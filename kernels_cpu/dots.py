"""Dot products and table lookup of an instruction set as Numba intrinsics; dot products take one weight vector against several tokens."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from localrun.kernels_cpu.isa import Isa, Lower
from localrun.kernels_cpu.simd import i16x32, pointer, splat, tile_map, u8x64

_i32 = ir.IntType(32)


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
        self._isa = isa
        self.tile_dot4 = _tile_dot(isa.dot4_us, u8x64)
        self.tile_dot4_full = _tile_dot(isa.dot4_us_full, u8x64)
        self.tile_dot2 = _tile_dot(isa.dot2, i16x32)

    def lookup(self, table: tuple[int, ...]) -> Any:
        """lookup(index u8x64) -> u8x64: 16 unsigned bytes by index 0..15."""
        if len(table) != 16 or not all(0 <= value < 256 for value in table):
            raise ValueError(f"a table is 16 bytes, not {table}")
        lower = self._isa.lookup

        @intrinsic  # type: ignore[untyped-decorator]
        def look(typingctx: Any, index: Any) -> Any:
            def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
                return lower(builder, table, args[0])

            return u8x64(u8x64), codegen

        return look
