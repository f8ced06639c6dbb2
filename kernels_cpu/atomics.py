"""What threads need beyond arithmetic: atomic words, a pause, calls through addresses; as Numba intrinsics."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic

from localrun.kernels_cpu.simd import pointer

_i64 = ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`, nothing read later moving before it."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load_atomic(pointer(builder, args[0], _i64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at `address`, everything written before being visible; returns what it held."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", pointer(builder, args[0], _i64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def compare_and_swap(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Whether the int64 at `address` held `old`; then it now holds `new`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        result = builder.cmpxchg(pointer(builder, args[0], _i64), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fence(typingctx: Any) -> Any:
    """Nothing written before it is seen by another thread after something written behind it; an instruction on ARM, none on x86."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx: Any) -> Any:
    """Tells the core that this thread is waiting."""
    machine = platform.machine().lower()

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if machine in ("x86_64", "amd64"):
            name, operands = "llvm.x86.sse2.pause", []
        elif machine in ("arm64", "aarch64"):
            name, operands = "llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)]
        else:
            return context.get_dummy_value()
        fnty = ir.FunctionType(ir.VoidType(), [o.type for o in operands])
        builder.call(cgutils.get_or_insert_function(builder.module, fnty, name), operands)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_kernel(typingctx: Any, address: Any, args: Any, head: Any, chunk: Any, thread: Any) -> Any:
    """Calls the kernel at `address`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, values: Any) -> ir.Value:
        fnty = ir.FunctionType(ir.VoidType(), [_i64] * 4)
        builder.call(pointer(builder, values[0], fnty), list(values[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_plain(typingctx: Any, address: Any) -> Any:
    """Calls a C function without arguments (sched_yield)."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, values: Any) -> ir.Value:
        fnty = ir.FunctionType(ir.IntType(32), [])
        builder.call(pointer(builder, values[0], fnty), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
