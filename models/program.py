"""What a recorded forward pass is made of: instructions, the rows they work on, the memory these lie in, the table that is replayed.

`plan.Recorder` makes them, `load.RecordedModel` replays them. Nothing here knows a kernel.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.activation_sizes import MANY
from localrun.kernels_cpu.routing import Layout
from localrun.kernels_cpu.shapes import DEFAULT, Shape
from localrun.kernels_cpu.spec import KernelSpec

if TYPE_CHECKING:
    from localrun.models.weights import Stack, Weight

T = TypeVar("T", bound=np.generic)
Rule = Literal["one", "tokens", "outputs", "tile_parts", "merges", "spans", "matmul", "output_matmul"]
RULES: tuple[Rule, ...] = ("one", "tokens", "outputs", "tile_parts", "merges", "spans", "matmul", "output_matmul")
"""What an instruction's chunk count is a multiple of; a matmul's is one number for plain tiles and another for matrix tiles."""
MATRIX_FROM, WIDE_FROM = 18, 19
"""Where a matmul's arguments have its shape."""
STEADY = 16
"""Rows up to which threads take long runs of a matmul's chunks; with more, a run takes so long that the system may stop a thread in it."""
EMBEDDING = "token_embd.weight"
MAX_RANK = 4096
"""Of all adapters of one matrix together."""
HOST = -1
"""The place of instructions that no card runs."""


def float_bits(value: float) -> int:
    """A float32's bits, as kernels take floats among their integer arguments."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def room(n: int) -> int:
    """n rounded up to whole vectors of 16."""
    return (n + 15) // 16 * 16


class Memory:
    """Zeroed, 64-byte aligned buffers that live as long as the plan."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._keep: list[NDArray[np.uint8]] = []
        self.regions: list[tuple[int, int]] = []
        """(address, bytes) of each buffer."""

    def allocate(self, nbytes: int) -> int:
        """Address of a new buffer."""
        array = np.zeros(nbytes + 64, np.uint8)
        self._keep.append(array)
        self.nbytes += nbytes
        address = int(-(-array.ctypes.data // 64) * 64)
        self.regions.append((address, nbytes))
        return address

    def view(self, address: int, n: int, kind: type[T]) -> NDArray[T]:
        """A buffer's first n values, to be written from outside."""
        size = n * np.dtype(kind).itemsize
        for array in self._keep:
            first = address - array.ctypes.data
            if first >= 0 and first + size <= len(array):
                return array[first : first + size].view(kind)
        raise ValueError("no buffer lies there")


@dataclass
class Instruction:
    kernel: KernelSpec
    args: list[int]
    rule: Rule
    factor: int
    beside: bool
    name: str
    most: int = 0
    """Bound of the chunk count, 0: none."""
    place: int = HOST
    """Which card runs it."""
    weight: Weight | Stack | None = None
    """The matrix it reads, where a card runs it; its address is then no argument."""
    large_factor: int = 0
    """Of a matmul by matrix tiles."""


@dataclass(frozen=True)
class Row:
    """float32 (tokens * per_token, width) at `address`, `stride` bytes from row to row."""

    address: int
    stride: int
    width: int
    per_token: int = 1

    def columns(self, first: int, n: int) -> Row:
        """A part of each row. Kernels read and write whole vectors of 16: n and the start must be multiples, or nothing may lie behind."""
        return Row(self.address + 4 * first, self.stride, n, self.per_token)


@dataclass
class Activation:
    """A row that matmuls will read. `forms` fills as they are recorded: kind -> (address, stride, address of tiles)."""

    width: int
    producer: Instruction
    readers_at: int
    """Where the producer's arguments name the forms it has to write."""
    buffer: str
    per_token: int = 1
    forms: dict[str, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """A matrix that adapters can be beside: instruction number `after` has just given its product."""

    after: int
    tensor: str
    first_row: int
    rows: int
    x: Activation | None
    """None: the matrix is the embedding, whose rows are looked up."""
    out: Row
    factor: float
    outputs: bool
    """Whether the rows are those whose logits are wanted."""


@dataclass(frozen=True)
class Routing:
    """Where a layer's choice of experts lies."""

    n: int
    k: int
    address: int
    layout: Layout

    def at(self, name: str) -> int:
        """Address of one of its arrays."""
        return self.address + int(getattr(self.layout, name))


@dataclass(frozen=True)
class DistanceBias:
    """What is added to scores by distance. address: of the first head's float32 for distance 0, further ones beside it; stride: bytes from
    head to head."""

    address: int
    stride: int


@dataclass(frozen=True)
class Hidden:
    """Where the last hidden states are found after a pass."""

    row: Row
    by_output: bool
    """A row for each that was asked for, instead of one for each token."""
    scale: float
    """What they were multiplied by."""


@dataclass
class Program:
    """What `Recorder.finish` gives: the table without kernel addresses, and how to size it for a step."""

    table: NDArray[np.int64]
    args: NDArray[np.int64]
    kernels: list[KernelSpec]
    names: list[str]
    rule: NDArray[np.int64]
    factor: NDArray[np.int64]
    large_factor: NDArray[np.int64]
    most: NDArray[np.int64]
    logits: int
    """Index of the instruction that writes the logits; -1: there are none."""
    max_positions: int
    """Positions the model as supported can handle; 0: no bound."""
    partial_bytes: int
    """Memory that attention needs for each part of each row when it shares out rows."""
    fewest_kv: int
    """Key-value heads of the layer that has the fewest."""
    adapted: dict[int, Site] = field(default_factory=dict)
    """Instructions that apply adapters, where the program was finished with some."""
    hidden: Hidden | None = None
    head: list[int] = field(default_factory=list)
    """Indices of the instructions that only scores need."""
    logits_only: list[int] = field(default_factory=list)
    """Indices of those that only logits need."""
    scores: Row | None = None
    """(O, labels), where the model has a classification head."""
    encoder: list[int] = field(default_factory=list)
    """Indices of the instructions that only the encoder's input needs, where there is a decoder, too."""
    decoder: list[int] = field(default_factory=list)
    """Indices of all others of such a model."""
    ends: NDArray[np.int32] | None = None
    """Where tokens see those behind them: (max_batch,) positions of each row's sequence, to be set before each step."""
    shares: NDArray[np.int64] = field(init=False)
    """Of each matmul, its shape's share, and of attention; 0: the instruction is another."""
    cut: int = 0
    """How many instructions run before cards take over; what follows runs after them."""

    def __post_init__(self) -> None:
        shares = {"matmul": DEFAULT.share, "attention": 1}
        self.shares = np.array([shares.get(kernel.factory, 0) for kernel in self.kernels], np.int64)

    @property
    def weight_types(self) -> list[str]:
        """That its matmuls read."""
        return list(dict.fromkeys(str(kernel.params[0]) for kernel in self.kernels if kernel.factory == "matmul"))

    def names_at(self, name: str) -> NDArray[np.int64]:
        """Numbers of the instructions of that name."""
        return np.array([i for i, known in enumerate(self.names) if known == name], np.int64)

    def chunks(self, tokens: int, outputs: int, tiles: int, parts: int, spans: int = 1) -> NDArray[np.int64]:
        """Chunk count of each instruction for a step of these sizes."""
        units = np.array([1, tokens, outputs, tiles * parts, tiles if parts > 1 else 0, spans, 1, 1], np.int64)
        factor = self.factor
        if tokens >= MANY:
            # As many rows as there are decide in the kernel, too; see matmul.py.
            rows = np.array([-1] * 6 + [tokens, outputs])
            factor = np.where(rows[self.rule] >= self.args[:, MATRIX_FROM], self.large_factor, factor)
        chunks: NDArray[np.int64] = np.minimum(factor * units[self.rule], self.most)
        return chunks

    def grains(self, chunks: NDArray[np.int64], n_threads: int, tokens: int) -> NDArray[np.int64]:
        """How many chunks a thread takes at once, see Team.run: rows of tokens are small, so several, but a sixteenth of a thread's share
        at most; of matrices as much of what is left as its shape says.
        """
        grains = np.where(self._by_row, np.maximum(1, chunks // (16 * n_threads)), 1)
        return np.where(self.shares > 0, self.shares * -n_threads, grains) if tokens <= STEADY else grains

    def most_read(self) -> str:
        """The weight type that a pass reads most of; empty: there are no matmuls."""
        read: dict[str, int] = {}
        for i, kernel in enumerate(self.kernels):
            if kernel.factory == "matmul":
                name = str(kernel.params[0])
                read[name] = read.get(name, 0) - int(-self.args[i, 3] // 16 * self.args[i, 1])
        return max(read, key=lambda name: read[name], default="")

    def use(self, shapes: Mapping[str, Shape]) -> None:
        """Multiplies matrices of these types in these shapes from the next pass on."""
        for i, kernel in enumerate(self.kernels):
            if kernel.factory == "matmul":
                shape = shapes.get(str(kernel.params[0]), DEFAULT)
                self.args[i, MATRIX_FROM], self.args[i, WIDE_FROM] = shape.matrix_from, shape.wide_from
                self.shares[i] = shape.share

    @functools.cached_property
    def around_cards(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The table before and behind what cards run. Kept: a team remembers every table that it has been given."""
        return self.table[: self.cut], self.table[self.cut :]

    @functools.cached_property
    def _by_row(self) -> NDArray[np.bool_]:
        """Which instructions have a chunk for each row. Kept: between two passes, which empty the caches, every look is slow."""
        return np.isin(self.rule, (RULES.index("tokens"), RULES.index("outputs")))
