"""Guessing the next tokens from the sequence's own past (prompt lookup), and deciding how many guesses, from there or from a draft model,
are worth a pass.

A draft is checked in one forward pass, and a token of it is kept exactly when it is the one that is chosen anyway (jobs.py), so drafts
change the speed of an answer and never its text. What is decided here is only how many to check: the number that makes most tokens per
second by the measured cost of wider passes and the measured rate at which guesses come true. Where no number beats zero, nothing is
drafted; since guesses are compared with what comes even when they were not checked, the rate stays known, and drafting begins again when it
pays. A draft model's guesses cost time to make: once they have lost, they are tried again after a while only.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST = 4
"""Tokens of the end of the sequence that are looked up; the longest end that was seen before counts."""
SHORTEST = 2
_MARGIN = 1.03
"""A draft must promise this much more tokens per second: costs are estimates."""
_HARDLY = 0.01
"""A guess with less of a chance is not looked at."""
_MEMORY = 0.97
"""What a success or failure counts for after each later one."""
_TRY_AGAIN = 48
"""Passes after which a draft model whose guesses did not pay is asked for two once more."""


class Rate:
    """A success rate: counts that fade, on a prior."""

    def __init__(self, prior: float, weight: float = 2.0) -> None:
        self._successes = prior * weight
        self._trials = weight

    @property
    def value(self) -> float:
        return self._successes / self._trials

    def add(self, success: bool) -> None:
        self._successes = self._successes * _MEMORY + success
        self._trials = self._trials * _MEMORY + 1.0


class Speculator:
    """Of one sequence. `most`: tokens drafted at a time, at most."""

    def __init__(self, most: int = 16) -> None:
        self.most = most
        self.n_drafted = 0
        self.n_accepted = 0
        self.saved_s = 0.0
        """Estimated: passes that were not needed, less what wider passes took longer."""
        self._seen: list[dict[tuple[int, ...], int]] = [{} for _ in range(SHORTEST, LONGEST + 1)]
        """For each length, where what followed it was last."""
        self._indexed = 0
        self._first = [Rate(0.2), Rate(0.4), Rate(0.6)]
        """How often the first guess comes true, by length of what was found."""
        self._next = Rate(0.7)
        """How often a guess comes true when the one before it has."""
        self._model = Rate(0.8)
        """How often a draft model's guess comes true when all before it have."""
        self._idle = 0
        """Passes since the draft model was last asked."""
        self._guess: list[int] = []
        self._by_model = False
        self._kind = 0
        self._drafted = 0
        self._cost_s = (0.0, 0.0)

    def draft(self, tokens: list[int], cost: Callable[[int], float], others: int, most: int) -> list[int]:
        """Guesses at what follows `tokens` that are worth checking; empty where none are.

        cost(k): seconds of the coming pass with k drafted tokens in it. others: tokens that it will bring for other sequences.
        """
        self._guess = self._look_up(tokens, min(self.most, most))
        best, best_rate = 0, (1.0 + others) * _MARGIN
        plain = cost(0)
        expected, chance = 1.0, self._first[self._kind].value
        for k in range(1, len(self._guess) + 1):
            expected += chance
            chance *= self._next.value
            rate = (expected + others) * plain / max(cost(k), 1e-9)
            if rate > best_rate:
                best, best_rate = k, rate
            if chance < _HARDLY:
                break
        self._drafted = best
        self._by_model = False
        self._cost_s = (plain, cost(best))
        return self._guess[:best]

    def wish(self, cost: Callable[[int], float], guess_s: float, others: int, most: int) -> int:
        """How many guesses of a draft model, each of which takes guess_s, are worth making; asked where `draft` found none.

        cost, others, most as for `draft`.
        """
        self._idle += 1
        best, best_rate = 0, (1.0 + others) * _MARGIN
        plain, expected, chance = cost(0), 1.0, 1.0
        for k in range(1, min(self.most, most) + 1):
            chance *= self._model.value
            expected += chance
            rate = (expected + others) * plain / max(cost(k) + k * guess_s, 1e-9)
            if rate > best_rate:
                best, best_rate = k, rate
            if chance < _HARDLY:
                break
        if not best and self._idle >= _TRY_AGAIN:
            best = min(2, self.most, most)
        return best

    def guessed(self, n: int, cost: Callable[[int], float], spent_s: float) -> None:
        """A draft model has made n guesses that will be checked in the coming pass, in spent_s."""
        self._idle = 0
        self._drafted, self._by_model = n, True
        self._cost_s = (cost(0), cost(n) + spent_s)

    def observe(self, came: list[int], accepted: int) -> None:
        """What was chosen, and how many drafted tokens of it: called once after each `draft`."""
        guess, self._guess = self._guess, []
        for i, (guessed, token) in enumerate(zip(guess, came, strict=False)):
            (self._next if i else self._first[self._kind]).add(guessed == token)
            if guessed != token:
                break
        if self._by_model:
            for i in range(min(self._drafted, accepted + 1)):
                self._model.add(i < accepted)
        self.n_drafted += self._drafted
        self.n_accepted += accepted
        if self._drafted:
            plain, wide = self._cost_s
            self.saved_s += accepted * plain - (wide - plain)
        self._drafted = 0

    def forget(self) -> None:
        """The sequence has been changed in the middle."""
        for seen in self._seen:
            seen.clear()
        self._indexed = 0

    def _look_up(self, tokens: list[int], most: int) -> list[int]:
        """What followed the last time the longest known end of `tokens` occurred; a repetition under way is continued."""
        self.index(tokens)
        for n in range(LONGEST, SHORTEST - 1, -1):
            if len(tokens) <= n:
                continue
            at = self._seen[n - SHORTEST].get(tuple(tokens[-n:]))
            if at is not None:
                self._kind = n - SHORTEST
                period = len(tokens) - at
                return [tokens[at + i % period] for i in range(most)]
        return []

    def index(self, tokens: list[int]) -> None:
        """Notes every place that something follows: all but the very end. Only what is new is looked at."""
        for end in range(self._indexed, len(tokens)):
            for n in range(SHORTEST, LONGEST + 1):
                if end >= n:
                    self._seen[n - SHORTEST][tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens)
