"""Choosing the next token from a row of logits. Knows one request's options, its tokens so far and a position; knows no text, no batch.

Order in which the options act, each on what the one before has left (llama.cpp's default order, which Ollama's runners use):

    logit_bias > grammar mask > repeat, frequency and presence penalties > greedy choice, if temperature is 0
    > top_k > typical_p > top_p > min_p > temperature > draw

Probabilities are those of the tokens left, renormalised at every stage. Reported log-probabilities are the model's own: softmax of the
logits as they came, before bias, mask, penalties and temperature.

The draw is keyed by (seed, position), position being the number of tokens before the one chosen: a sample depends on nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localrun.engine.draws import uniform
from localrun.engine.selection import Floats, Ids, draw_from_all, largest, log_sum_exp
from localrun.errors import LocalrunError
from localrun.messages import Sampling

Logits64 = NDArray[np.float64]

_FIRST_SLICE = 256
"""With top_k off, how many of the likeliest tokens are tried first for a filter that needs an order."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one position: the chosen token's log-probability, and the likeliest tokens'."""

    chosen: float
    top: list[tuple[int, float]] = field(default_factory=list)


def logprobs_of(row: Floats, token: int, k: int) -> TokenLogprobs:
    """Log-softmax of `row` (n_vocab,) at `token` and at its k largest entries."""
    total = log_sum_exp(row)
    top = [(int(i), float(row[i]) - total) for i in largest(row, k)]
    return TokenLogprobs(float(row[token]) - total, top)


class Sampler:
    """`seed` is the request's or the drawn one. One per sequence."""

    def __init__(self, options: Sampling, seed: int) -> None:
        self.options = options
        self.seed = seed
        self._bias = list(options.logit_bias.items())
        self._penalises = options.repeat_penalty != 1.0 or options.frequency_penalty != 0.0 or options.presence_penalty != 0.0

    def choose(self, row: Floats, tokens: Sequence[int], position: int, allowed: NDArray[np.bool_] | None = None) -> int:
        """The token to follow `tokens` (the sequence so far). `row` float32 (n_vocab,) is changed in place; `allowed` is a grammar's mask.

        Raises LocalrunError when the row holds NaN, or nothing is left to choose from.
        """
        self._adjust(row, tokens, allowed)
        best = int(row.argmax())  # the first NaN, if there is one
        if not math.isfinite(row[best]):
            raise LocalrunError("the model's output is not a number" if math.isnan(row[best]) else "no token is allowed here")
        if self.options.temperature <= 0:
            return best
        ids, logits = self._filtered(row)
        if ids is None or logits is None:
            return draw_from_all(row * np.float32(1.0 / self.options.temperature), uniform(self.seed, position))
        return self._draw(ids, logits, position)

    def _adjust(self, row: Floats, tokens: Sequence[int], allowed: NDArray[np.bool_] | None) -> None:
        for token, bias in self._bias:
            row[token] += bias
        if allowed is not None:
            row[~allowed[: len(row)]] = -np.inf
        if self._penalises and self.options.repeat_last_n != 0:
            last_n = self.options.repeat_last_n
            self._penalise(row, tokens if last_n < 0 else tokens[-last_n:])

    def _penalise(self, row: Floats, window: Sequence[int]) -> None:
        """Repeat penalty: logits above 0 are divided by it, others multiplied; frequency per occurrence, presence once (as llama.cpp's)."""
        counts = Counter(window)
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        values = row[ids]
        penalty = np.float32(self.options.repeat_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
        row[ids] = values - times * np.float32(self.options.frequency_penalty) - np.float32(self.options.presence_penalty)

    def _filtered(self, row: Floats) -> tuple[Ids, Logits64] | tuple[None, None]:
        """What the filters leave, in descending order: ids and logits; (None, None) when no filter is on."""
        o = self.options
        if o.top_k > 0:
            ids = largest(row, o.top_k)
            logits, total = row[ids].astype(np.float64), None
        elif o.typical_p < 1 or o.top_p < 1 or o.min_p > 0:
            return self._filtered_without_top_k(row)
        else:
            return None, None
        if o.typical_p < 1:
            keep = _typical(logits, o.typical_p)
            ids, logits = ids[keep], logits[keep]
        return self._nucleus(ids, logits, total)

    def _filtered_without_top_k(self, row: Floats) -> tuple[Ids, Logits64]:
        """Filters over the whole vocabulary. Only so many tokens are ordered as the filters can keep: the likeliest few, mostly."""
        total = log_sum_exp(row)
        if self.options.typical_p < 1:
            ids = _typical_of_all(row, total, self.options.typical_p)
            return self._nucleus(ids, row[ids].astype(np.float64), None)
        size = _FIRST_SLICE
        while True:
            ids = largest(row, size)
            logits = row[ids].astype(np.float64)
            complete = len(ids) < size or size >= len(row)
            mass = float(np.exp(logits - total).sum())
            below_min_p = self.options.min_p > 0 and logits[-1] < logits[0] + math.log(self.options.min_p)
            if complete or below_min_p or (self.options.top_p < 1 and mass >= self.options.top_p):
                return self._nucleus(ids, logits, total)
            size *= 8

    def _nucleus(self, ids: Ids, logits: Logits64, total: float | None) -> tuple[Ids, Logits64]:
        """top_p, then min_p. `total`: log of the whole mass, where `logits` are not all of it."""
        o = self.options
        if o.top_p < 1:
            shares = _softmax(logits) if total is None else np.exp(logits - total)
            n = int(np.searchsorted(np.cumsum(shares), o.top_p, side="left")) + 1
            ids, logits = ids[:n], logits[:n]
        if o.min_p > 0:
            n = max(1, int(np.count_nonzero(logits >= logits[0] + math.log(o.min_p))))
            ids, logits = ids[:n], logits[:n]
        return ids, logits

    def _draw(self, ids: Ids, logits: Logits64, position: int) -> int:
        cumulated = np.cumsum(_softmax(logits / self.options.temperature))
        at = int(np.searchsorted(cumulated, uniform(self.seed, position) * cumulated[-1], side="right"))
        return int(ids[min(at, len(ids) - 1)])


def _softmax(logits: Logits64) -> Logits64:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _typical(logits: Logits64, mass: float) -> Ids:
    """Indices, ascending, of the tokens whose surprise is closest to the entropy, as many as hold `mass` (Meister et al. 2022)."""
    shares = _softmax(logits)
    surprise = -np.log(np.maximum(shares, 1e-300))
    entropy = float((shares * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(shares[order]), mass, side="left")) + 1
    return np.sort(order[:n])


def _typical_of_all(row: Floats, total: float, mass: float) -> Ids:
    """As _typical over a whole row: ids in descending order of logit."""
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
