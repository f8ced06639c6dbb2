"""Which instruction set the kernels are compiled for, and how this machine's is found out.

Kernels are written once and get an `Isa` as a parameter; `select` chooses the best this machine executes; a name forces one. Where all
kernels are cached this is asked at every start, so it is answered without LLVM where the system tells (Linux).
"""

from __future__ import annotations

import functools
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")
_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
"""Lines of cpuinfo that tell processors apart."""


@dataclass(frozen=True)
class Isa:
    """An instruction set, by the name that LOCALRUN_ISA takes. The operations whose best instruction differs by it are in dots.py."""

    name: str

    @property
    def amx(self) -> bool:
        """Whether 8-bit matrix tiles may be used."""
        return self.name == "amx"

    @property
    def by_processor(self) -> bool:
        """Whether kernels are compiled for this very processor, and not for all that have the instruction set."""
        return self.name in ("amx", "avx512")

    @functools.cached_property
    def target(self) -> tuple[str, str]:
        """LLVM's names of the processor and of its features; imports llvmlite where they are this processor's."""
        if self.by_processor:
            import llvmlite.binding as llvm

            host = llvm.get_host_cpu_features()
            # Half-precision arithmetic is left out: with it LLVM keeps converted halves in half registers, which would round differently.
            features = ",".join(f"{'+' if on and key != 'avx512fp16' else '-'}{key}" for key, on in host.items())
            return llvm.get_host_cpu_name(), features
        if self.name == "generic":
            return "x86-64" if platform.machine().lower() in ("x86_64", "amd64") else "generic", ""
        return {"avxvnni": ("x86-64-v3", "+avxvnni"), "avx2": ("x86-64-v3", ""), "neon": ("generic", "+neon,+dotprod")}[self.name]

    @functools.cached_property
    def ops(self) -> Any:
        """Namespace of Numba intrinsics over this instruction set (imports Numba)."""
        from localrun.kernels_cpu.dots import Dots

        return Dots(self)


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    if sys.platform != "linux":
        return {}
    found: dict[str, str] = {}
    with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
    return found


def _features() -> set[str]:
    """LLVM's names, without hyphens, of what this processor has."""
    info = _cpuinfo()
    if told := info.get("flags"):
        return {name.replace("_", "") for name in told.split()}
    import llvmlite.binding as llvm

    return {name.replace("-", "") for name, on in llvm.get_host_cpu_features().items() if on}


def processor() -> tuple[str, ...]:
    """What tells this processor from others that kernels may have been compiled for."""
    info = _cpuinfo()
    if "flags" in info:
        return tuple(info.get(key, "") for key in _MODEL)
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), repr(sorted(llvm.get_host_cpu_features().items()))


def available() -> list[str]:
    """Names of the instruction sets this machine executes, best first."""
    machine = platform.machine().lower()
    found = []
    if machine in ("x86_64", "amd64"):
        has = _features()
        avx2 = has >= {"avx2", "fma", "f16c", "bmi2"}
        avx512 = avx2 and has >= {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
        if avx512 and has >= {"amxtile", "amxint8"} and _amx_permitted():
            found.append("amx")
        if avx512:
            found.append("avx512")
        if avx2 and "avxvnni" in has:
            found.append("avxvnni")
        if avx2:
            found.append("avx2")
    elif machine in ("arm64", "aarch64") and _arm_has_dot_products():
        found.append("neon")
    return [*found, "generic"]


def _arm_has_dot_products() -> bool:
    """Whether this ARM processor has SDOT. On Linux the kernel is asked: LLVM's list of features leaves it out there, and an emulator's
    cpuinfo may be that of the machine below.
    """
    if sys.platform == "darwin":
        return True
    if sys.platform != "linux":
        return "dotprod" in _features()
    import ctypes

    capabilities, asimddp = 16, 1 << 20
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return bool(getauxval(capabilities) & asimddp)


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


@functools.cache
def build(name: str) -> Isa:
    """The instruction set of that name whether or not this machine executes it (to compile and read its code). Raises ValueError."""
    if name not in ("amx", "avx512", "avxvnni", "avx2", "neon", "generic"):
        raise ValueError(f"LOCALRUN_ISA={name}: known are amx, avx512, avxvnni, avx2, neon, generic")
    return Isa(name)
