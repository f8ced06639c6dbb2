"""A compiling process (see localrun.kernels_cpu.library) that makes aarch64 code on another machine, for tests that run under emulation.

Native and so some twenty times quicker than the emulated compiler would be. What depends on the machine it runs on is changed as little
as can be: the answers of `platform.machine`, and LLVM's triple.
"""

from __future__ import annotations

import platform

import llvmlite.binding as llvm

from localrun.kernels_cpu import compile as compiling
from localrun.kernels_cpu.library import worker

TRIPLE = "aarch64-unknown-linux-gnu"


def main() -> None:
    """Serves jobs on stdin until it ends, like the process it stands for."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    platform.machine = lambda: "aarch64"
    compiling._triple = lambda: TRIPLE
    worker()


if __name__ == "__main__":
    main()
