"""Which instruction set the kernels are compiled for, and the few operations whose best instruction differs by it.

An `Isa` names an LLVM CPU and features and gives the integer dot products as intrinsics over tiles. Kernels are written once and get an
`Isa` as a parameter. `detect()` chooses the best this machine executes; a name forces one.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

Lower = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
Lookup = Callable[[ir.IRBuilder, tuple[int, ...], ir.Value], ir.Value]


@dataclass(frozen=True)
class Isa:
    """An instruction set.

    name: what LOCALRUN_ISA takes; cpu, features: LLVM's target strings;
    dot4_us: (builder, acc i32x16, w u8x64, x i8x64) -> acc + sums of four products, for w up to 127;
    dot4_us_full: the same for w up to 255; dot2: (builder, acc i32x16, a i16x32, b i16x32) -> acc + sums of two products;
    lookup: (builder, table of 16 bytes, index u8x64 below 16) -> table[index];
    amx: whether 8-bit matrix tiles may be used.
    """

    name: str
    cpu: str
    features: str
    dot4_us: Lower
    dot4_us_full: Lower
    dot2: Lower
    lookup: Lookup
    amx: bool = False

    @functools.cached_property
    def ops(self) -> Any:
        """Namespace of Numba intrinsics over this instruction set (imports Numba)."""
        from localrun.kernels_cpu.dots import Dots

        return Dots(self)


def host_features() -> dict[str, bool]:
    """LLVM's feature names of this CPU, e.g. 'avx512vnni', with whether it has them."""
    return dict(llvm.get_host_cpu_features())


def available() -> list[str]:
    """Names of the instruction sets this machine executes, best first."""
    machine = platform.machine().lower()
    has = host_features()

    def all_of(*names: str) -> bool:
        return all(has.get(name, False) for name in names)

    found = []
    if machine in ("x86_64", "amd64"):
        avx2 = all_of("avx2", "fma", "f16c", "bmi2")
        avx512 = avx2 and all_of("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
        if avx512 and all_of("amx-tile", "amx-int8") and _amx_permitted():
            found.append("amx")
        if avx512:
            found.append("avx512")
        if avx2 and all_of("avxvnni"):
            found.append("avxvnni")
        if avx2:
            found.append("avx2")
    elif machine in ("arm64", "aarch64") and (sys.platform == "darwin" or all_of("dotprod")):
        found.append("neon")
    return [*found, "generic"]


@functools.cache
def _amx_permitted() -> bool:
    """Asks Linux to let this process use the tile registers; the permission then holds for all its threads."""
    if sys.platform != "linux":
        return False
    import ctypes

    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data) == 0


@functools.cache
def select(name: str = "") -> Isa:
    """The instruction set of that name, or the best one for an empty name.

    Raises ValueError naming what this machine has when it cannot execute the one asked for.
    """
    have = available()
    name = name or have[0]
    if name not in have:
        raise ValueError(f"LOCALRUN_ISA={name}: this machine executes {', '.join(have)}")
    return build(name)


def build(name: str) -> Isa:
    """The instruction set of that name whether or not this machine executes it (to compile and read its code)."""
    if name in ("amx", "avx512"):
        from localrun.kernels_cpu import isa_avx512 as ops

        host = llvm.get_host_cpu_features()
        # Half-precision arithmetic is left out: with it LLVM keeps converted halves in half registers, which would round differently.
        features = ",".join(f"{'+' if on and key != 'avx512fp16' else '-'}{key}" for key, on in host.items())
        return Isa(name, llvm.get_host_cpu_name(), features, ops.dot4_us, ops.dot4_us, ops.dot2, ops.lookup, amx=name == "amx")
    if name in ("avx2", "avxvnni"):
        from localrun.kernels_cpu import isa_avx2 as ops2

        if name == "avxvnni":
            return Isa(name, "x86-64-v3", "+avxvnni", ops2.dot4_us_vnni, ops2.dot4_us_vnni, ops2.dot2, ops2.lookup)
        return Isa(name, "x86-64-v3", "", ops2.dot4_us, ops2.dot4_us_full, ops2.dot2, ops2.lookup)
    from localrun.kernels_cpu import isa_generic

    if name == "neon":
        from localrun.kernels_cpu import isa_neon

        features = "+neon,+dotprod,+fullfp16"
        return Isa(name, "generic", features, isa_neon.dot4_us, isa_neon.dot4_us_full, isa_generic.dot2, isa_neon.lookup)
    if name == "generic":
        cpu = "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic"
        return Isa(name, cpu, "", isa_generic.dot4, isa_generic.dot4, isa_generic.dot2, isa_generic.lookup)
    raise ValueError(f"LOCALRUN_ISA={name}: known are amx, avx512, avxvnni, avx2, neon, generic")
