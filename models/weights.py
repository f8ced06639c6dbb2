"""A file's tensors as kernels take them: addresses.

Matrices are repacked (kernels_cpu/pack.py) into one anonymous mapping on huge pages where memory allows, each tensor's file pages dropped
behind it; otherwise kernels read the mapped blocks where they lie and repack group by group as they go, with the same results.
Vectors (norms, biases) are float32 with room up to a multiple of 16.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_cpu.library import KernelLibrary
from localrun.kernels_cpu.sizes import PACKINGS, Packing
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.team import Team, table_of
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo
from localrun.models.memory import HUGE_PAGE, anonymous, available
from localrun.models.model import Progress
from localrun.models.validate import BF16, F16, F32

SPARE_MEMORY = 1 << 30
"""What must stay free beside repacked weights for the weights to be repacked unasked."""
PORTION = 32 << 20
"""Bytes of tensors that are in memory twice, as the file has them and packed."""
CHUNK = HUGE_PAGE
"""Bytes that a thread packs at once: were they fewer, two threads would often begin the same huge page, and both clear one for it."""
SINGLE_ROWS = ("_shexp.weight", "cls.output.weight")
"""Ends of the names of tensors that are matrices of one row, which files keep as vectors."""


class Vector:
    """A float32 vector of n values at `address`."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.n = len(values)
        self._data = np.zeros((self.n + 31) // 16 * 16, np.float32)
        self._data[: self.n] = values
        self.address = self._data.ctypes.data

    @property
    def memory(self) -> NDArray[np.float32]:
        """The values and the room behind them."""
        return self._data


class Weight:
    """A matrix (rows, columns): out = W x takes `columns` values and gives `rows`."""

    def __init__(self, owner: Weights, info: TensorInfo, packing: Packing, source: int, first_row: int, rows: int) -> None:
        self._owner = owner
        self._packing = packing
        self._address = 0
        self.name = info.name
        self.type_name = packing.format.name
        self.columns = info.shape[0]
        self.rows = rows
        self.first_row = first_row
        """Where in the tensor it begins."""
        self.row_bytes = packing.format.row_bytes(self.columns)
        self.source = source + first_row * self.row_bytes
        """Address in the mapped file."""
        self.packed = owner.pack
        self.kind = packing.kind
        self.block = packing.block
        self.group_bytes = packing.group_bytes(self.columns)

    @property
    def address(self) -> int:
        """What matmuls read: the packed groups (reserved by the first to ask, filled by Weights.fill), or the file's rows."""
        if not self.packed:
            return self.source
        if not self._address:
            self._address = self._owner._reserve(self)
        return self._address

    @property
    def packed_bytes(self) -> int:
        return -(-self.rows // 16) * self.group_bytes

    def file_rows(self) -> NDArray[np.uint8]:
        """uint8 (rows, row bytes): as the mapped file has them."""
        whole = np.frombuffer(self._owner.gguf.data(self.name), np.uint8).reshape(-1, self.row_bytes)
        return whole[self.first_row : self.first_row + self.rows]


class Stack:
    """Matrices of one shape and type (rows, columns), one an expert or a head: the slices of a tensor of three dimensions."""

    def __init__(self, slices: list[Weight], whole: Weight | None) -> None:
        """whole: all of them as one tall matrix, where that is packed the same way."""
        first = slices[0]
        self._slices = slices
        self._whole = whole
        self.name = first.name
        self.n = len(slices)
        self.type_name = first.type_name
        self.columns, self.rows = first.columns, first.rows
        self.packed, self.kind, self.block = first.packed, first.kind, first.block
        self.group_bytes, self.row_bytes = first.group_bytes, first.row_bytes

    @property
    def slices(self) -> list[Weight]:
        """The matrices one by one."""
        return self._slices

    def addresses(self) -> NDArray[np.int64]:
        """int64 (n,): what matmuls read for each."""
        if self._whole is not None:
            step = self._whole.group_bytes * (self.rows // 16) if self.packed else self.row_bytes * self.rows
            return np.arange(self.n, dtype=np.int64) * step + self._whole.address
        return np.array([weight.address for weight in self._slices], np.int64)


def _portions(weights: Sequence[Weight]) -> Iterator[list[tuple[Weight, int, int]]]:
    """All rows of all matrices, about PORTION bytes together: matrices with the first of their rows and how many, whole groups of 16 but at
    a matrix's end.
    """
    portion: list[tuple[Weight, int, int]] = []
    left = PORTION
    for weight in weights:
        first = 0
        while first < weight.rows:
            n = min(weight.rows - first, max(left // (16 * weight.row_bytes), 1) * 16)
            portion.append((weight, first, n))
            first += n
            left -= n * weight.row_bytes
            if left < 16 * weight.row_bytes:
                yield portion
                portion, left = [], PORTION
    if portion:
        yield portion


class Weights:
    """All tensors of one file. Keeps the mapping alive; `close` gives everything back."""

    def __init__(self, gguf: GGUFFile, pack: bool | None = None, away: Callable[[str], bool] = lambda name: False) -> None:
        """pack: None repacks when the packed weights and SPARE_MEMORY fit into what is free; away: tensors that only cards read."""
        self.gguf = gguf
        self._base: dict[str, int] = {}
        self._asked: list[Weight] = []
        self._keep: list[object] = []
        size = sum(self._packed_size(info) for info in gguf.tensors.values() if not away(info.name))
        self.pack = available() > size + SPARE_MEMORY if pack is None else pack
        self._arena: mmap.mmap | None = None
        self._next = self._end = 0
        if self.pack and size:
            self._arena = anonymous(size + HUGE_PAGE)
            start = np.frombuffer(self._arena, np.uint8).ctypes.data
            self._next = -(-start // HUGE_PAGE) * HUGE_PAGE
            self._end = start + size + HUGE_PAGE

    @staticmethod
    def _packed_size(info: TensorInfo) -> int:
        packing = PACKINGS.get(info.type)
        if packing is None or (len(info.shape) < 2 and not info.name.endswith(SINGLE_ROWS)):
            return 0
        matrices = int(np.prod(info.shape[2:]))
        # A matrix may be asked for in up to four parts (Q, K and V in one tensor), each with a last group of its own.
        rows = info.shape[1] if len(info.shape) > 1 else 1
        groups = matrices * (-(-rows // 16) + 3)
        return groups * (packing.group_bytes(info.shape[0]) + 64)

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    @property
    def vectors(self) -> list[Vector]:
        """All that have been asked for."""
        return [kept for kept in self._keep if isinstance(kept, Vector)]

    def _source(self, name: str) -> int:
        if name not in self._base:
            view = np.frombuffer(self.gguf.data(name), np.uint8)
            self._keep.append(view)
            self._base[name] = view.ctypes.data
        return self._base[name]

    def matrix(self, name: str, first_row: int = 0, rows: int | None = None) -> Weight:
        """The matrix of that name, or `rows` rows of it. Raises ModelFileError for a type without kernels."""
        info = self.gguf.tensors[name]
        packing = PACKINGS.get(info.type)
        if packing is None:
            known = ", ".join(p.format.name for p in PACKINGS.values())
            raise ModelFileError(self.gguf.path, f"tensor {name}", f"is of type {FORMATS[info.type].name}; types with kernels: {known}")
        if info.shape[0] % packing.format.block:
            raise ModelFileError(
                self.gguf.path, f"tensor {name}", f"rows of {info.shape[0]} values are no whole {packing.format.name} blocks"
            )
        if rows is None:
            rows = info.shape[1] if len(info.shape) > 1 else 1
        return Weight(self, info, packing, self._source(name), first_row, rows)

    def stack(self, name: str, first_row: int = 0, rows: int | None = None) -> Stack:
        """The matrices of a tensor of three dimensions, or `rows` rows of each. Raises ModelFileError for a type without kernels."""
        shape = self.gguf.tensors[name].shape
        each = shape[1]
        n = shape[2] if len(shape) > 2 else 1
        slices = [self.matrix(name, e * each + first_row, each if rows is None else rows) for e in range(n)]
        tall = rows is None and (each % 16 == 0 or not self.pack)
        return Stack(slices, self.matrix(name, 0, each * n) if tall else None)

    def values(self, name: str) -> NDArray[np.float32]:
        """The values of a tensor in F32, F16 or BF16, copied."""
        info = self.gguf.tensors[name]
        data = self.gguf.data(name)
        if info.type == F16:
            return np.frombuffer(data, np.float16).astype(np.float32)
        if info.type == BF16:
            return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        if info.type != F32:
            raise ModelFileError(
                self.gguf.path, f"tensor {name}", f"is of type {FORMATS[info.type].name}; F32, F16 and BF16 are possible here"
            )
        return np.frombuffer(data, np.float32).copy()

    def vector(self, name: str, first: int = 0, n: int | None = None) -> Vector:
        """The vector of that name, or n values of it."""
        vector = Vector(self.values(name)[first : None if n is None else first + n])
        self._keep.append(vector)
        return vector

    def maybe(self, name: str, first: int = 0, n: int | None = None) -> Vector | None:
        """The same, None when the file has no such vector."""
        return self.vector(name, first, n) if self.has(name) else None

    def rows_of_vectors(self, name: str) -> tuple[Vector, int]:
        """The rows of a small matrix in floats as vectors with room up to a multiple of 16: all of them, and bytes from one to the next."""
        n = self.gguf.tensors[name].shape[0]
        values = self.values(name).reshape(-1, n)
        padded = np.zeros((len(values), (n + 15) // 16 * 16), np.float32)
        padded[:, :n] = values
        return self.constant(padded.ravel()), padded.shape[1] * 4

    def table(self, values: NDArray[np.int64]) -> int:
        """Address of a table of int64 that is kept as long as the weights."""
        kept = np.ascontiguousarray(values, np.int64)
        self._keep.append(kept)
        return int(kept.ctypes.data)

    def keep(self, values: NDArray[np.float32]) -> int:
        """Address of values (contiguous) that are kept as long as the weights."""
        self._keep.append(values)
        return int(values.ctypes.data)

    def scaled(self, name: str, factor: float) -> Vector:
        """The vector of that name times a factor."""
        return self.constant(self.values(name) * np.float32(factor))

    def numbers(self, values: Sequence[float]) -> Vector:
        """A vector of numbers that are in no file."""
        return self.constant(np.array(values, np.float32))

    def constant(self, values: NDArray[np.float32]) -> Vector:
        """A vector that is in no file, kept as long as the weights."""
        vector = Vector(values)
        self._keep.append(vector)
        return vector

    def _reserve(self, weight: Weight) -> int:
        address = -(-self._next // 64) * 64
        self._next = address + weight.packed_bytes
        if self._next > self._end:
            raise MemoryError(f"no room was planned for {weight.name}")
        self._asked.append(weight)
        return address

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights that have been asked for."""
        return sum(weight.packed_bytes for weight in self._asked)

    def kernels(self) -> list[KernelSpec]:
        """The packing kernels that `fill` needs."""
        return [KernelSpec("pack", "pack", (name,)) for name in dict.fromkeys(weight.type_name for weight in self._asked)]

    def fill(self, library: KernelLibrary, team: Team, progress: Progress | None = None) -> None:
        """Packs every matrix that was asked for, on all threads, dropping the file's pages behind: the few rows of the embedding that are
        looked up come back from the page cache.
        """
        addresses = library.load(self.kernels())
        done, total = 0, self.packed_bytes
        for portion in _portions(self._asked):
            program = table_of(len(portion))
            args = np.zeros((len(portion), 8), np.int64)
            chunks = np.zeros(len(portion), np.int64)
            for i, (weight, first, n) in enumerate(portion):
                per_chunk = max(CHUNK // weight.group_bytes, 1)
                source, target = weight.source + first * weight.row_bytes, weight.address + first // 16 * weight.group_bytes
                args[i, :7] = [source, weight.row_bytes, n, weight.columns // weight.block, weight.group_bytes, target, per_chunk]
                program[i, :4] = [addresses[KernelSpec("pack", "pack", (weight.type_name,))], args[i].ctypes.data, 0, -1]
                chunks[i] = -(-n // (16 * per_chunk))
            team.run(program, chunks)
            for weight, first, n in portion:
                begin = (weight.first_row + first) * weight.row_bytes
                self.gguf.drop_pages(weight.name, begin, begin + n * weight.row_bytes)
                done += -(-n // 16) * weight.group_bytes
            if progress:
                progress("packing weights", done, total)

    def close(self) -> None:
        """Gives mappings back; addresses are dead afterwards. Idempotent."""
        self._keep.clear()
        self._base.clear()
        self._asked.clear()
        self._arena = None
        self.gguf.close()
