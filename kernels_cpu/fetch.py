"""Asking memory for what will be read soon.

Weights are read once a pass, front to back, and are fetched in two steps: far ahead into the second-level cache, which can wait for
three times as many lines at once as the first-level one, and from there shortly before their use. On the 1.5B one token took 50 ms with
one step of 4096 bytes into the first level, 39 ms so (2 threads of a Sapphire Rapids; 64 ms with hardware prefetching alone).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

FAR = 4096
"""Bytes between what is read and what is fetched into the second-level cache."""
NEAR = 640
"""The same for the first-level cache."""

_i32 = ir.IntType(32)



def _ask(builder: ir.IRBuilder, address: ir.Value, offset: int, lines: int, level: int) -> None:
    byte = ir.IntType(8).as_pointer()
    fnty = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, fnty, "llvm.prefetch.p0")
    read, locality, data = ir.Constant(_i32, 0), ir.Constant(_i32, 3 if level == 1 else 1), ir.Constant(_i32, 1)
    for line in range(lines):
        at = builder.inttoptr(builder.add(address, ir.Constant(address.type, offset + 64 * line)), byte)
        builder.call(function, [at, read, locality, data])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, address: Any, lines: Any) -> Any:
    """Asks for `lines` (a compile-time constant) cache lines from `address` on, into the first-level cache. Any address is allowed."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _ask(builder, args[0], 0, lines.literal_value, 1)
        return context.get_dummy_value()

    return types.void(types.int64, lines), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def fetch_ahead(typingctx: Any, address: Any, lines: Any) -> Any:
    """Of a stream that is read at `address` and on: asks for the `lines` (a compile-time constant) lines FAR and NEAR bytes behind it."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _ask(builder, args[0], FAR, lines.literal_value, 2)
        _ask(builder, args[0], NEAR, lines.literal_value, 1)
        return context.get_dummy_value()

    return types.void(types.int64, lines), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fetch_first(typingctx: Any, address: Any) -> Any:
    """Of a stream that begins at `address`: asks for all that `fetch_ahead` will not, being behind it already."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _ask(builder, args[0], 0, FAR // 64, 2)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
