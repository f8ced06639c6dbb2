"""From a kernel's Python to an image of machine code.

A kernel is made by a factory, `factory(isa, *params)`, that returns a function `f(args, head, chunk, thread)` of four int64 for Numba.
Numba types and lowers it, LLVM optimises it for the chosen instruction set (not for the host, so that every set can be tried on one
machine), and link.py makes of the object file what library.py keeps and loads. Only compiling processes come here.

    void kernel(i64 args, i64 head, i64 chunk, i64 thread)

args: address of the instruction's int64 arguments; head: address of the step header; chunk: which part of the work; thread: which
thread runs it (for scratch memory). What the arguments mean is said by each kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.link import Image, image
from localrun.kernels_cpu.spec import KernelSpec

ENTRY = "kernel"

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def kernel_ir(spec: KernelSpec, isa: Isa) -> str:
    """LLVM IR, not yet optimised, of the kernel's whole call tree, with one visible function, ENTRY. Imports Numba."""
    import numba
    from numba.core import config
    from numba.core.compiler import Flags, compile_extra
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    # Optimising is done once, below, for the instruction set asked for; the loop vectoriser has nothing to add to explicit vectors.
    config.OPT = config._OptLevel("0")
    config.LOOP_VECTORIZE = 0
    config.SLP_VECTORIZE = 0
    factory = getattr(importlib.import_module(f"localrun.kernels_cpu.{spec.module}"), spec.factory)
    function = factory(isa, *spec.params)
    flags = Flags()
    flags.nrt = False
    flags.error_model = "numpy"
    flags.enable_pyobject = False
    flags.noalias = False
    with _lowering_only(), global_compiler_lock:
        result = compile_extra(
            cpu_target.typing_context, cpu_target.target_context, function, (numba.int64,) * 4, numba.void, flags, {}
        )
        result.library.finalize()  # links in what it calls
        text = result.library.get_llvm_str()
    return _with_entry(text, result.fndesc.llvm_func_name) + (_SOFT_HALF if isa.name == "generic" else "")


@contextlib.contextmanager
def _lowering_only() -> Iterator[None]:
    """Keeps Numba from making machine code of every function for this machine, which nobody would run, and from wrapping it for Python.

    It would take a quarter of the compile time, and fail for another architecture's intrinsics. Functions compiled inside can be called by
    kernels, not by Python.
    """
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.core.cpu import CPUContext
    from numba.core.lowering import Lower

    changes: list[tuple[type, str, Callable[..., Any]]] = [
        (JITCodeLibrary, "_finalize_specific", lambda library: None),
        (JITCPUCodegen, "_add_module", lambda codegen, module: None),
        (Lower, "create_cpython_wrapper", lambda lower, release_gil=False: None),
        # What identifies a function to Numba must be built in and unique.
        (CPUContext, "get_executable", lambda context, library, fndesc, env: [].append),
    ]
    before = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, change in changes:
        setattr(owner, name, change)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def _with_entry(text: str, function: str) -> str:
    """Adds ENTRY, which calls the Numba function (return slot and exception slot first) and ignores its status: kernels do not raise."""
    entry = f"""
define void @{ENTRY}(i64 %args, i64 %head, i64 %chunk, i64 %thread) {{
  %r = alloca ptr
  %e = alloca ptr
  %s = call i32 @"{function}"(ptr %r, ptr %e, i64 %args, i64 %head, i64 %chunk, i64 %thread)
  ret void
}}
"""
    return text + entry


_SOFT_HALF = """
define float @__extendhfsf2(half %h) {
  %b = bitcast half %h to i16
  %w = zext i16 %b to i32
  %s = and i32 %w, 32768
  %sign = shl i32 %s, 16
  %m = and i32 %w, 32767
  %shifted = shl i32 %m, 13
  %tiny = bitcast i32 %shifted to float
  %scaled = fmul float %tiny, 0x46F0000000000000
  %finite = bitcast float %scaled to i32
  %special = or i32 %shifted, 2139095040
  %isspecial = icmp uge i32 %m, 31744
  %magnitude = select i1 %isspecial, i32 %special, i32 %finite
  %bits = or i32 %magnitude, %sign
  %r = bitcast i32 %bits to float
  ret float %r
}

define half @__truncsfhf2(float %f) {
  %u = bitcast float %f to i32
  %high = lshr i32 %u, 16
  %sign = and i32 %high, 32768
  %a = and i32 %u, 2147483647
  %af = bitcast i32 %a to float
  %sum = fadd float %af, 5.0e-01
  %sumbits = bitcast float %sum to i32
  %small = sub i32 %sumbits, 1056964608
  %last = lshr i32 %a, 13
  %odd = and i32 %last, 1
  %rounding = add i32 %odd, 3355447295
  %rounded = add i32 %a, %rounding
  %normal = lshr i32 %rounded, 13
  %issmall = icmp ult i32 %a, 947912704
  %finite = select i1 %issmall, i32 %small, i32 %normal
  %islarge = icmp uge i32 %a, 1199570944
  %orinf = select i1 %islarge, i32 31744, i32 %finite
  %payload = and i32 %last, 1023
  %nan = or i32 %payload, 32256
  %isnan = icmp ugt i32 %a, 2139095040
  %magnitude = select i1 %isnan, i32 %nan, i32 %orinf
  %bits = or i32 %magnitude, %sign
  %half = trunc i32 %bits to i16
  %r = bitcast i16 %half to half
  ret half %r
}
"""
"""What LLVM calls to convert between halves and floats on a machine without instructions for it; not every process has it from elsewhere.

Widening: shifting a half's bits into a float's place makes it too small by 2**112, subnormal or not. Narrowing: a float below 2**-14 is
rounded to a half's subnormal by adding 0.5, whose last bit is worth as much; others by adding all but one of the bits to be cut off, one
more if the last that stays is odd, and by the difference of the exponents' biases.
"""
_HELPERS = (ENTRY, "__extendhfsf2", "__truncsfhf2")


def _triple() -> str:
    """This machine's, with ELF for the form of object files."""
    triple = llvm.get_default_triple()
    return f"{triple}-elf" if sys.platform in ("darwin", "win32") else triple


def target_machine(isa: Isa, triple: str | None = None) -> llvm.TargetMachine:
    """LLVM's code generator for that instruction set. Its code runs wherever it is put, so constants are read by their distance."""
    cpu, features = isa.target
    target = llvm.Target.from_triple(triple or _triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")


def optimise(text: str, machine: llvm.TargetMachine, triple: str | None = None) -> llvm.ModuleRef:
    """Parses IR and runs LLVM's -O3 over it with everything but ENTRY (and what only the code generator calls) made internal."""
    module = llvm.parse_assembly(text)
    module.triple = triple or _triple()
    module.data_layout = str(machine.target_data)
    for function in module.functions:
        if not function.is_declaration and function.name not in _HELPERS:
            function.linkage = "internal"
            if " x " in str(function.global_value_type):
                # Takes vectors: passing them through memory would cost more than the work.
                function.add_function_attribute("alwaysinline")
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.inlining_threshold = 100_000
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def compile_image(spec: KernelSpec, isa: Isa) -> Image:
    """The kernel's image. Imports Numba; takes from a few tenths of a second to a few seconds."""
    machine = target_machine(isa)
    return image(machine.emit_object(optimise(kernel_ir(spec, isa), machine)), ENTRY)


def inspect_asm(spec: KernelSpec, isa: Isa, triple: str | None = None) -> str:
    """The kernel's assembly, to be read; `triple` for another machine's, e.g. 'aarch64-linux-gnu'."""
    if triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    machine = target_machine(isa, triple)
    return machine.emit_assembly(optimise(kernel_ir(spec, isa), machine, triple))
