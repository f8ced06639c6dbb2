"""Where the activations of a tile's tokens lie: one address for each token, moved on together.

LLVM sees that rows are equally far apart, and adds up addresses anew before each load, an instruction for each; an empty piece of assembly
hides it. Each row then has a register of its own and loads are part of the instruction that multiplies: against eight tokens 16 products
came with 13 additions, and the processor, which works ahead by a number of operations, did not come far enough to hide waiting for weights.
Eight rows of Q4_K from memory, one thread: 235 ns a block, 172 so (132 and 124 out of the caches).
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

from localrun.kernels_cpu.simd import Tile, Vec, f32x16, i32x16, pointer, splat, tile_map

_word = ir.IntType(64)


class Rows(types.Type):  # type: ignore[misc]
    """Type of `count` addresses. `rows + bytes` moves all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Rows({count})")

    @property
    def llvm(self) -> ir.Type:
        return ir.ArrayType(_word, self.count)


@register_model(Rows)
class _RowsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Rows) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def rows_from(typingctx: Any, address: Any, stride: Any, count: Any) -> Any:
    """Rows at address, address + stride, ...: `count` (a compile-time constant) of them."""
    rows = Rows(count.literal_value)
    known = isinstance(stride, types.Literal)  # then the distances are part of the instructions anyway

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        hide = ir.InlineAsm(ir.FunctionType(_word, [_word]), "", "=r,0")
        result: ir.Value = ir.Constant(rows.llvm, ir.Undefined)
        step = ir.Constant(_word, stride.literal_value) if known else args[1]
        for i in range(rows.count):
            at = builder.add(args[0], builder.mul(step, ir.Constant(_word, i)))
            result = builder.insert_value(result, builder.call(hide, [at]) if i and not known else at, i)
        return result

    return rows(types.int64, stride if known else types.int64, count), codegen


@infer_global(operator.iadd)
@infer_global(operator.add)
class _Add(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        left, right = args
        return signature(left, left, types.int64) if isinstance(left, Rows) and isinstance(right, types.Integer) else None


@lower_builtin(operator.iadd, Rows, types.int64)  # type: ignore[untyped-decorator]
@lower_builtin(operator.add, Rows, types.int64)  # type: ignore[untyped-decorator]
def _add(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    result = args[0]
    for i in range(sig.return_type.count):
        result = builder.insert_value(result, builder.add(builder.extract_value(result, i), args[1]), i)
    return result


def words_at(builder: ir.IRBuilder, rows: ir.Value, i: int, elem: ir.Type) -> ir.Value:
    """Sixteen times the 32-bit word at row i."""
    return splat(builder, builder.load(pointer(builder, builder.extract_value(rows, i), elem), align=1), 16)


def _splatter(vec: Vec, elem: ir.Type) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, rows: Any) -> Any:
        tile = Tile(vec, rows.count)

        def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            return tile_map(builder, tile, lambda i: words_at(builder, args[0], i, elem))

        return tile(rows), codegen

    load.__doc__ = f"A tile of {vec.name}: the value at each row in all lanes of that row's vector."
    return load


rows_f32 = _splatter(f32x16, ir.FloatType())
rows_i32 = _splatter(i32x16, ir.IntType(32))
