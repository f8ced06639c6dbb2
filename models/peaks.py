"""The largest logits of a model's latest rows. Knows where logits lie; knows nothing of sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.library import brief
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.team import Team, table_of
from localrun.models.model import PEAK

PEAKS = KernelSpec("peaks", "peaks", (PEAK,))
LARGEST = KernelSpec("peaks", "largest", (PEAK,))
_PARTS = 8
"""Chunks of a row: enough for a few threads to share one."""
_MOST = 512
"""Values that are looked for through peaks: of more, the row itself knows sooner."""


class Peaks:
    """Runs the kernels PEAKS, as a program of one instruction, and LARGEST."""

    def __init__(self, peaks: int, largest: int, n_vocab: int) -> None:
        """peaks, largest: the kernels' addresses."""
        self._n_blocks = n_blocks = -(-n_vocab // PEAK)
        self._args = np.zeros(7, np.int64)
        self._args[2], self._args[5], self._args[6] = n_vocab, _PARTS, -(-n_blocks // _PARTS)
        self._program = table_of(1)
        self._program[0, 0], self._program[0, 1] = peaks, self._args.ctypes.data
        self._out = np.zeros((0, n_blocks), np.float32)
        self._rows: list[PeaksOfRow] = []
        self._largest = brief(largest)
        self._changed = np.zeros(0, np.int64)
        self._found, self._values = np.zeros(_MOST, np.int64), np.zeros(_MOST, np.float32)
        self._words = np.array([0, n_vocab, 0, 0, 0, 0, self._found.ctypes.data, self._values.ctypes.data, 0], np.int64)
        """See the kernel."""
        self._address = self._words.ctypes.data

    def read(self, logits: NDArray[np.float32]) -> None:
        """Says where logits will lie: (rows, n_vocab and room for whole vectors of 16)."""
        self._out = np.zeros((len(logits), self._n_blocks), np.float32)
        self._args[0], self._args[1] = logits.ctypes.data, logits.strides[0]
        self._args[3], self._args[4] = self._out.ctypes.data, self._out.strides[0]
        self._rows = [
            PeaksOfRow(self, logits.ctypes.data + i * logits.strides[0], self._out.ctypes.data + i * self._out.strides[0])
            for i in range(len(logits))
        ]

    def of(self, n: int, team: Team) -> list[PeaksOfRow]:
        """Of the first n rows."""
        if n:
            team.run(self._program, n * _PARTS)
        rows = self._rows[:n]
        for row in rows:
            row.changes = []
        return rows

    def largest(self, row: int, peaks: int, changes: list[NDArray[np.int64]], k: int) -> NDArray[np.int64] | None:
        """See PeaksOfRow; row, peaks: addresses."""
        if not 0 < k <= min(_MOST, self._n_blocks // 2):
            return None
        n_changed = 0
        for ids in changes:
            end = n_changed + len(ids)
            if end > len(self._changed):
                self._changed = np.concatenate([self._changed[:n_changed], np.zeros(2 * end, np.int64)])
                self._words[3] = self._changed.ctypes.data
            self._changed[n_changed:end] = ids
            n_changed = end
        self._words[0], self._words[2], self._words[4], self._words[5] = row, peaks, n_changed, k
        self._largest(self._address, 0, 0, 0)
        found = int(self._words[8])
        return None if found < 0 else self._found[:found].copy()


class PeaksOfRow:
    """See models.model.RowPeaks."""

    def __init__(self, model: Peaks, row: int, peaks: int) -> None:
        self._model, self._row, self._peaks = model, row, peaks
        self.changes: list[NDArray[np.int64]] = []

    def changed(self, ids: NDArray[np.int64]) -> None:
        self.changes.append(ids)

    def largest(self, k: int) -> NDArray[np.int64] | None:
        found = self._model.largest(self._row, self._peaks, self.changes, k)
        if found is not None:
            self.changes = []
        return found
