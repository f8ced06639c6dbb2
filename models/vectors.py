"""From the last hidden states of a pass to one vector or score for each sequence. NumPy only; knows nothing of how they were computed.

What a sequence gets is computed from its own rows alone, in their order, so it does not depend on what else was in the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localrun.models.program import Hidden, Row

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def view(row: Row, n: int) -> Floats:
    """The first n rows of a buffer where they lie: float32 (n, width). The owner must outlive the view."""
    values = row.stride // 4
    pointer = ctypes.cast(row.address, ctypes.POINTER(ctypes.c_float))
    rows: Floats = np.ctypeslib.as_array(pointer, (n, values))
    return rows[:, : row.width]


def rows_to_pool(n: int, pooling: str, causal: bool) -> Ints:
    """Which of a sequence's n rows its vector is made of: int32 indices. A score is read where a token has seen all others."""
    if pooling == "mean":
        return np.arange(n, dtype=np.int32)
    first = pooling == "cls" or (pooling == "rank" and not causal)
    return np.array([0 if first else n - 1], np.int32)


def pooled(hidden: Hidden, lengths: Sequence[int], wanted: Sequence[Ints]) -> Floats:
    """The mean of each sequence's wanted rows: (len(lengths), width). lengths: rows of each sequence in the batch."""
    of_each = [len(asked) for asked in wanted] if hidden.by_output else lengths
    rows = view(hidden.row, sum(of_each))
    out = np.empty((len(lengths), hidden.row.width), np.float32)
    start = 0
    for i, (n, asked) in enumerate(zip(of_each, wanted, strict=True)):
        own = rows[start : start + n]
        out[i] = (own if hidden.by_output else own[asked]).mean(axis=0, dtype=np.float64)
        start += n
    if hidden.scale != 1.0:
        out /= np.float32(hidden.scale)
    return out


def scores_of(scores: Floats) -> Floats:
    """One score for each sequence, (n, 1), of its head's values (n, labels): the value itself, or of two labels the first one's share by
    softmax.
    """
    if scores.shape[1] == 1:
        return scores.copy()
    values = np.exp((scores - scores.max(axis=1, keepdims=True)).astype(np.float64))
    share: Floats = (values[:, :1] / values.sum(axis=1, keepdims=True)).astype(np.float32)
    return share
