"""Finding the likely tokens in a row of logits without sorting it: the arithmetic under sampler.py. Knows rows, not requests.

Orders are total: equal logits are ordered by token id, so nothing depends on how a sort breaks ties.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.models.model import RowPeaks

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_GROUPS = 64
"""Rows of the view whose column maxima give the threshold: few enough that the maxima are found at memory speed, many enough that few
columns remain."""


def largest(row: Floats, k: int, peaks: RowPeaks | None = None) -> Ids:
    """Ids of the k largest finite entries of row (n,), in descending order, equal ones by id; fewer where fewer are finite.

    The k-th largest of the maxima of disjoint groups is at most the k-th largest entry, so only groups whose maximum reaches it can hold
    one of the k: the row is read once, at memory speed, and about k groups are looked at again. With its peaks it is not even read once.
    """
    if peaks is not None and (found := peaks.largest(k)) is not None:
        return found
    n = len(row)
    k = min(k, n)
    columns = n // _GROUPS
    if k <= 0:
        return np.empty(0, np.int64)
    if columns < 2 * k:
        return _sorted(row, _partitioned(row, k), k)
    grouped = row[: columns * _GROUPS].reshape(_GROUPS, columns)
    maxima = grouped.max(axis=0)
    threshold = np.partition(maxima, columns - k)[columns - k]
    if threshold == -np.inf:
        return _sorted(row, np.flatnonzero(row > -np.inf), k)
    chosen = np.flatnonzero(maxima >= threshold)
    in_group, which = np.nonzero(grouped[:, chosen] >= threshold)
    ids = in_group * columns + chosen[which]
    rest = np.flatnonzero(row[columns * _GROUPS :] >= threshold) + columns * _GROUPS
    return _sorted(row, np.concatenate([ids, rest]), k)


def highest(row: Floats, peaks: RowPeaks | None = None) -> int:
    """Id of the largest entry, the first of equal ones; of the first NaN, if there is one."""
    if peaks is not None and (found := peaks.largest(1)) is not None and len(found):
        return int(found[0])
    return int(row.argmax())


def log_sum_exp(row: Floats) -> float:
    """log(sum(exp(row))) over the finite entries, with float64 sums of float32 exponentials."""
    top = float(row.max())
    return top + float(np.log(np.exp(row - np.float32(top)).sum(dtype=np.float64)))


def draw_from_all(row: Floats, u: float) -> int:
    """The token that u in [0, 1) falls on when all are laid out by id, each as wide as its softmax probability."""
    weights = np.exp(row - row.max())
    size = max(1, len(row) // _GROUPS)
    whole = len(row) - len(row) % size
    sums = weights[:whole].reshape(-1, size).sum(axis=1)  # (parts,)
    if whole < len(row):
        sums = np.append(sums, weights[whole:].sum())
    ends = np.cumsum(sums, dtype=np.float64)
    target = u * ends[-1]
    part = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    piece = weights[part * size : (part + 1) * size].cumsum(dtype=np.float64)
    inside = min(int(np.searchsorted(piece, target - (ends[part - 1] if part else 0.0), side="right")), len(piece) - 1)
    while inside > 0 and weights[part * size + inside] == 0.0:  # rounding may step past the last token that has any weight
        inside -= 1
    return part * size + inside


def _partitioned(row: Floats, k: int) -> Ids:
    """All ids whose entry is finite and not below the k-th largest."""
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    return np.flatnonzero((row >= threshold) & (row > -np.inf))


def _sorted(row: Floats, ids: Ids, k: int) -> Ids:
    return ids[np.lexsort((ids, -row[ids]))][:k]
