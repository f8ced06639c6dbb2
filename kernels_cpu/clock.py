"""The processor's counter of time, read from inside a kernel."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic

_i64 = ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def ticks(typingctx: Any) -> Any:
    """Ticks since some start, at a constant rate on processors of the last fifteen years: the time stamp counter on x86, on ARM the virtual
    counter (which programs may read, unlike its cycle counter)."""
    arm = platform.machine().lower() in ("arm64", "aarch64")

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if arm:
            return builder.asm(ir.FunctionType(_i64, []), "mrs $0, cntvct_el0", "=r", [], side_effect=True)
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(_i64, []), "llvm.readcyclecounter"), [])

    return types.int64(), codegen
