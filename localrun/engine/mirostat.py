"""Mirostat 1 and 2: truncation that steers the surprise of a text towards `tau` bits a token (Basu et al. 2020).

The one sampler with a memory: `mu`, corrected after each token by how far its surprise was off. It is kept per token, so that tokens can be
taken back.
"""

from __future__ import annotations

import math

import numpy as np

from localrun.engine.filters import Logits64, softmax
from localrun.engine.selection import Floats, Ids, largest, log_sum_exp
from localrun.messages import Sampling

_ZIPF_TOKENS = 100
"""Version 1 estimates the exponent of the distribution from this many of the likeliest tokens."""


class Mirostat:
    def __init__(self, options: Sampling) -> None:
        self._o = options
        self._mu = [2.0 * options.mirostat_tau]
        """Before the first token and after each."""

    def truncate(self, row: Floats) -> tuple[Ids, Logits64]:
        """What stays of a row (n_vocab,) that temperature has been applied to."""
        if self._o.mirostat == 1:
            ids = largest(row, self._top_k(row))
        else:
            surprise_limit = self._mu[-1] * math.log(2)
            n = int(np.count_nonzero(np.float32(log_sum_exp(row)) - row <= np.float32(surprise_limit)))
            ids = largest(row, max(1, n))
        return ids, row[ids].astype(np.float64)

    def learn(self, logits: Logits64, index: int) -> None:
        """The token at `index` of what `truncate` left was drawn."""
        surprise = -math.log2(max(float(softmax(logits)[index]), 1e-300))
        self._mu.append(self._mu[-1] - self._o.mirostat_eta * (surprise - self._o.mirostat_tau))

    def forced(self) -> None:
        """A token came that was not drawn: it says nothing of the surprise."""
        self._mu.append(self._mu[-1])

    def take_back(self, n: int) -> None:
        """The last n tokens have not been drawn after all."""
        del self._mu[len(self._mu) - n :]

    def _top_k(self, row: Floats) -> int:
        """Version 1: how many tokens of a Zipf distribution with the measured exponent have the surprise wanted."""
        top = np.exp(row[largest(row, _ZIPF_TOKENS)].astype(np.float64) - log_sum_exp(row))
        top = top[top > 0]
        ranks = np.arange(1, len(top) + 1)
        t = np.log((ranks[:-1] + 1) / ranks[:-1])
        b = np.log(top[:-1] / top[1:])
        s = float((t * b).sum() / max(float((t * t).sum()), 1e-12)) if len(top) > 1 else 1.0
        epsilon = s - 1
        n = len(row)
        if abs(epsilon) < 1e-6:
            k = 2.0 ** self._mu[-1] / math.log(n)  # the limit of the formula below for an exponent of 1
        else:
            try:
                k = (epsilon * 2.0 ** self._mu[-1] / (1 - float(n) ** -epsilon)) ** (1 / s) if s > 0 else float(n)
            except OverflowError:
                k = float(n)
        return int(min(max(k, 1.0), n))
