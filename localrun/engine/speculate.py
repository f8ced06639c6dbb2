"""Guessing the next tokens from the sequence's own past (prompt lookup), and deciding how many guesses are worth a pass.

A draft is checked in one forward pass, and a token of it is kept exactly when it is the one that is chosen anyway (jobs.py), so drafts
change the speed of an answer and never its text. What is decided here is only how many to check: the number that makes most tokens per
second by the measured cost of wider passes and the measured rate at which guesses come true. Where no number beats zero, nothing is
drafted; since guesses are compared with what comes even when they were not checked, the rate stays known, and drafting begins again when it
pays.
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
        self._guess: list[int] = []
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
        self._cost_s = (plain, cost(best))
        return self._guess[:best]

    def observe(self, came: list[int], accepted: int) -> None:
        """What was chosen, and how many drafted tokens of it: called once after each `draft`."""
        guess, self._guess = self._guess, []
        for i, (guessed, token) in enumerate(zip(guess, came, strict=False)):
            (self._next if i else self._first[self._kind]).add(guessed == token)
            if guessed != token:
                break
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
