"""A draft model: never another answer, fewer passes where it agrees, no time lost where it does not pay; the textbook rule beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.engine import ratio
from localrun.engine.parts import check_same_vocabulary
from localrun.engine.ratio import Distribution
from localrun.errors import BadRequest, Unsupported
from localrun.messages import Sampling
from localrun.text.tokenizer import Tokenizer
from tests.engine import oracle
from tests.engine.harness import Harness, Outcome
from tests.fakes import BOS, FakeClock, FakeModel, FakeTokenizer


class SmallerModel(FakeModel):
    """Agrees with FakeModel where a hash of its state says so: about `agreement` of the time."""

    def __init__(self, agreement: float, **options: Any) -> None:
        super().__init__(**options)
        self._agreement = agreement

    def logits(self, entries: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        row = super().logits(entries, tokens)
        return row if int(entries[-1]) % 1000 < 1000 * self._agreement else row[::-1].copy()


def memory_bound(rows: int, attended: int) -> float:
    return 0.04 + 0.001 * rows


def small(rows: int, attended: int) -> float:
    return 0.004 + 0.0001 * rows


def with_draft(agreement: float, cost: Any = small, **options: Any) -> Harness:
    clock = FakeClock()
    return Harness(
        FakeModel(clock=clock, cost=memory_bound, eog_bias=-100),
        clock=clock,
        draft=SmallerModel(agreement, clock=clock, cost=cost, eog_bias=-100),
        **options,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_agrees_saves_passes(temperature: float) -> None:
    """At any temperature: it draws with the numbers that the answer draws with."""
    harness = with_draft(1.0)
    outcome = harness.ask([BOS, 97, 98], max_tokens=60, temperature=temperature)
    harness.run()
    finished = outcome.finished
    assert finished is not None
    assert outcome.answer == oracle.answer([BOS, 97, 98], Sampling(seed=1, temperature=temperature), 60, eog_bias=-100)
    assert finished.passes < 20
    assert finished.accepted_tokens == 60 - finished.passes
    assert finished.draft_saved_s > 0.5 * (60 - finished.passes) * 0.04
    assert finished.decode_s < 0.5 * 60 * 0.041


@pytest.mark.parametrize(("agreement", "cost"), [(0.0, small), (1.0, memory_bound), (0.3, lambda rows, attended: 0.03)])
def test_where_it_does_not_pay_it_is_left_alone(agreement: float, cost: Any) -> None:
    """It never agrees; it is as slow as the model; it agrees sometimes and is nearly as slow."""
    harness = with_draft(agreement, cost)
    outcome = harness.ask([BOS, 97, 98], max_tokens=400)
    harness.run()
    assert outcome.finished is not None
    assert outcome.answer == oracle.answer([BOS, 97, 98], Sampling(seed=1), 400, eog_bias=-100)
    assert outcome.finished.decode_s < 1.1 * 400 * 0.041


@settings(max_examples=60, deadline=None)
@given(
    agreement=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompts=st.lists(st.tuples(st.lists(st.integers(97, 99), min_size=1, max_size=60), st.integers(0, 20)), min_size=1, max_size=6),
    options=st.sampled_from([{}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 0}, {"repeat_penalty": 1.3, "mirostat": 2}]),
    max_tokens=st.integers(1, 60),
    draft_blocks=st.integers(2, 40),
    n_blocks=st.integers(9, 40),
    max_batch=st.integers(4, 64),
)
def test_never_another_answer(
    agreement: float,
    prompts: list[tuple[list[int], int]],
    options: dict[str, Any],
    max_tokens: int,
    draft_blocks: int,
    n_blocks: int,
    max_batch: int,
) -> None:
    """Whatever the draft model says, however little room it has, whoever else is there, preempted or not."""
    clock = FakeClock()
    model = FakeModel(clock=clock, cost=memory_bound, max_batch=max_batch)
    draft = SmallerModel(agreement, clock=clock, cost=small, max_batch=max_batch)
    harness = Harness(model, n_blocks, clock=clock, draft=draft, draft_blocks=draft_blocks)
    outcomes: dict[int, tuple[list[int], Outcome]] = {}
    for step in range(21):
        for prompt, at in prompts:
            if at == step:
                outcomes[len(outcomes)] = (prompt, harness.ask([BOS, *prompt], max_tokens=max_tokens, seed=len(outcomes), **options))
        harness.step()
    harness.run()
    for seed, (prompt, outcome) in outcomes.items():
        expected = oracle.answer([BOS, *prompt], Sampling(seed=seed, **options), max_tokens, limit=min(4096, n_blocks * 16))
        assert outcome.answer == expected
    assert not harness.engine.drafter or not harness.engine.drafter.failed


def test_a_draft_model_that_fails_is_used_no_more() -> None:
    harness = with_draft(1.0)
    draft = cast(FakeModel, harness.parts.draft)
    outcome = harness.ask([BOS, 97, 98], max_tokens=60)
    for _ in range(6):
        harness.step()
    draft.forward = lambda spans: 1 // 0  # type: ignore
    harness.run()
    assert outcome.answer == oracle.answer([BOS, 97, 98], Sampling(seed=1), 60, eog_bias=-100)
    assert harness.engine.drafter is not None
    assert harness.engine.drafter.failed


def test_a_long_prompt_is_read_up_on_in_parts() -> None:
    """Nobody's token waits while the draft model reads a book: at most about a quarter of the target each step."""
    clock = FakeClock()
    slow = SmallerModel(1.0, clock=clock, cost=lambda rows, attended: 0.004 + 0.002 * rows, eog_bias=-100, max_batch=512)
    model = FakeModel(clock=clock, cost=memory_bound, eog_bias=-100, max_batch=512)
    harness = Harness(model, 200, clock=clock, draft=slow, target_s=0.2)
    harness.ask([BOS, *([97, 98, 99, 100, 101] * 200)], max_tokens=80, draft_num_predict=-1)
    gaps, last = [], clock()
    while harness.engine.has_work:
        harness.step()
        gaps.append(clock() - last)
        last = clock()
    assert max(gaps[12:]) < 0.04 + 0.512 / 4
    finished = harness.outcomes["request 1"].finished
    assert finished is not None
    assert finished.accepted_tokens > 20


def test_no_drafts_where_none_are_wanted() -> None:
    harness = with_draft(1.0)
    outcome = harness.ask([BOS, 97], max_tokens=30, draft_num_predict=0)
    harness.run()
    assert outcome.finished is not None
    assert (outcome.finished.drafted_tokens, outcome.finished.passes) == (0, 30)
    assert cast(FakeModel, harness.parts.draft).passes == 0


# ---- the vocabulary ---------------------------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused() -> None:
    ours, padded, other, ends = (FakeTokenizer() for _ in range(4))
    padded._pieces.append(b"<unused>")
    padded.n_vocab += 1
    other._pieces[100] = b"else"
    ends.eog_ids = frozenset({5})
    check_same_vocabulary(cast(Tokenizer, ours), cast(Tokenizer, padded))
    with pytest.raises(BadRequest, match="its token 100 is b'else', the model's is b'd'"):
        check_same_vocabulary(cast(Tokenizer, ours), cast(Tokenizer, other))
    with pytest.raises(BadRequest, match="ends its turns with other tokens"):
        check_same_vocabulary(cast(Tokenizer, ours), cast(Tokenizer, ends))


# ---- the textbook rule --------------------------------------------------------------------------------------------------------------

TODAY, EVERYDAY, TOMORROW = range(3)


def test_worked_case_of_the_correction() -> None:
    """q says today at .5, p only at .1; what p has more of than q is .3 for everyday and .1 for tomorrow: 75% and 25%."""
    q = Distribution(np.array([TODAY, EVERYDAY, TOMORROW, 3]), np.array([0.5, 0.1, 0.1, 0.3]))
    p = Distribution(np.array([EVERYDAY, TODAY, TOMORROW, 3]), np.array([0.4, 0.1, 0.2, 0.3]))
    corrected = p.less(q)
    assert corrected.share(EVERYDAY) == pytest.approx(0.75)
    assert corrected.share(TOMORROW) == pytest.approx(0.25)
    assert (corrected.share(TODAY), corrected.share(3)) == (0.0, 0.0)
    kept = sum(ratio.verdict(p, q, TODAY, seed, 0) == TODAY for seed in range(20_000)) / 20_000
    assert kept == pytest.approx(0.1 / 0.5, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(
    p=st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any),
    q=st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any),
)
def test_what_comes_out_is_distributed_as_the_target(p: list[int], q: list[int]) -> None:
    """Chi-squared over a vocabulary of four, 4,000 draws: with 3 degrees of freedom one value in 100,000 lies above 26."""
    target = Distribution(np.arange(4), np.array(p) / sum(p))
    draft = Distribution(np.arange(4)[::-1], np.array(q)[::-1] / sum(q))
    n = 4000
    counts = Counter(ratio.verdict(target, draft, ratio.guess(draft, seed, 5), seed, 5) for seed in range(n))
    assert all(target.share(token) > 0 for token in counts)
    expected = {token: n * target.share(token) for token in range(4) if target.share(token)}
    assert sum((counts[token] - e) ** 2 / e for token, e in expected.items()) < 26


def test_the_whole_engine_by_ratio() -> None:
    """Pairs of tokens, 1,000 answers with a draft model of another mind against 1,000 without drafts: the same distribution."""
    bias = dict.fromkeys((97, 98, 99), 15.0)
    pairs: list[Counter[tuple[int, ...]]] = []
    accepted = 0
    for draft in (SmallerModel(0.5, max_batch=64), None):
        clock = FakeClock()
        model = FakeModel(clock=clock, cost=lambda rows, attended: 0.04, max_batch=64)
        harness = Harness(model, 200, clock=clock, draft=draft, max_running=16, max_waiting=4000)
        options: dict[str, Any] = {"logit_bias": bias, "temperature": 8.0, "top_k": 3, "top_p": 1.0, "draft_rule": "ratio"}
        outcomes = [harness.ask([BOS, 97], max_tokens=4, seed=seed, **options) for seed in range(1000)]
        harness.run(most_steps=20_000)
        pairs.append(Counter(tuple(o.answer[1:3]) for o in outcomes))
        accepted += sum(o.finished.accepted_tokens for o in outcomes if o.finished)
    assert accepted > 100
    keys = pairs[0].keys() | pairs[1].keys()
    chi = sum((pairs[0][k] - pairs[1][k]) ** 2 / (pairs[0][k] + pairs[1][k]) for k in keys)
    assert chi < len(keys) + 6 * (2 * len(keys)) ** 0.5


def test_ratio_and_mirostat_exclude_each_other() -> None:
    harness = with_draft(1.0)
    with pytest.raises(Unsupported, match="mirostat"):
        harness.ask("x", draft_rule="ratio", mirostat=2)
