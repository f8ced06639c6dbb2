"""Choosing the next token from a row of logits. Knows one request's options, its tokens so far and a position; knows no text, no batch.

Order in which the options act, each on what the one before has left (llama.cpp's default order, which Ollama's runners use):

    logit_bias, bans and ignore_eos > repeat, frequency and presence penalties > DRY > grammar mask
    > greedy choice, if temperature is 0
    > top_n_sigma > top_k > typical_p > top_p > min_p > XTC > temperature > draw
    or, with mirostat: > temperature > mirostat > draw

Reported log-probabilities are the model's own: softmax of the logits as they came, before bias, penalties, mask and temperature.

Draws are keyed by (seed, position), position being the number of tokens before the one chosen: a sample depends on nothing else. XTC's
coin is a stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localrun.engine.draws import uniform
from localrun.engine.filters import Logits64, cut_by_sigma, exclude_top, exclude_top_of_all, softmax, truncate
from localrun.engine.mirostat import Mirostat
from localrun.engine.penalties import Penalties
from localrun.engine.ratio import Distribution
from localrun.engine.selection import Floats, Ids, draw_from_all, highest, largest, log_sum_exp
from localrun.errors import LocalrunError
from localrun.messages import Sampling
from localrun.models.model import RowPeaks

_XTC_STREAM = 1


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
    """`seed` is the request's or the drawn one; `eog_ids` and `is_breaker` as Penalties takes them. One per sequence."""

    def __init__(
        self,
        options: Sampling,
        seed: int,
        eog_ids: Iterable[int] = (),
        is_breaker: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.options = options
        self.seed = seed
        self._penalties = Penalties(options, eog_ids, is_breaker)
        self._mirostat = Mirostat(options) if options.mirostat else None

    def choose(
        self,
        row: Floats,
        tokens: Sequence[int],
        position: int,
        allowed: NDArray[np.bool_] | None = None,
        banned: Sequence[int] = (),
        peaks: RowPeaks | None = None,
    ) -> int:
        """The token to follow `tokens` (the sequence so far). `row` float32 (n_vocab,) is changed in place, of which its peaks
        (see Model) are told; they make it quicker and the choice no other.

        allowed: a grammar's mask; banned: tokens that must not come at this position. Raises LocalrunError when the row holds NaN, or
        nothing is left to choose from.
        """
        o = self.options
        best, peaks = self._prepare(row, tokens, allowed, banned, peaks)
        if o.temperature <= 0:
            return best
        if self._mirostat is not None:
            row *= np.float32(1.0 / o.temperature)
            ids, logits = self._mirostat.truncate(row)
            index = self._draw(logits, position)
            self._mirostat.learn(logits, index)
            return int(ids[index])
        kept = self._kept(row, position, peaks)
        if kept is None:
            return draw_from_all(row * np.float32(1.0 / o.temperature), uniform(self.seed, position))
        ids, logits = kept
        return int(ids[self._draw(logits / o.temperature, position)])

    def distribution(
        self,
        row: Floats,
        tokens: Sequence[int],
        position: int,
        allowed: NDArray[np.bool_] | None = None,
        banned: Sequence[int] = (),
        peaks: RowPeaks | None = None,
    ) -> Distribution:
        """What `choose` draws from, for the same arguments; not with mirostat, whose cut is part of its draw."""
        best, peaks = self._prepare(row, tokens, allowed, banned, peaks)
        if self.options.temperature <= 0:
            return Distribution(np.array([best]), np.ones(1))
        kept = self._kept(row, position, peaks)
        if kept is None:
            ids = np.flatnonzero(row > -np.inf)
            kept = ids, row[ids].astype(np.float64)
        return Distribution(kept[0], softmax(kept[1] / self.options.temperature))

    def _prepare(
        self, row: Floats, tokens: Sequence[int], allowed: NDArray[np.bool_] | None, banned: Sequence[int], peaks: RowPeaks | None
    ) -> tuple[int, RowPeaks | None]:
        """Penalties and prohibitions, in the row; the likeliest token that is left, and the peaks that are. Raises LocalrunError."""
        changed = self._penalties.apply(row, tokens)
        if allowed is not None:
            row[~allowed[: len(row)]] = -np.inf
            peaks = None
        for token in banned:
            row[token] = -np.inf
        if peaks is not None and (len(changed) or banned):
            peaks.changed(np.concatenate([changed, np.array(banned, np.int64)]) if banned else changed)
        best = highest(row, peaks)
        if not math.isfinite(row[best]):
            raise LocalrunError(
                "the model's output is not a number" if row[best] != -np.inf else _no_way_on(allowed is not None, bool(banned))
            )
        return best, peaks

    def _kept(self, row: Floats, position: int, peaks: RowPeaks | None) -> tuple[Ids, Logits64] | None:
        """The candidates that the truncations leave, temperature still to come; None: all that is finite in the row."""
        o = self.options
        excludes = o.xtc_probability > 0 and uniform(self.seed, position, _XTC_STREAM) < o.xtc_probability
        if o.top_n_sigma > 0:
            cut_by_sigma(row, o.top_n_sigma)
            peaks = None
        kept = truncate(row, o, peaks)
        if kept is None:
            if excludes:
                exclude_top_of_all(row, o.xtc_threshold)
            return None
        return exclude_top(*kept, o.xtc_threshold) if excludes else kept

    def forced(self) -> None:
        """A token came that was not chosen here."""
        if self._mirostat is not None:
            self._mirostat.forced()

    def take_back(self, n: int) -> None:
        """The last n tokens have not been chosen after all."""
        if self._mirostat is not None:
            self._mirostat.take_back(n)

    def _draw(self, logits: Logits64, position: int) -> int:
        """An index into `logits`, the largest of which is the first."""
        cumulated = np.exp(logits - logits[0]).cumsum()
        return min(int(cumulated.searchsorted(uniform(self.seed, position) * cumulated[-1], side="right")), len(logits) - 1)


def _no_way_on(by_grammar: bool, by_bans: bool) -> str:
    """Why every token is forbidden."""
    reasons = [name for name, given in (("the format", by_grammar), ("banned_strings", by_bans)) if given]
    return f"no token is allowed to follow: {' and '.join(reasons) or 'logit_bias and ignore_eos'} leave none"
