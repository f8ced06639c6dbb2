"""Adapters in memory: what each says about each matrix, as kernels_cpu/lora.py reads it, and which row of a batch has which.

A number is given once; the place behind it (an entry in every matrix's table) is used again. Knows neither files nor requests.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.lora_sizes import ENTRY
from localrun.models.lora import Adapter, Pair
from localrun.models.model import MAX_ADAPTERS
from localrun.models.program import EMBEDDING, Program, Site

WORDS = ENTRY // 8


class Adapters:
    """plan.AdapterRows of a model, for batches of at most `rows` rows. Numbers start at 1."""

    def __init__(self, rows: int) -> None:
        self._numbers = np.zeros(rows, np.int32)
        self._scales = np.ones(rows, np.float32)
        self.numbers = self._numbers.ctypes.data
        self.scales = self._scales.ctypes.data
        self._tables: dict[tuple[str, int, int], NDArray[np.int64]] = {}
        """By tensor, first row and rows: int64 (1 + MAX_ADAPTERS, WORDS)."""
        self._program: Program | None = None
        self._next = itertools.count(1)
        self._places: dict[int, int] = {}
        self._kept: dict[int, list[NDArray[np.uint8]]] = {}
        self._adapted: dict[int, frozenset[str]] = {}
        """Matrices that each is for."""
        self._instructions = np.zeros(0, np.int64)

    def table(self, site: Site) -> int:
        """See AdapterRows."""
        key = site.tensor, site.first_row, site.rows
        if key not in self._tables:
            self._tables[key] = np.zeros((1 + MAX_ADAPTERS, WORDS), np.int64)
        return int(self._tables[key].ctypes.data)

    def use(self, program: Program) -> None:
        """The program whose instructions read the tables."""
        self._program = program
        self._instructions = np.array(list(program.adapted), np.int64)
        self._leave_alone()

    def knows(self, number: int) -> bool:
        return number in self._places

    def assign(self, row: int, n: int, number: int, scale: float) -> None:
        """Rows row .. row + n of the next pass have that adapter."""
        self._numbers[row : row + n] = self._places[number] if number else 0
        self._scales[row : row + n] = scale

    def skip_idle(self, chunks: NDArray[np.int64], any_adapter: bool) -> None:
        """Takes the work away from a pass in which no row has an adapter."""
        if not any_adapter:
            chunks[self._instructions] = 0

    def add(self, adapter: Adapter) -> int:
        """See Model.add_adapter."""
        free = set(range(1, MAX_ADAPTERS + 1)) - set(self._places.values())
        if not free:
            raise ValueError(f"{MAX_ADAPTERS} adapters are loaded; no more are possible at a time")
        place, number = min(free), next(self._next)
        kept: list[NDArray[np.uint8]] = []
        for (name, first_row, rows), table in self._tables.items():
            if name in adapter.pairs:
                table[place] = _entry(adapter.pairs[name], name == EMBEDDING, first_row, rows, kept)
        self._places[number], self._kept[number], self._adapted[number] = place, kept, frozenset(adapter.pairs)
        self._leave_alone()
        return number

    def remove(self, number: int) -> None:
        """See Model.remove_adapter."""
        if number in self._places:
            place = self._places.pop(number)
            for table in self._tables.values():
                table[place] = 0
            del self._kept[number], self._adapted[number]
            self._leave_alone()

    def _leave_alone(self) -> None:
        """Instructions of matrices that no adapter knows have no work."""
        assert self._program is not None
        touched = frozenset().union(*self._adapted.values())
        for i, site in self._program.adapted.items():
            self._program.factor[i] = int(site.tensor in touched)


def _entry(pair: Pair, embedding: bool, first_row: int, rows: int, kept: list[NDArray[np.uint8]]) -> list[int]:
    """The words of ENTRY; what they point to is appended to `kept`."""
    half = pair.a.dtype == np.float16
    a = _padded(pair.a, 1) if embedding else _groups(pair.a)
    b = _groups(pair.b[first_row : first_row + rows])
    scales = _padded(pair.scales[None, :], 1)
    a_step, b_step = a.strides[0], b.strides[0]
    return [_keep(a, kept), a_step, pair.rank, _keep(scales, kept), _keep(b, kept), b_step, int(half), 0]


def _padded(values: NDArray[Any], axis: int) -> NDArray[Any]:
    """(rows, n), zeros added along the axis up to a multiple of 16."""
    more = [(0, 0), (0, 0)]
    more[axis] = (0, -values.shape[axis] % 16)
    return np.ascontiguousarray(np.pad(values, more))


def _groups(matrix: NDArray[Any]) -> NDArray[Any]:
    """(rows, n) as pack.py's kind 'f': (groups, n, 16)."""
    whole = _padded(matrix, 0)
    return np.ascontiguousarray(whole.reshape(-1, 16, matrix.shape[1]).transpose(0, 2, 1))


def _keep(values: NDArray[Any], kept: list[NDArray[np.uint8]]) -> int:
    """Address of a copy that begins at a multiple of 64."""
    memory = np.zeros(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
    kept.append(memory)
    return int(memory.ctypes.data + start)
