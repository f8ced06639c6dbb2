"""The textbook rule for drafted tokens (Leviathan et al. 2023, algorithm 1): a guess x drawn from q is kept with probability
min(1, p(x) / q(x)), else another token is drawn from max(0, p - q), normalised. What comes out is distributed as p.

The answer's distribution is the model's, but its tokens are not those that would have come without a draft, as they are with the exact
rule (jobs.py): this is for whom the speed of high temperatures matters more than repeating an answer without drafts. Draws are keyed by
(seed, position) here too, each on a stream of its own. Knows no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localrun.engine.draws import uniform

GUESS, KEEP, CORRECT = 2, 3, 4
"""Streams of random numbers: what is guessed, whether it is kept, what comes in its place."""


@dataclass(frozen=True)
class Distribution:
    """ids: int64 (n,), no two equal; shares: float64 (n,), not negative, with sum 1. All other tokens have none."""

    ids: NDArray[np.int64]
    shares: NDArray[np.float64]

    @classmethod
    def of(cls, token: int) -> Distribution:
        """Of a guess that was certain, as one from the text's own past."""
        return cls(np.array([token], np.int64), np.ones(1))

    def share(self, token: int) -> float:
        found = np.flatnonzero(self.ids == token)
        return float(self.shares[found[0]]) if len(found) else 0.0

    def less(self, other: Distribution) -> Distribution:
        """max(0, self - other), normalised: where a kept guess leaves too little. `self` itself when nothing remains (they are equal)."""
        order = np.argsort(other.ids)
        places = np.searchsorted(other.ids[order], self.ids)
        places[places == len(order)] = 0
        same = other.ids[order][places] == self.ids
        left = np.maximum(0.0, self.shares - np.where(same, other.shares[order][places], 0.0))
        total = left.sum()
        return self if total <= 0 else Distribution(self.ids, left / total)

    def draw(self, u: float) -> int:
        """The token that u in [0, 1) falls on."""
        ends = np.cumsum(self.shares)
        place = int(np.searchsorted(ends, u * ends[-1], side="right"))
        place = min(place, len(ends) - 1)
        while place > 0 and self.shares[place] == 0.0:
            place -= 1
        return int(self.ids[place])


def guess(q: Distribution, seed: int, position: int) -> int:
    """A draft model's guess."""
    return q.draw(uniform(seed, position, GUESS))


def verdict(p: Distribution, q: Distribution, guessed: int, seed: int, position: int) -> int:
    """The token for the position: the guess, or another."""
    if uniform(seed, position, KEEP) * q.share(guessed) < p.share(guessed):
        return guessed
    return p.less(q).draw(uniform(seed, position, CORRECT))
