"""The CUDA C++ text of the kernels that are asked for.

The files in cuda/ hold templates and functions; a kernel is one of these with its parameters, and gets an entry point of its own. Only what
is asked for is compiled, so a model costs the compile time of its own kernels. The same text is compiled for a card (card.cuh in front) and
for the host (emulate.h in front). Knows names and files, not what runs them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

FILES = ("base", "rows", "weights", "matmul", "attention", "experts")
THREADS = 256
WARP_ROWS_THREADS = 128
"""Threads of kernels that give each warp rows of a matrix of its own."""
ROUTE_THREADS = 32
BLOCKS_AT_ONCE = {THREADS: 2, WARP_ROWS_THREADS: 5, ROUTE_THREADS: 8}
"""Of so many threads, that a multiprocessor must have registers for: enough to hide memory's latency, few enough to spill nothing."""

Machine = Literal["card", "host"]


@dataclass(frozen=True)
class Kernel:
    """`function` of cuda/*.cuh with its template parameters, run by blocks of `threads` threads."""

    function: str
    params: tuple[str | int, ...] = ()
    threads: int = THREADS

    @property
    def symbol(self) -> str:
        """Name of its entry point."""
        return re.sub(r"\W", "_", "_".join(["localrun", self.function, *map(str, self.params)]))

    @property
    def call(self) -> str:
        return self.function + (f"<{', '.join(map(str, self.params))}>" if self.params else "")


def _text(name: str) -> str:
    return files("localrun.kernels_gpu").joinpath("cuda", name).read_text(encoding="utf-8")


def source(kernels: Iterable[Kernel], machine: Machine) -> str:
    """One translation unit with an entry point `void symbol(const i64 *args, const i64 *head)` for each kernel."""
    parts = [_text("card.cuh" if machine == "card" else "emulate.h"), *(_text(f"{name}.cuh") for name in FILES)]
    for kernel in dict.fromkeys(kernels):
        bounds = f"__launch_bounds__({kernel.threads}, {BLOCKS_AT_ONCE[kernel.threads]}) " if machine == "card" else ""
        entry = f'extern "C" __global__ void {bounds}{kernel.symbol}(const i64 *args, const i64 *head)'
        parts.append(f"{entry} {{ {kernel.call}(args, head); }}")
    return "\n".join(parts) + "\n"


def fingerprint(text: str, *also: str) -> str:
    """Name for what was compiled from that text by these means."""
    return hashlib.sha256("\0".join([text, *also]).encode()).hexdigest()[:24]
