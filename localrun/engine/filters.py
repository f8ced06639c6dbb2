"""Which tokens stay in the draw: the truncations of sampler.py, as pure functions of logits.

Candidates are two arrays, ids int64 (n,) and logits float64 (n,), in descending order of logit. Shares are always those of what is left,
renormalised. Where top_k is off, only so many tokens are ordered as the filters can keep, which mostly are few.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from localrun.engine.selection import Floats, Ids, largest, log_sum_exp
from localrun.messages import Sampling
from localrun.models.model import RowPeaks

Logits64 = NDArray[np.float64]

_FIRST_SLICE = 256
"""With top_k off, how many of the likeliest tokens are tried first for a filter that needs an order."""


def softmax(logits: Logits64) -> Logits64:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def cut_by_sigma(row: Floats, n: float) -> None:
    """top_n_sigma: only logits within n standard deviations (of all finite logits) of the largest stay (Tang et al. 2024)."""
    finite = row[np.isfinite(row)]
    row[row < row.max() - np.float32(n) * finite.std(dtype=np.float64)] = -np.inf


def truncate(row: Floats, o: Sampling, peaks: RowPeaks | None = None) -> tuple[Ids, Logits64] | None:
    """What top_k, typical_p, top_p and min_p leave of a row (n_vocab,), in that order; None when all are off. peaks: see largest."""
    if o.top_k > 0:
        ids = largest(row, o.top_k, peaks)
        logits = row[ids].astype(np.float64)
        if o.typical_p < 1:
            keep = _typical(logits, o.typical_p)
            ids, logits = ids[keep], logits[keep]
        return _nucleus(ids, logits, None, o)
    if o.typical_p < 1:
        ids = _typical_of_all(row, o.typical_p)
        return _nucleus(ids, row[ids].astype(np.float64), None, o)
    if o.top_p < 1 or o.min_p > 0:
        return _nucleus_of_all(row, o, peaks)
    return None


def exclude_top(ids: Ids, logits: Logits64, threshold: float) -> tuple[Ids, Logits64]:
    """XTC: of the tokens with a share of at least `threshold` all but the least likely go, if there are several (p-e-w, 2024)."""
    n = int(np.count_nonzero(softmax(logits) >= threshold))
    return (ids[n - 1 :], logits[n - 1 :]) if n > 1 else (ids, logits)


def exclude_top_of_all(row: Floats, threshold: float) -> None:
    """The same where nothing was truncated: in the row itself."""
    ids = largest(row, min(len(row), math.floor(1 / max(threshold, 1e-3)) + 1))
    n = int(np.count_nonzero(row[ids].astype(np.float64) - log_sum_exp(row) >= math.log(max(threshold, 1e-300))))
    row[ids[: max(0, n - 1)]] = -np.inf


def _nucleus(ids: Ids, logits: Logits64, total: float | None, o: Sampling) -> tuple[Ids, Logits64]:
    """top_p (Holtzman et al. 2019), then min_p (Nguyen et al. 2024). `total`: log of the whole mass, where `logits` are not all of it."""
    if o.top_p < 1:
        cumulated = np.exp(logits - (logits[0] if total is None else total)).cumsum()
        n = int(cumulated.searchsorted(o.top_p * (cumulated[-1] if total is None else 1.0), side="left")) + 1
        ids, logits = ids[:n], logits[:n]
    if o.min_p > 0:
        n = max(1, int(np.count_nonzero(logits >= logits[0] + math.log(o.min_p))))
        ids, logits = ids[:n], logits[:n]
    return ids, logits


def _nucleus_of_all(row: Floats, o: Sampling, peaks: RowPeaks | None) -> tuple[Ids, Logits64]:
    total = log_sum_exp(row)
    size = _FIRST_SLICE
    while True:
        ids = largest(row, size, peaks)
        logits = row[ids].astype(np.float64)
        complete = len(ids) < size or size >= len(row)
        below_min_p = o.min_p > 0 and logits[-1] < logits[0] + math.log(o.min_p)
        if complete or below_min_p or (o.top_p < 1 and float(np.exp(logits - total).sum()) >= o.top_p):
            return _nucleus(ids, logits, total, o)
        size *= 8


def _typical(logits: Logits64, mass: float) -> Ids:
    """Indices, ascending, of the tokens whose surprise is closest to the entropy, as many as hold `mass` (Meister et al. 2022)."""
    shares = softmax(logits)
    surprise = -np.log(np.maximum(shares, 1e-300))
    entropy = float((shares * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(shares[order]), mass, side="left")) + 1
    return np.sort(order[:n])


def _typical_of_all(row: Floats, mass: float) -> Ids:
    """As _typical over a whole row: ids in descending order of logit."""
    total = log_sum_exp(row)
    shares = np.exp(row - np.float32(total))
    finite = np.where(np.isfinite(row), row, np.float32(0))
    entropy = total - float((shares * finite).sum(dtype=np.float64))
    closeness = -np.abs(np.float32(total) - row - np.float32(entropy))
    size = _FIRST_SLICE
    while True:
        order = largest(closeness, size)
        cumulated = np.cumsum(shares[order], dtype=np.float64)
        if cumulated[-1] >= mass or len(order) < size or size >= len(row):
            kept = order[: int(np.searchsorted(cumulated, mass, side="left")) + 1]
            return kept[np.lexsort((kept, -row[kept]))]
        size *= 8
