"""What the instructions of a recorded plan are on a card: kernels, grids, arguments.

A kernel of kernels_gpu takes the arguments of the CPU's kernel of the same name, so an instruction is carried over by giving each address
among them its counterpart in the card's memory. Which arguments are addresses stands in ADDRESSES; what is cut differently on a card has a
function of its own. Knows no model and no memory: a `Target` finds counterparts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from localrun.kernels_cpu import head
from localrun.kernels_gpu.layout import CARD_TYPES, PLANES
from localrun.kernels_gpu.source import ROUTE_THREADS, WARP_ROWS_THREADS, Kernel
from localrun.models.program import Instruction
from localrun.models.weights import Stack, Weight

MOST_BY_ROWS = 8
"""Activations up to which a matrix is taken row by row; more are taken in tiles."""
TILE_ROWS, TILE_TOKENS, ROWS_OF_FLOATS, WARPS = 64, 32, 32, 4
SHARED_BYTES = 48 << 10
QUERIES = 8
STEP = 64


class NotOnCard(Exception):
    """An instruction that no kernel of a card carries out; names it."""


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of one step, by which its grids are cut: a step with the same bounds can be replayed."""

    tokens: int
    outputs: int
    parts: int
    """Into which attention over one row is shared out."""
    logits: bool = True
    """Whether logits are wanted."""


Grid = tuple[int, int, int]


@dataclass
class Step:
    """One launch, but for the size of the batch. args: 0..ARGS - 1 words."""

    kernel: Callable[[Sizes], Kernel]
    grid: Callable[[Sizes], Grid]
    args: list[int]
    logits_at: int = -1
    """Which argument is the address of the logits, -1: none."""


class Target(Protocol):
    """A card's memory, while a plan is carried over."""

    def at(self, address: int) -> int:
        """The card's counterpart of an address in the plan's buffers or vectors; 0 for 0."""

    def planes(self, weight: Weight | Stack) -> list[int]:
        """Addresses of a matrix's planes (kernels_gpu/layout.py), all matrices of a stack one after the other."""


_READERS = {"norm": 9, "gated": 4, "activated": 3, "xielu": 3, "gated_limited": 4, "gather": 4}
"""Where the readers' words begin: three addresses with strides, then two addresses of tiles that a card does without."""
ADDRESSES = {
    "norm": (0, 3, 6), "norm_add": (0, 3, 5), "gated": (0, 1), "gated_limited": (0, 1), "activated": (0,), "xielu": (0,),
    "add": (0, 2, 6), "scale": (0, 4), "clamp": (0,), "scale_by_position": (0,), "norm_heads": (0, 4, 6), "rotate": (0,),
    "rope_kv": (0, 2, 4, 8, 9), "attention": (0, 4, 11, 12), "attention_merge": (0, 4, 11), "route": (0, 5, 10, 11, 12),
    "sort": (0, 3, 4, 5, 6, 7), "gather": (0, 3, 13), "combine": (0, 3, 4, 6),
}  # fmt: skip
_NOT_READ = {"norm": (7, 8), "gather": (14, 15), "attention": (9, 10), "attention_merge": (9, 10)}
"""Scratch memory that only the CPU's kernel uses."""
_VALUES = {"gated": 3, "gated_limited": 3, "activated": 2, "xielu": 2, "add": 4, "scale": 2, "clamp": 2, "scale_by_position": 2,
           "gather": 2, "combine": 2}  # fmt: skip
"""Kernels whose blocks take 256 values of a row, and which argument says how many it has."""
_WITH_FACTOR = {"gated": 12, "gated_limited": 13, "activated": 11, "norm_heads": 9}
"""Which argument says how many rows a token has."""


def steps_of(instruction: Instruction, to: Target) -> list[Step]:
    """What a card launches for it. Raises NotOnCard."""
    factory = instruction.kernel.factory
    if factory in ("matmul", "expert_matmul"):
        return [_product(instruction, to)]
    if factory == "soft_cap":
        return [_soft_cap(instruction)]
    if factory not in ADDRESSES or (instruction.kernel.module, factory) == ("experts", "norm"):
        raise NotOnCard(f"{instruction.name} ({instruction.kernel.module}.{factory})")
    args = list(instruction.args)
    for i in _NOT_READ.get(factory, ()):
        args[i] = 0
    if factory == "norm" and instruction.rule == "outputs":
        args[7:9] = [to.at(instruction.args[7]), instruction.args[8]]  # the last hidden states, which embedding reads
    first = _READERS.get(factory)
    if first is not None:
        args[first + 6 : first + 8] = [0, 0]
    readers = () if first is None else (first, first + 2, first + 4)
    for i in (*ADDRESSES[factory], *readers):
        args[i] = to.at(args[i])
    if factory in _WITH_FACTOR:
        args += [0] * (_WITH_FACTOR[factory] - len(args)) + [instruction.factor]
    kernel, grid = _cut(instruction)
    return [Step(lambda sizes: kernel, grid, args)]


def _cut(instruction: Instruction) -> tuple[Kernel, Callable[[Sizes], Grid]]:
    """Kernel and grid of an instruction that is the same for every batch."""
    factory, params, args, factor = instruction.kernel.factory, instruction.kernel.params, instruction.args, instruction.factor
    if factory in _VALUES:
        blocks = -(-args[_VALUES[factory]] // 256)
        return Kernel(factory, params), lambda sizes: (blocks, sizes.tokens * factor, 1)
    if factory == "attention":
        if len(params) != 5:
            raise NotOnCard("attention to later tokens")
        kv_type, dim, dim_v, cap, sloped = params
        wide = (int(dim_v) + 15) // 16 * 16
        if QUERIES * 4 * (int(dim) + STEP + 2 * wide) + 512 > SHARED_BYTES:
            raise NotOnCard(f"attention over heads of {dim} and {dim_v} values")
        n_kv = args[3]
        return Kernel(factory, (f"cache_{kv_type}", dim, dim_v, cap, sloped)), lambda sizes: (sizes.tokens, n_kv, sizes.parts)
    if factory == "attention_merge":
        n_heads = args[2]
        return Kernel(factory, params), lambda sizes: (sizes.tokens if sizes.parts > 1 else 0, n_heads, 1)
    if factory == "rope_kv":
        return Kernel(factory, (f"cache_{params[0]}", *params[1:])), lambda sizes: (sizes.tokens, 1, 1)
    if factory == "route":
        return Kernel(factory, (), ROUTE_THREADS), lambda sizes: (sizes.tokens, 1, 1)
    if factory == "sort":
        return Kernel(factory), lambda sizes: (1, 1, 1)
    if instruction.rule == "outputs":
        return Kernel(factory, params), lambda sizes: (sizes.outputs, 1, 1)
    return Kernel(factory, params), lambda sizes: (sizes.tokens * factor, 1, 1)


def rows_of_warp(activations: int) -> int:
    """Rows that one warp takes at a time, so that its registers hold."""
    return 1 if activations == MOST_BY_ROWS else 2


def _soft_cap(instruction: Instruction) -> Step:
    _, stride, n, cap = instruction.args
    blocks = -(-n // 256)

    def grid(sizes: Sizes) -> Grid:
        return blocks if sizes.logits else 0, sizes.outputs, 1

    return Step(lambda sizes: Kernel("soft_cap"), grid, [0, stride, n, cap], logits_at=0)


def _product(instruction: Instruction, to: Target) -> Step:
    weight, given = instruction.weight, instruction.args
    if weight is None:
        raise NotOnCard(instruction.name)
    card_type = CARD_TYPES[weight.type_name]
    planes = to.planes(weight)
    n_blocks = weight.columns // card_type.block
    x, x_stride, out, out_stride = to.at(given[4]), given[5], given[6], given[7]
    args = [*planes, *[0] * (PLANES - len(planes)), n_blocks, weight.rows, x, x_stride]
    if isinstance(weight, Stack):
        if instruction.kernel.params[1]:
            raise NotOnCard(f"{instruction.name}: a matrix for each head")
        bias, bias_step, starts, active, n_active = given[10:15]
        args += [to.at(out), out_stride, to.at(bias), 0, head.TOKENS // 8, weight.rows, 0, bias_step, to.at(starts), to.at(active)]
        args.append(to.at(n_active))
        return _expert_step(instruction, card_type.struct, card_type.is_float, weight, args)
    logits = out == 0
    outputs = given[11] == head.OUTPUTS
    args += [0 if logits else to.at(out), out_stride, to.at(given[9]), given[10], given[11] // 8]
    rows, struct = weight.rows, card_type.struct

    def count(sizes: Sizes) -> int:
        return sizes.outputs if outputs else sizes.tokens

    def kernel(sizes: Sizes) -> Kernel:
        n = min(count(sizes), MOST_BY_ROWS)
        if card_type.is_float:
            return Kernel("floats", (struct, n), WARP_ROWS_THREADS)
        if count(sizes) > MOST_BY_ROWS:
            return Kernel("tiles", (struct,))
        return Kernel("matvec", (struct, n, rows_of_warp(n)), WARP_ROWS_THREADS)

    def grid(sizes: Sizes) -> Grid:
        n = min(count(sizes), MOST_BY_ROWS)
        if not n or (logits and not sizes.logits):
            return 0, 1, 1
        if card_type.is_float:
            return -(-rows // ROWS_OF_FLOATS), -(-count(sizes) // n), 1
        if count(sizes) > MOST_BY_ROWS:
            return -(-rows // TILE_ROWS), -(-count(sizes) // TILE_TOKENS), 1
        return -(-rows // (WARPS * rows_of_warp(n))), 1, 1

    return Step(kernel, grid, args, logits_at=8 if logits else -1)


def _expert_step(instruction: Instruction, struct: str, is_float: bool, stack: Stack, args: list[int]) -> Step:
    """Of the pairs that chose an expert there are few in decoding, many in a prompt: as many at a time as there may be."""
    rows, n = stack.rows, stack.n
    parts = instruction.most // n
    k = instruction.factor // parts

    def at_once(sizes: Sizes) -> int:
        return min(sizes.tokens, MOST_BY_ROWS)

    def kernel(sizes: Sizes) -> Kernel:
        if is_float:
            return Kernel("expert_floats", (struct, at_once(sizes)), WARP_ROWS_THREADS)
        return Kernel("expert_matvec", (struct, at_once(sizes), rows_of_warp(at_once(sizes))), WARP_ROWS_THREADS)

    def grid(sizes: Sizes) -> Grid:
        per_block = ROWS_OF_FLOATS if is_float else WARPS * rows_of_warp(at_once(sizes))
        return -(-rows // per_block), min(n, sizes.tokens * k), 1

    return Step(kernel, grid, args)
