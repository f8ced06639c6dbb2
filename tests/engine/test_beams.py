"""Beam search: it finds what a plain search over a model run alone finds, whatever else happens; beginnings are shared, nothing stays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.sampler import logprobs_of
from localrun.errors import BadRequest, Unsupported
from localrun.messages import Generate, Sampling
from localrun.models.model import BLOCK_TOKENS, Span
from tests.engine import oracle
from tests.engine.harness import Harness, Outcome
from tests.fakes import BOS, END, EOS, FakeModel


def next_logprobs(tokens: list[int], k: int, **options: Any) -> list[tuple[int, float]]:
    """The k likeliest tokens after a sequence, from the model run alone."""
    model = FakeModel(max_batch=4096, **options)
    model.allocate_kv(-(-len(tokens) // BLOCK_TOKENS))
    blocks = np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int32)
    row = model.forward([Span(np.array(tokens, np.int32), 0, blocks, np.array([len(tokens) - 1], np.int32))])[0]
    return logprobs_of(row, 0, k).top


def by_hand(prompt: list[int], n: int, length: int, penalty: float, **options: Any) -> list[int]:
    """A plain search: no early end, all beginnings to the full length, nothing shared."""
    live, ended = [(0.0, list(prompt))], list[tuple[float, list[int]]]()
    for step in range(length):
        options_now = [
            (total + logprob, tokens, token)
            for total, tokens in live
            for token, logprob in next_logprobs(tokens, 2 * n, **options)
            if logprob > -math.inf
        ]
        options_now.sort(key=lambda one: -one[0])
        live = []
        for rank, (total, tokens, token) in enumerate(options_now[: 2 * n]):
            if token in (EOS, END):
                if rank < n:
                    ended.append((total, [*tokens, token]))
            elif step == length - 1:
                ended.append((total, [*tokens, token]))
            elif len(live) < n:
                live.append((total, [*tokens, token]))
            if len(live) == n:
                break
        ended = sorted(ended, key=lambda one: -one[0] / (len(one[1]) - len(prompt)) ** penalty)[:n]
    return ended[0][1][len(prompt) :]


def search(harness: Harness, prompt: list[int], n: int, **fields: Any) -> Outcome:
    harness._n += 1
    request = Generate(request_id=f"request {harness._n}", prompt_tokens=prompt, num_beams=n, sampling=Sampling(seed=1), **fields)
    return harness.add_search(harness.intake.search(request))


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 5),
    letters=st.lists(st.integers(97, 99), min_size=1, max_size=40),
    length=st.integers(1, 7),
    penalty=st.sampled_from([0.0, 1.0, 2.0]),
    eog_bias=st.sampled_from([0.0, 9.0, 12.0]),
    n_blocks=st.integers(12, 60),
    max_batch=st.integers(6, 64),
    others=st.integers(0, 4),
)
def test_it_finds_what_a_plain_search_finds(
    n: int, letters: list[int], length: int, penalty: float, eog_bias: float, n_blocks: int, max_batch: int, others: int
) -> None:
    prompt = [BOS, *letters]
    harness = Harness(FakeModel(max_batch=max_batch, eog_bias=eog_bias), n_blocks, max_running=6)
    for i in range(others):
        harness.ask([BOS, 65 + i], max_tokens=10 + 10 * i)
        harness.step()
    outcome = search(harness, prompt, n, max_tokens=length, length_penalty=penalty)
    harness.run()
    assert outcome.answer == by_hand(prompt, n, length, penalty, eog_bias=eog_bias)
    harness.engine.cache.tree.clear()
    harness.engine.check()
    assert harness.engine.cache.pool.n_free == n_blocks
    assert (harness.engine._jobs, harness.engine._searches) == ({}, {})


def test_it_finds_more_likely_answers_than_greed_does() -> None:
    better = 0
    for first in range(97, 117):
        harness = Harness(FakeModel(eog_bias=-100, max_batch=64), 100)
        found = search(harness, [BOS, first], 6, max_tokens=8)
        greedy = harness.ask([BOS, first], max_tokens=8, temperature=0, score=True)
        harness.run()
        assert found.finished is not None
        assert greedy.finished is not None
        assert found.finished.logprob >= greedy.finished.logprob - 1e-6
        better += found.finished.logprob > greedy.finished.logprob + 1e-6
    assert better > 3


def test_beginnings_are_shared() -> None:
    """The prompt is read once, and its blocks are held once, however many beams there are."""
    prompt = [BOS, *(97 + i % 7 for i in range(319))]
    harness = Harness(FakeModel(max_batch=512, eog_bias=-100), 100)
    outcome = search(harness, prompt, 8, max_tokens=12)
    most = 0
    while harness.engine.has_work:
        harness.step()
        most = max(most, harness.engine.cache.pool.n_held)
    assert outcome.finished is not None
    assert harness.model.rows <= 320 + 8 * 11
    assert most <= 20 + 2 * 8


def test_stop_strings_and_limits_end_beams() -> None:
    harness = Harness(FakeModel(eog_bias=-100, max_batch=64), 100)
    plain = search(harness, [BOS, 97], 3, max_tokens=12)
    harness.run()
    assert plain.finished is not None
    assert (plain.finished.reason, plain.finished.completion_tokens) == ("length", 12)
    stop = plain.text[3:5]
    cut = search(harness, [BOS, 97], 3, max_tokens=12, stop=[stop], length_penalty=-20.0)  # the shortest wins
    harness.run()
    assert cut.finished is not None
    assert cut.finished.stop in (stop, None)
    assert stop not in cut.text
    narrow = search(harness, [BOS, 97], 3, num_ctx=8)
    harness.run()
    assert narrow.finished is not None
    assert len(narrow.tokens) == 8


def test_cancelled_searches_leave_nothing() -> None:
    harness = Harness(FakeModel(eog_bias=-100, max_batch=64), 100)
    for steps in itertools.chain(range(6), (9,)):
        outcome = search(harness, [BOS, *range(97, 120)], 4, max_tokens=50)
        for _ in range(steps):
            harness.step()
        harness.engine.cancel(f"request {harness._n}")
        assert outcome.finished is not None
        assert outcome.finished.reason == "cancelled"
        assert harness.engine.cache.pool.n_held == 0
        assert not harness.engine.has_work


def test_a_pass_that_fails_fails_the_search_once() -> None:
    harness = Harness(FakeModel(eog_bias=-100, max_batch=64), 100)
    outcome = search(harness, [BOS, 97], 4, max_tokens=20)
    for _ in range(4):
        harness.step()
    harness.model.forward = lambda spans: 1 // 0  # type: ignore
    harness.step()
    assert outcome.failed is not None
    assert not harness.engine.has_work
    assert harness.engine.cache.pool.n_held == 0


def test_others_are_not_changed_by_a_search() -> None:
    harness = Harness(FakeModel(eog_bias=-100, max_batch=64), 100)
    search(harness, [BOS, 97, 98], 6, max_tokens=20)
    outcome = harness.ask([BOS, 97, 98], max_tokens=30)
    harness.run()
    assert outcome.answer == oracle.answer([BOS, 97, 98], Sampling(seed=1), 30, eog_bias=-100)


@pytest.mark.parametrize(
    "fields",
    [{"format": "json"}, {"logprobs": 1}, {"overflow": "shift"}, {"overflow": "sinks"}],
)
def test_what_it_cannot_be_combined_with(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="num_beams: beam search cannot be combined with"):
        search(Harness(), [BOS, 97], 2, **fields)


def test_numbers_out_of_range() -> None:
    with pytest.raises(BadRequest, match="num_beams must be from 1 to 32"):
        search(Harness(), [BOS, 97], 33)
    with pytest.raises(BadRequest, match="length_penalty must be a number"):
        search(Harness(), [BOS, 97], 2, length_penalty=math.inf)
