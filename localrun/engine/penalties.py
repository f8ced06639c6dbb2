"""Changes of single logits for what has been said already: bias, bans, repetition penalties, DRY. The first part of sampler.py.

Only the few tokens concerned are touched; the row is never copied. Knows one request's options and its tokens so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from localrun.engine.selection import Floats, Ids
from localrun.messages import Sampling

_LONGEST_REPEAT = 256
"""DRY looks no further back along a repetition; its penalty is beyond any logit long before."""
_MOST_EXPONENT = 80.0
"""exp of it still is a float32."""


class Penalties:
    """`eog_ids`: what `ignore_eos` forbids. `is_breaker(token)`: whether DRY must not look across it."""

    def __init__(self, options: Sampling, eog_ids: Iterable[int] = (), is_breaker: Callable[[int], bool] = lambda token: False) -> None:
        self._o = options
        self._bias = list(options.logit_bias.items())
        self._banned = np.array(sorted(eog_ids) if options.ignore_eos else [], np.int64)
        self._always = np.array([*options.logit_bias, *self._banned], np.int64)
        self._repetition = options.repeat_penalty != 1.0 or options.frequency_penalty != 0.0 or options.presence_penalty != 0.0
        self._penalty = np.float32(options.repeat_penalty)
        self._is_breaker = is_breaker

    def apply(self, row: Floats, tokens: Sequence[int]) -> Ids:
        """Changes `row` (n_vocab,) for the token that follows `tokens`, in the order that sampler.py states. Returns which entries it may
        have changed."""
        o = self._o
        changed = self._always
        for token, bias in self._bias:
            row[token] += bias
        if len(self._banned):
            row[self._banned] = -np.inf
        if self._repetition and o.repeat_last_n != 0:
            changed = _joined(changed, self._penalise(row, _last(tokens, o.repeat_last_n)))
        if o.dry_multiplier > 0 and o.dry_penalty_last_n != 0:
            found = repeats(_last(tokens, o.dry_penalty_last_n), self._is_breaker)
            for token, length in found.items():
                if length >= o.dry_allowed_length:
                    power = min((length - o.dry_allowed_length) * float(np.log(o.dry_base)), _MOST_EXPONENT)
                    row[token] -= np.float32(o.dry_multiplier * np.exp(power))
            changed = _joined(changed, np.fromiter(found, np.int64, len(found)))
        return changed

    def _penalise(self, row: Floats, window: Sequence[int]) -> Ids:
        """Repeat penalty: logits above 0 are divided by it, others multiplied; frequency per occurrence, presence once (as llama.cpp's)."""
        o = self._o
        counts = Counter(window) if o.frequency_penalty else set(window)
        ids = np.fromiter(counts, np.int64, len(counts))
        values = row[ids]
        if o.repeat_penalty != 1.0:
            values = np.where(values > 0, values / self._penalty, values * self._penalty)
        if isinstance(counts, Counter):
            values -= np.fromiter(counts.values(), np.float32, len(counts)) * np.float32(o.frequency_penalty)
        if o.presence_penalty:
            values -= np.float32(o.presence_penalty)
        row[ids] = values
        return ids


def repeats(tokens: Sequence[int], is_breaker: Callable[[int], bool]) -> dict[int, int]:
    """For each token that would continue a repetition of the end of `tokens`: the length of the longest such end.

    The end "a b c" that occurred before followed by "d" makes that 3 for d. Nothing is matched across a breaker, nor does one continue
    anything. (DRY, "don't repeat yourself": p-e-w, text-generation-webui pull request 5677, 2024.)
    """
    found: dict[int, int] = {}
    n = len(tokens)
    if n < 2 or is_breaker(tokens[-1]):
        return found
    last, at = tokens[-1], -1
    while True:
        try:
            at = tokens.index(last, at + 1, n - 1)
        except ValueError:
            return found
        following = tokens[at + 1]
        if is_breaker(following):
            continue
        length = 1
        while length <= at and length < _LONGEST_REPEAT and tokens[at - length] == tokens[n - 1 - length]:
            if is_breaker(tokens[at - length]):
                break
            length += 1
        found[following] = max(found.get(following, 0), length)


def _joined(a: Ids, b: Ids) -> Ids:
    return np.concatenate([a, b]) if len(a) else b


def _last(tokens: Sequence[int], n: int) -> Sequence[int]:
    """The window that an option with -1 for "all" asks for."""
    return tokens if n < 0 else tokens[-n:]
