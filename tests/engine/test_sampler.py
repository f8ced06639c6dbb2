"""The sampler against the definitions, spelled out slowly over whole vocabularies."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.engine.draws import draw_seed, mix, uniform
from localrun.engine.penalties import repeats
from localrun.engine.sampler import Sampler, logprobs_of
from localrun.engine.selection import draw_from_all, largest, log_sum_exp
from localrun.errors import LocalrunError
from localrun.messages import Sampling
from tests.fakes import FakePeaks

Row = NDArray[np.float32]


def rows_of(*sizes: int) -> st.SearchStrategy[Row]:
    return st.builds(
        lambda n, seed, scale, ties: np.round(np.random.default_rng(seed).normal(size=n) * scale, 0 if ties else 6).astype(np.float32),
        st.sampled_from(sizes),
        st.integers(0, 10_000),
        st.sampled_from([0.0, 0.5, 3.0, 20.0]),
        st.booleans(),
    )


rows = rows_of(1, 2, 63, 64, 65, 1000, 9000)


def slow_distribution(row: Row, o: Sampling) -> dict[int, float]:
    """What each token's probability must be, by the book: everything sorted, everything in float64."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = [i for i in order if row[i] > -math.inf]
    if o.temperature == 0:
        return {kept[0]: 1.0}

    def softmax(ids: list[int], temperature: float = 1.0) -> list[float]:
        top = max(float(row[i]) for i in ids)
        weights = [math.exp((float(row[i]) - top) / temperature) for i in ids]
        return [w / sum(weights) for w in weights]

    def first_of_mass(shares: list[float], mass: float) -> int:
        total = 0.0
        for n, share in enumerate(shares, 1):
            total += share
            if total >= mass:
                return n
        return len(shares)

    if o.top_n_sigma > 0:
        values = [float(row[i]) for i in kept]
        mean = sum(values) / len(values)
        sigma = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        kept = [i for i in kept if float(row[i]) >= values[0] - o.top_n_sigma * sigma]
    if o.top_k > 0:
        kept = kept[: o.top_k]
    if o.typical_p < 1:
        shares = softmax(kept)
        entropy = -sum(p * math.log(p) for p in shares if p)
        by_typicality = sorted(range(len(kept)), key=lambda j: abs(-math.log(max(shares[j], 1e-300)) - entropy))
        chosen = by_typicality[: first_of_mass([shares[j] for j in by_typicality], o.typical_p)]
        kept = [kept[j] for j in sorted(chosen)]
    if o.top_p < 1:
        kept = kept[: first_of_mass(softmax(kept), o.top_p)]
    if o.min_p > 0:
        kept = [i for i in kept if float(row[i]) >= float(row[kept[0]]) + math.log(o.min_p)]
    if o.xtc_probability == 1:
        above = [i for i, share in zip(kept, softmax(kept), strict=True) if share >= o.xtc_threshold]
        kept = [i for i in kept if i not in above[:-1]]
    return dict(zip(kept, softmax(kept, o.temperature), strict=True))


@settings(deadline=None)
@given(rows, st.integers(0, 200))
def test_largest(row: Row, k: int) -> None:
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert largest(row, k).tolist() == expected


@settings(deadline=None)
@given(rows, st.integers(1, 50), st.integers(0, 100))
def test_largest_of_a_masked_row(row: Row, k: int, seed: int) -> None:
    row = np.where(np.random.default_rng(seed).random(len(row)) < 0.99, -np.inf, row).astype(np.float32)
    expected = [i for i in sorted(range(len(row)), key=lambda i: (-row[i], i)) if row[i] > -np.inf][:k]
    assert largest(row, k).tolist() == expected


@settings(deadline=None)
@given(rows)
def test_log_sum_exp(row: Row) -> None:
    exact = math.log(sum(math.exp(float(x) - float(row.max())) for x in row)) + float(row.max())
    assert log_sum_exp(row) == pytest.approx(exact, abs=1e-5)


@settings(deadline=None)
@given(rows, st.floats(0, 1, exclude_max=True))
def test_draw_from_all(row: Row, u: float) -> None:
    """The token whose interval holds u, when all are laid end to end by id."""
    token = draw_from_all(row, u)
    shares = np.exp(row.astype(np.float64) - row.max())
    ends = np.cumsum(shares) / shares.sum()
    before = ends[token - 1] if token else 0.0
    assert before - 1e-5 <= u <= ends[token] + 1e-5
    assert shares[token] > 0


options = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 400]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.3]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=200, deadline=None)
@given(rows_of(1, 2, 64, 65, 400, 700), options)
def test_only_what_the_filters_leave_is_drawn(row: Row, o: Sampling) -> None:
    # A cut that falls on a sum of shares equal to top_p may move by a token in another precision: such tokens are let pass.
    looser = msgspec.structs.replace(o, top_p=min(1.0, o.top_p + 1e-6), typical_p=min(1.0, o.typical_p + 1e-6))
    allowed = slow_distribution(row, o).keys() | slow_distribution(row, looser).keys()
    drawn = {Sampler(o, o.seed or 0).choose(row.copy(), [], position) for position in range(20)}
    assert drawn <= allowed


def chosen(o: Sampling, row: Row, tokens: list[int], mask: NDArray[np.bool_] | None, banned: list[int], *, peaks: bool) -> object:
    """The token, or why there is none."""
    row = row.copy()
    try:
        return Sampler(o, o.seed or 0, eog_ids=[3, 4]).choose(row, tokens, len(tokens), mask, banned, FakePeaks(row) if peaks else None)
    except LocalrunError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(
    rows_of(5, 300, 5000, 20_000), options, st.sampled_from([1.0, 1.3]), st.sampled_from([0.0, 1.0]), st.booleans(),
    st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(0, 4), max_size=2), st.booleans(),
    st.sampled_from([None, np.nan, np.inf]), st.integers(0, 10_000),
)  # fmt: skip
def test_peaks_change_no_choice(
    row: Row, o: Sampling, repeat: float, dry: float, eos: bool, tokens: list[int], banned: list[int], masked: bool, bad: float | None,
    seed: int,
) -> None:  # fmt: skip
    n, random = len(row), np.random.default_rng(seed)
    tokens = [token * 7919 % n for token in tokens]
    bias = {int(random.integers(n)): float(random.choice([-100.0, 5.0]))} if seed % 2 else {}
    mask = random.random(n) < 0.1 if masked else None
    if bad is not None and seed % 5 == 0:
        row[random.integers(n)] = bad
    o = msgspec.structs.replace(
        o, repeat_penalty=repeat, dry_multiplier=dry, dry_allowed_length=1, ignore_eos=eos, logit_bias=bias, presence_penalty=repeat - 1
    )
    with np.errstate(invalid="ignore"):
        expected = chosen(o, row, tokens, mask, banned, peaks=False)
    assert chosen(o, row, tokens, mask, banned, peaks=True) == expected


@pytest.mark.parametrize(
    "o",
    [
        Sampling(),
        Sampling(temperature=1.0, top_k=0, top_p=1.0),
        Sampling(temperature=0.5, top_k=0, top_p=1.0),
        Sampling(temperature=1.0, top_k=0, top_p=0.7),
        Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.1),
        Sampling(temperature=1.0, top_k=0, top_p=1.0, typical_p=0.6),
        Sampling(temperature=1.0, top_k=6, top_p=0.9, min_p=0.05, typical_p=0.8),
        Sampling(temperature=1.0, top_k=0, top_p=1.0, top_n_sigma=1.5),
        Sampling(temperature=0.7, top_n_sigma=2.0),
        Sampling(temperature=1.0, top_k=0, top_p=1.0, xtc_probability=1.0, xtc_threshold=0.05),
        Sampling(temperature=0.9, xtc_probability=1.0, xtc_threshold=0.02),
    ],
)
def test_draws_follow_the_distribution(o: Sampling) -> None:
    """Chi-squared over 20,000 draws; the threshold would be passed by chance once in a million times."""
    row = (np.random.default_rng(5).normal(size=300) * 2).astype(np.float32)
    expected = slow_distribution(row, o)
    n = 20_000
    sampler = Sampler(o, 12345)
    drawn = np.bincount([sampler.choose(row.copy(), [], position) for position in range(n)], minlength=300)
    likely = [i for i, p in expected.items() if p * n >= 5]
    chi2 = sum((drawn[i] - expected[i] * n) ** 2 / (expected[i] * n) for i in likely)
    degrees = max(1, len(likely) - 1)
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees) + 15
    assert drawn.sum() == sum(drawn[i] for i in expected)


def test_penalties_by_the_book() -> None:
    """repeat: above 0 divided, below 0 multiplied; frequency by count; presence once; only the window counts."""
    row = np.array([2.0, -1.0, 0.5, 3.0, 1.0], np.float32)
    o = Sampling(temperature=0, repeat_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, repeat_last_n=4)
    Sampler(o, 0).choose(changed := row.copy(), [4, 0, 0, 1, 3], 5)
    assert changed.tolist() == pytest.approx([1.0 - 0.5 - 0.5, -2.0 - 0.25 - 0.5, 0.5, 1.5 - 0.25 - 0.5, 1.0])
    whole = Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=-1)
    Sampler(whole, 0).choose(changed := row.copy(), [4, 0, 0, 1, 3], 5)
    assert changed.tolist() == pytest.approx([1.0, -2.0, 0.5, 1.5, 0.5])
    none = Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=0)
    Sampler(none, 0).choose(changed := row.copy(), [4, 0, 0, 1, 3], 5)
    assert changed.tolist() == row.tolist()


def test_bias_and_mask_come_first() -> None:
    row = np.array([0.0, 1.0, 2.0], np.float32)
    assert Sampler(Sampling(temperature=0, logit_bias={0: 5.0}), 0).choose(row.copy(), [], 0) == 0
    mask = np.array([False, True, False])
    assert Sampler(Sampling(temperature=0, logit_bias={0: 100.0}), 0).choose(row.copy(), [], 0, mask) == 1
    assert {Sampler(Sampling(temperature=5.0), 0).choose(row.copy(), [], p, mask) for p in range(50)} == {1}
    with pytest.raises(LocalrunError, match="no token is allowed"):
        Sampler(Sampling(), 0).choose(row.copy(), [], 0, np.zeros(3, bool))
    with pytest.raises(LocalrunError, match="not a number"):
        Sampler(Sampling(), 0).choose(np.array([0.0, np.nan, 1.0], np.float32), [], 0)


def test_equal_logits_go_by_id() -> None:
    assert Sampler(Sampling(temperature=0), 0).choose(np.zeros(1000, np.float32), [], 0) == 0
    assert Sampler(Sampling(top_k=1), 0).choose(np.zeros(1000, np.float32), [], 0) == 0


def test_logprobs() -> None:
    row = (np.random.default_rng(1).normal(size=5000) * 3).astype(np.float32)
    exact = row.astype(np.float64) - math.log(np.exp(row.astype(np.float64)).sum())
    found = logprobs_of(row, 17, 5)
    assert found.chosen == pytest.approx(exact[17], abs=1e-5)
    assert [i for i, _ in found.top] == np.argsort(-exact)[:5].tolist()
    assert [p for _, p in found.top] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-5)
    assert logprobs_of(row, 17, 0).top == []


# ---- draws ----------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_mix_moves_about_half_of_the_bits(word: int, bit: int) -> None:
    changed = (mix(word) ^ mix(word ^ (1 << bit))).bit_count()
    assert 8 <= changed <= 56


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 3))
def test_uniform_takes_any_seed(seed: int, position: int, stream: int) -> None:
    assert 0.0 <= uniform(seed, position, stream) < 1.0
    assert uniform(seed, position, stream) == uniform(seed, position, stream)


@pytest.mark.parametrize("vary", ["seed", "position", "stream"])
def test_uniform_is_uniform_along_each_word(vary: str) -> None:
    """Kolmogorov-Smirnov against the uniform distribution, and no correlation from one to the next."""
    n = 20_000
    values = np.array([uniform(**{"seed": 1, "position": 1, "stream": 1, vary: i}) for i in range(n)])
    distance = np.abs(np.sort(values) - (np.arange(n) + 0.5) / n).max()
    assert distance < 2.2 / math.sqrt(n)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(n)


def test_drawn_seeds_differ_and_are_small() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) > 95
    assert all(0 <= seed < 2**31 for seed in seeds)


# ---- the rarer ones -------------------------------------------------------------------------------------------------------------


def test_xtc_tosses_its_own_coin() -> None:
    """About as often as its probability says, and without disturbing what is drawn otherwise."""
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    o = Sampling(temperature=1.0, top_k=0, top_p=1.0, xtc_probability=0.3, xtc_threshold=0.25)
    plain = Sampler(msgspec.structs.replace(o, xtc_probability=0.0), 9)
    xtc = Sampler(o, 9)
    drawn = [(plain.choose(row.copy(), [], p), xtc.choose(row.copy(), [], p)) for p in range(4000)]
    tossed = [p for p in range(4000) if uniform(9, p, 1) < 0.3]
    assert 0.27 < len(tossed) / 4000 < 0.33
    assert all(drawn[p][1] != 0 for p in tossed)
    assert all(a == b for p, (a, b) in enumerate(drawn) if p not in set(tossed))


def slow_repeats(tokens: list[int], breakers: set[int]) -> dict[int, int]:
    """For each token, the longest end of `tokens` that was followed by it before, breakers being in neither."""
    found: dict[int, int] = {}
    for length in range(1, len(tokens)):
        end = tokens[-length:]
        if breakers & set(end):
            break
        for start in range(len(tokens) - length):
            following = tokens[start + length]
            if tokens[start : start + length] == end and following not in breakers:
                found[following] = length
    return found


@given(st.lists(st.integers(0, 3), max_size=30), st.sets(st.integers(0, 3), max_size=2))
def test_dry_finds_the_longest_repetitions(tokens: list[int], breakers: set[int]) -> None:
    assert repeats(tokens, breakers.__contains__) == slow_repeats(tokens, breakers)


def test_dry_penalises_what_would_go_on_with_a_repetition() -> None:
    row = np.zeros(10, np.float32)
    o = Sampling(temperature=0, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=2)
    Sampler(o, 0).choose(row, [1, 2, 3, 4, 9, 1, 2, 3], 8)
    assert row.tolist() == pytest.approx([0, 0, 0, 0, -0.8 * 2.0 ** (3 - 2), 0, 0, 0, 0, 0])
    short = np.zeros(10, np.float32)
    Sampler(msgspec.structs.replace(o, dry_allowed_length=4), 0).choose(short, [1, 2, 3, 4, 9, 1, 2, 3], 8)
    assert not short.any()
    window = np.zeros(10, np.float32)
    Sampler(msgspec.structs.replace(o, dry_penalty_last_n=5), 0).choose(window, [1, 2, 3, 4, 9, 1, 2, 3], 8)
    assert not window.any()
    endless = np.zeros(10, np.float32)
    Sampler(msgspec.structs.replace(o, dry_base=3.0), 0).choose(endless, [5] * 500, 500)
    assert -np.inf < endless[5] < -1e30


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 4.0])
def test_mirostat_steers_surprise(version: int, tau: float) -> None:
    """Over a long text the mean surprise of what is drawn, by the distribution it is drawn from, comes to tau."""
    o = Sampling(temperature=1.0, mirostat=version, mirostat_tau=tau, mirostat_eta=0.1)
    sampler = Sampler(o, 3)
    generator = np.random.default_rng(0)
    zipf = -1.1 * np.log(np.arange(1, 2001))
    surprises = []
    for position in range(600):
        row = (zipf + generator.normal(size=2000) * 0.1).astype(np.float32)
        token = sampler.choose(row.copy(), [], position)
        surprises.append((log_sum_exp(row) - float(row[token])) / math.log(2))
    # The surprise that is steered is that among the tokens left; the model's own is larger by what was cut off.
    assert sampler._mirostat is not None
    mu = sampler._mirostat._mu
    steered = [tau + (a - b) / 0.1 for a, b in pairwise(mu[100:])]
    assert sum(steered) / len(steered) == pytest.approx(tau, abs=0.25)
    assert sum(surprises) / len(surprises) < tau + 2.5


def test_mirostat_takes_back() -> None:
    """What is drawn after tokens were taken back is what would have been drawn without them."""
    o = Sampling(temperature=1.0, mirostat=2)
    row = (np.random.default_rng(0).normal(size=500) * 2).astype(np.float32)
    once, twice = Sampler(o, 1), Sampler(o, 1)
    for p in range(5):
        once.choose(row.copy(), [], p)
        twice.choose(row.copy(), [], p)
    for p in range(5, 8):
        twice.choose(row.copy(), [], p)
    twice.take_back(3)
    assert [once.choose(row.copy(), [], p) for p in range(5, 20)] == [twice.choose(row.copy(), [], p) for p in range(5, 20)]


def test_ignore_eos() -> None:
    row = np.array([0.0, 9.0, 5.0], np.float32)
    assert Sampler(Sampling(temperature=0), 0, eog_ids=[1]).choose(row.copy(), [], 0) == 1
    assert Sampler(Sampling(temperature=0, ignore_eos=True), 0, eog_ids=[1]).choose(row.copy(), [], 0) == 2
