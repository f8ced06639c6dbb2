"""How far one model's probabilities are from another's: perplexity, Kullback-Leibler divergence, agreement. Plain numbers in, plain
numbers out; knows neither files nor the daemon.

A distribution over a vocabulary is given by the natural-log probabilities of a few tokens (the reference's likeliest ones); all other
tokens are one bucket that holds what is left. Merging tokens can only lower a divergence (data processing inequality: Cover and Thomas,
Elements of Information Theory, 2.8), and with the 64 likeliest tokens apart it lowers it by very little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_REST = 1e-9
"""Of the probability that the bucket of all other tokens holds: less is rounding of the listed ones."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float


def perplexity(nll: Sequence[float]) -> Estimate:
    """exp(mean negative log-likelihood) of successive tokens (in nats), with the standard error that their spread gives.

    Raises ValueError when there is nothing to average.
    """
    if not nll:
        raise ValueError("a perplexity needs at least one token that follows another")
    mean = math.fsum(nll) / len(nll)
    value = math.exp(mean)
    if len(nll) < 2:
        return Estimate(value, math.inf)
    variance = math.fsum((x - mean) ** 2 for x in nll) / (len(nll) - 1)
    return Estimate(value, value * math.sqrt(variance / len(nll)))


def divergence(reference: Sequence[float], other: Sequence[float]) -> float:
    """KL(reference || other) in nats, from the log-probabilities both give to the same tokens, all other tokens being one bucket.

    Never negative but for rounding. Raises ValueError for lists of different lengths.
    """
    if len(reference) != len(other):
        raise ValueError(f"{len(reference)} log-probabilities against {len(other)}")
    listed = math.fsum(math.exp(p) * (p - q) for p, q in zip(reference, other))
    rest, rest_of_other = _rest(reference), _rest(other)
    return listed + rest * (math.log(rest) - math.log(rest_of_other))


def _rest(logs: Sequence[float]) -> float:
    return max(SMALLEST_REST, 1.0 - math.fsum(math.exp(p) for p in logs))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which that share of `values` lies, interpolated between neighbours. Raises ValueError when there are none."""
    if not values:
        raise ValueError("there is no percentile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of positions at which both name the same token. Raises ValueError for lists of different lengths or none."""
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} choices against {len(second)}")
    return sum(a == b for a, b in zip(first, second)) / len(first)


@dataclass(frozen=True)
class Distance:
    """How far a model is from a reference over one text. Divergences in nats."""

    perplexity: Estimate
    mean_kl: float
    p99_kl: float
    max_kl: float
    agreement: float


def distance(
    reference_logs: Sequence[Sequence[float]],
    reference_choices: Sequence[int],
    logs: Sequence[Sequence[float]],
    choices: Sequence[int],
    nll: Sequence[float],
) -> Distance:
    """Position by position: log-probabilities of the reference's likeliest tokens by both, the first choices of both, and the negative
    log-likelihood that the model gives to each token that follows. Raises ValueError for lists that do not match."""
    if len(reference_logs) != len(logs):
        raise ValueError(f"{len(reference_logs)} positions against {len(logs)}")
    each = [divergence(p, q) for p, q in zip(reference_logs, logs)]
    return Distance(
        perplexity=perplexity(nll),
        mean_kl=math.fsum(each) / len(each),
        p99_kl=percentile(each, 99),
        max_kl=max(each),
        agreement=agreement(reference_choices, choices),
    )
