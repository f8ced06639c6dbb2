"""The machine code of a matmul tile, for reading: `python -m localrun.kernels_cpu.inspect Q4_K [--isa avx512] [--tokens 1] [--all]`.

Prints the loop that takes most of the time and how many instructions the tile spends on 64 weights of each of its 16 rows. Knows assembly
only as text: labels, jumps and mnemonics. Works for instruction sets that this machine does not execute, too.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from localrun.kernels_cpu import isa as isas
from localrun.kernels_cpu.compile import inspect_asm
from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.spec import KernelSpec

DOTS = {
    "amx": ("vpdpbusd", 64), "avx512": ("vpdpbusd", 64), "avxvnni": ("vpdpbusd", 32), "avx2": ("vpmaddubsw", 32), "neon": ("sdot", 16),
}  # fmt: skip
"""The instruction that multiplies weight bytes, and how many of them it takes."""
FLOATS = {"neon": ("fmla", 4), "generic": ("mulps", 4), "avx2": ("vfmadd", 8), "avxvnni": ("vfmadd", 8)}
"""Likewise for tiles of kind 'f'; 'vfmadd' and 16 for the others."""
FULL_BYTES = ("Q8_0", "IQ4_NL", "IQ4_XS")
"""Types whose unsigned codes need all 8 bits, which costs AVX2 two instructions instead of one, and NEON one for the 16 rows together."""


def tile_kernel(isa: Isa, type_name: str, tokens: int) -> Any:
    """Kernel: one tile and nothing else. args: 0 packed group, 1 blocks, 2 activations, 3 bytes between tokens, 4 out."""
    from localrun.kernels_cpu.matmul import make_tile
    from localrun.kernels_cpu.simd import load_i64, tile_store_all

    tile = make_tile(isa, type_name, tokens)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        sums = tile(load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24))
        tile_store_all(sums, load_i64(args + 32), 64)

    return kernel


@dataclass(frozen=True)
class Loop:
    """Lines first..last (inclusive) of the assembly, ending in the jump back."""

    first: int
    last: int

    def __contains__(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


def instructions(lines: list[str]) -> list[str]:
    """Mnemonics of the lines that are instructions (not labels, directives or comments)."""
    found = (re.match(r"\s+([a-z][\w.]*)", line) for line in lines)
    return [match[1] for match in found if match]


def loops(lines: list[str]) -> list[Loop]:
    """Stretches of code that end in a jump to their beginning, inner ones first."""
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.?\w+):", line))}
    longest: dict[int, int] = {}
    for i, line in enumerate(lines):
        match = re.match(r"\s+(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s.*?(\.?L\w+)\s*$", line.split("#")[0].split("//")[0].rstrip())
        if match and labels.get(match[1], i) < i:
            longest[labels[match[1]]] = i
    return sorted((Loop(first, last) for first, last in longest.items()), key=lambda loop: loop.last - loop.first)


@dataclass(frozen=True)
class Report:
    """What `analyse` finds. steps: iterations of `inner` in one of `outer`; total: instructions of one of `outer`; weights: of a row in it.
    """

    lines: list[str]
    outer: Loop
    inner: Loop
    steps: int
    total: int
    weights: int

    @property
    def per_64_weights(self) -> float:
        """Instructions on 64 weights of each of 16 rows, that is 1024 multiplications for each token."""
        return self.total * 64 / self.weights


def analyse(assembly: str, isa_name: str, type_name: str, tokens: int) -> Report:
    """Finds the loop over blocks and the innermost loop that multiplies. Raises ValueError when the code has no such loops.

    How often the inner loop runs follows from the multiplications that a block needs.
    """
    from localrun.kernels_cpu.sizes import PACKINGS

    packing = PACKINGS[BY_NAME[type_name].id]
    mnemonic, width = DOTS.get(isa_name, ("", 0)) if packing.kind != "f" else FLOATS.get(isa_name, ("vfmadd", 16))
    if not mnemonic:
        raise ValueError(f"{isa_name} has no instruction for dot products of bytes to look for; read the whole code with --all")
    lines = assembly.splitlines()

    def count(loop: Loop) -> int:
        return sum(name.startswith(mnemonic) for name in instructions(lines[loop.first : loop.last + 1]))

    working = [loop for loop in loops(lines) if count(loop)]
    if not working:
        raise ValueError("no loop multiplies weights; read the whole code with --all")
    outer = max(working, key=lambda loop: (count(loop), loop.last - loop.first))
    inner = min(working, key=lambda loop: (any(other in loop for other in working), -count(loop)))
    body = len(instructions(lines[outer.first : outer.last + 1]))
    weights = 4 if packing.kind == "f" else packing.block
    needed = weights * 16 // width * tokens
    if type_name in FULL_BYTES:
        needed += {"avx2": needed, "neon": needed // 4}.get(isa_name, 0)
    if inner == outer:
        return Report(lines, outer, inner, 1, body, weights * max(1, count(outer) // needed))
    within = len(instructions(lines[inner.first : inner.last + 1]))
    steps = max(1, round((needed - (count(outer) - count(inner))) / count(inner)))
    return Report(lines, outer, inner, steps, body + (steps - 1) * within, weights)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m localrun.kernels_cpu.inspect", description="Machine code of a matmul tile.")
    parser.add_argument("type", choices=sorted(BY_NAME), metavar="TYPE", help="tensor type, e.g. Q4_K")
    parser.add_argument("--isa", default="", help="amx, avx512, avxvnni, avx2, neon or generic (default: what this machine would use)")
    parser.add_argument("--tokens", type=int, default=1, choices=(1, 2, 4, 8), help="tokens of the tile (default 1)")
    parser.add_argument("--all", action="store_true", help="print the whole tile, not only its inner loop")
    args = parser.parse_args(argv)
    from localrun.kernels_cpu.sizes import PACKINGS

    if BY_NAME[args.type].id not in PACKINGS:
        sys.stderr.write(f"{args.type} holds no weights that kernels multiply by\n")
        return 2
    try:
        isa = isas.build(args.isa) if args.isa else isas.select()
        triple = "aarch64-linux-gnu" if isa.name == "neon" else None
        assembly = inspect_asm(KernelSpec("inspect", "tile_kernel", (args.type, args.tokens)), isa, triple)
        if args.all:
            sys.stdout.write(assembly)
        report = analyse(assembly, isa.name, args.type, args.tokens)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    inner = report.lines[report.inner.first : report.inner.last + 1]
    names = instructions(inner)
    common = ", ".join(f"{n} {name}" for name, n in Counter(names).most_common(8))
    sys.stdout.write("\n".join([
        *([] if args.all else [*inner, ""]),
        f"{args.type}, {isa.name}, tile of 16 rows, {args.tokens} token(s). The inner loop has {len(names)} instructions ({common}).",
        f"It runs {report.steps} time(s) for {report.weights} weights of a row, which take {report.total} instructions in all.",
        f"Instructions on 64 weights of each row: {report.per_64_weights:.1f}, or {report.per_64_weights / 16:.2f} a row and 64 weights.\n",
    ]))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
