"""The largest logits of each block of the vocabulary, for a model's latest rows. Knows where logits lie; knows nothing of sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.team import Team, table_of
from localrun.models.model import PEAK

KERNEL = KernelSpec("peaks", "peaks", (PEAK,))
_PARTS = 8
"""Chunks of a row: enough for a few threads to share one."""


class Peaks:
    """A program of one instruction, the kernel at `address`, that a model's team runs when somebody asks."""

    def __init__(self, address: int, n_vocab: int) -> None:
        self._n_blocks = n_blocks = -(-n_vocab // PEAK)
        self._args = np.zeros(7, np.int64)
        self._args[2], self._args[5], self._args[6] = n_vocab, _PARTS, -(-n_blocks // _PARTS)
        self._program = table_of(1)
        self._program[0, 0], self._program[0, 1] = address, self._args.ctypes.data
        self._out = np.zeros((0, n_blocks), np.float32)

    def read(self, logits: NDArray[np.float32]) -> None:
        """Says where logits will lie: (rows, n_vocab and room for whole vectors of 16)."""
        self._out = np.zeros((len(logits), self._n_blocks), np.float32)
        self._args[0], self._args[1] = logits.ctypes.data, logits.strides[0]
        self._args[3], self._args[4] = self._out.ctypes.data, self._out.strides[0]

    def of(self, n: int, team: Team) -> NDArray[np.float32]:
        """float32 (n, blocks) of the first n rows."""
        if n:
            team.run(self._program, n * _PARTS)
        return self._out[:n]
