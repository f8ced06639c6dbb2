"""Perplexity, divergence and agreement on numbers that can be checked by hand, and as properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.cli.likelihood import agreement, distance, divergence, percentile, perplexity

HALF, QUARTER, EIGHTH = math.log(1 / 2), math.log(1 / 4), math.log(1 / 8)


def test_perplexity_of_a_fair_die_is_its_number_of_sides() -> None:
    found = perplexity([math.log(6)] * 10)
    assert found.value == pytest.approx(6)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_perplexity_is_the_geometric_mean_with_its_standard_error() -> None:
    # probabilities 1/2 and 1/8: mean log 2 * 2, so 4; the logs' standard deviation is sqrt(2) * ln 2, over sqrt(2) tokens
    found = perplexity([-HALF, -EIGHTH])
    assert found.value == pytest.approx(4)
    assert found.error == pytest.approx(4 * math.log(2))


def test_perplexity_of_one_token_has_no_error_to_tell() -> None:
    assert perplexity([1.0]).error == math.inf


def test_perplexity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        perplexity([])


def test_divergence_by_hand() -> None:
    # p = (1/2, 1/4 | rest 1/4), q = (1/4, 1/4 | rest 1/2): 1/2 ln 2 + 0 - 1/4 ln 2
    assert divergence([HALF, QUARTER], [QUARTER, QUARTER]) == pytest.approx(math.log(2) / 4)


def test_divergence_counts_what_is_not_listed_as_one_token() -> None:
    # nothing listed: both buckets hold everything
    assert divergence([], []) == 0
    # all of p is listed, q keeps half for the rest: ln 2
    assert divergence([0.0], [HALF]) == pytest.approx(math.log(2), rel=1e-6)


def test_divergence_survives_rounding_above_one() -> None:
    assert divergence([1e-8], [2e-8]) == pytest.approx(0, abs=1e-7)


def test_divergence_of_unequal_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="2 log-probabilities against 1"):
        divergence([HALF, QUARTER], [HALF])


weights = st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=20)


@given(weights, st.integers(0, 20))
def test_divergence_is_positive_and_grows_with_detail(values: list[float], listed: int) -> None:
    """Over any two distributions: at least 0, 0 for equal ones, and no larger when fewer tokens are told apart."""
    other = list(reversed(values))
    p = [math.log(value / sum(values)) for value in values]
    q = [math.log(value / sum(other)) for value in other]
    n = min(listed, len(p) - 1)
    assert divergence(p, p) == pytest.approx(0, abs=1e-9)
    assert -1e-9 <= divergence(p[:n], q[:n]) <= divergence(p, q) + 1e-7


def test_percentile_interpolates() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([5], 99) == 5
    assert percentile(list(range(101)), 99) == 99
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 99)


def test_agreement_is_a_share() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 0, 4]) == 0.75
    with pytest.raises(ValueError, match="choices"):
        agreement([1], [1, 2])
    with pytest.raises(ValueError, match="choices"):
        agreement([], [])


def test_distance_puts_it_together() -> None:
    found = distance(
        reference_logs=[[HALF, QUARTER], [HALF, QUARTER]],
        reference_choices=[7, 8],
        logs=[[HALF, QUARTER], [QUARTER, QUARTER]],
        choices=[7, 9],
        nll=[-HALF],
    )
    assert found.perplexity.value == pytest.approx(2)
    assert found.mean_kl == pytest.approx(math.log(2) / 8)
    assert found.max_kl == pytest.approx(math.log(2) / 4)
    assert found.p99_kl == pytest.approx(0.99 * math.log(2) / 4)
    assert found.agreement == 0.5


def test_distance_refuses_what_does_not_match() -> None:
    with pytest.raises(ValueError, match="1 positions against 2"):
        distance([[HALF]], [1], [[HALF], [HALF]], [1], [1.0])
