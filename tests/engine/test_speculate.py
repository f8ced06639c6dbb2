"""Drafts: never another text, fewer passes where the past repeats, none where they do not pay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.speculate import LONGEST, SHORTEST, Speculator
from localrun.messages import Finished, Sampling
from tests.engine import oracle
from tests.engine.harness import Harness, Outcome
from tests.fakes import BOS, FakeClock, FakeModel, ScriptedModel

CODE = """def total(values):
    count = 0
    for value in values:
        count = count + value
    return count
"""
EDITED = CODE.replace("count", "sum_of")


def memory_bound(rows: int, attended: int) -> float:
    return 0.03 + 0.001 * rows


def compute_bound(rows: int, attended: int) -> float:
    return 0.03 * rows


def edit(cost: object, draft_num_predict: int = -1, **fields: object) -> tuple[Outcome, Finished]:
    """The task that drafts are for: the same code again with one name changed."""
    clock = FakeClock()
    harness = Harness(ScriptedModel(EDITED, clock=clock, cost=cost, max_batch=64), clock=clock)
    prompt = f"Call count sum_of:\n{CODE}\nIt is now:\n"
    outcome = harness.ask(prompt, temperature=0, draft_num_predict=draft_num_predict, **fields)
    harness.run()
    assert outcome.finished is not None
    return outcome, outcome.finished


def test_an_edit_takes_fewer_passes() -> None:
    outcome, drafted = edit(memory_bound)
    assert outcome.text == EDITED
    assert drafted.passes < drafted.completion_tokens / 2
    assert drafted.accepted_tokens == drafted.completion_tokens - drafted.passes
    assert drafted.accepted_tokens <= drafted.drafted_tokens
    plain_outcome, plain = edit(memory_bound, 0)
    assert plain_outcome.text == EDITED
    assert (plain.drafted_tokens, plain.passes) == (0, plain.completion_tokens)
    assert plain.decode_s > 1.8 * drafted.decode_s
    assert drafted.draft_saved_s == pytest.approx(plain.decode_s - drafted.decode_s, rel=0.25)


def test_where_it_cannot_pay_nothing_is_drafted() -> None:
    """Each row costs as much as a pass of its own: a draft can at best break even."""
    outcome, finished = edit(compute_bound)
    _, plain = edit(compute_bound, 0)
    assert outcome.text == EDITED
    assert finished.drafted_tokens <= 4
    assert finished.decode_s <= plain.decode_s * 1.05


def test_the_most_that_was_asked_for() -> None:
    _, finished = edit(memory_bound, 2)
    _, free = edit(memory_bound)
    assert free.passes < finished.passes < finished.completion_tokens
    assert finished.drafted_tokens <= 2 * finished.passes


@pytest.mark.parametrize("stop", [["sum_of + value"], ["for"], ["\n\n"]])
def test_stop_strings_inside_a_draft(stop: list[str]) -> None:
    with_drafts, a = edit(memory_bound, stop=stop)
    without, b = edit(memory_bound, 0, stop=stop)
    assert with_drafts.text == without.text
    assert with_drafts.tokens == without.tokens
    assert (a.stop, a.completion_tokens) == (b.stop, b.completion_tokens)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 50),
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    repeat_penalty=st.sampled_from([1.0, 1.2]),
    max_tokens=st.integers(1, 60),
    prompt=st.lists(st.integers(97, 99), max_size=40),
    n_blocks=st.integers(8, 20),
    logprobs=st.sampled_from([None, 2]),
)
def test_never_another_answer(
    seed: int, temperature: float, repeat_penalty: float, max_tokens: int, prompt: list[int], n_blocks: int, logprobs: int | None
) -> None:
    """At any temperature, with penalties that look back, up to any length: the tokens and their log-probabilities."""
    bias = {97: 30.0, 98: 30.0, 99: 30.0}
    options: dict[str, Any] = {"seed": seed, "temperature": temperature, "repeat_penalty": repeat_penalty, "logit_bias": bias}
    outcomes = []
    for most in (-1, 0):
        clock = FakeClock()
        harness = Harness(FakeModel(clock=clock, cost=memory_bound), n_blocks, clock=clock)
        outcomes.append(harness.ask([BOS, *prompt], max_tokens=max_tokens, draft_num_predict=most, logprobs=logprobs, **options))
        harness.run()
    with_drafts, without = outcomes
    assert with_drafts.answer == without.answer == oracle.answer([BOS, *prompt], Sampling(**options), max_tokens, limit=n_blocks * 16)
    assert with_drafts.text == without.text
    assert [lp for p in with_drafts.pieces for lp in p.logprobs] == [lp for p in without.pieces for lp in p.logprobs]


def test_drafts_help_among_others_too() -> None:
    clock = FakeClock()
    harness = Harness(ScriptedModel(EDITED, clock=clock, cost=memory_bound, max_batch=64), n_blocks=128, clock=clock)
    outcomes = [harness.ask(f"Call count sum_of:\n{CODE}\nIt is {i}:\n", temperature=0) for i in range(4)]
    harness.run()
    for outcome in outcomes:
        assert outcome.finished is not None
        assert outcome.text == EDITED
        assert outcome.finished.passes < outcome.finished.completion_tokens / 2


# ---- how many are drafted -------------------------------------------------------------------------------------------------------


def learned(success: float, n: int = 200) -> Speculator:
    """One that has seen guesses come true at that rate."""
    speculator = Speculator(8)
    tokens = [1, 2, 3, 4, 5] * 3
    for i in range(n):
        guess = list(speculator.draft(tokens, lambda k: 1.0, 0, 8))
        right = (i * success) % 1.0 + success >= 1.0
        speculator.observe(guess if right else [99], 0)
    return speculator


def test_drafts_leave_prompts_their_share_of_the_target() -> None:
    """Three streams whose drafts would fill the step's whole time, and a long prompt: nobody waits for both one after the other."""
    clock = FakeClock()

    def cost(rows: int, attended: int) -> float:
        return 0.045 + 0.003 * rows

    reply = "around and around it goes, " * 60
    harness = Harness(ScriptedModel(reply, clock=clock, cost=cost, max_batch=512), 400, clock=clock, target_s=0.2)
    streams = [harness.ask(f"{i} ", temperature=0, max_tokens=1000) for i in range(3)]
    times: list[list[float]] = [[], [], []]

    def step() -> None:
        heard = [len(stream.pieces) for stream in streams]
        harness.step()
        for stream, n, at in zip(streams, heard, times):
            if len(stream.pieces) > n:
                at.append(clock())

    while min(map(len, times)) < 12:
        step()
    asked = clock()
    long = harness.ask("x" * 1500, temperature=0, max_tokens=2)
    while not long.pieces:
        step()
    worst = max(b - a for at in times for a, b in pairwise(at) if b > asked)
    assert worst < 0.25
    assert clock() - asked < 3 * (0.045 * 8 + 0.003 * 1500), "half of the time at least is the prompt's"
    assert all(stream.finished is None for stream in streams)
    harness.run()
    assert all(stream.finished is not None and stream.finished.accepted_tokens > 500 for stream in streams), "drafts have paid"


@pytest.mark.parametrize(
    ("success", "per_row", "expected"),
    [(1.0, 0.0, 8), (1.0, 0.3, 8), (1.0, 1.0, 0), (0.5, 0.02, 8), (0.5, 0.6, 0), (0.0, 0.05, 0)],
)
def test_the_number_drafted_follows_cost_and_rate(success: float, per_row: float, expected: int) -> None:
    speculator = learned(success)
    drafted = speculator.draft([1, 2, 3, 4, 5] * 3, lambda k: 1.0 + per_row * k, 0, 8)
    assert len(drafted) == expected


def test_a_costly_draft_is_weighed_against_everyone_s_tokens() -> None:
    """Alone a draft pays; with seven others in the pass, who would all wait for it, it does not."""
    speculator = learned(0.6)
    assert speculator.draft([1, 2, 3, 4, 5] * 3, lambda k: 1.0 + 0.25 * k, 0, 8)
    assert not speculator.draft([1, 2, 3, 4, 5] * 3, lambda k: 1.0 + 0.25 * k, 7, 8)


def test_it_begins_again_when_guesses_come_true_unasked() -> None:
    speculator = learned(0.0)
    tokens = [1, 2, 3, 4, 5] * 3
    for _ in range(60):
        if speculator.draft(tokens, lambda k: 1.0 + 0.1 * k, 0, 8):
            break
        speculator.observe([1], 0)
    else:
        raise AssertionError("never drafted again")


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 10))
def test_lookup_continues_the_longest_known_end(tokens: list[int], most: int) -> None:
    """Against a search from the right: the last earlier place of the longest end; grown token by token or all at once."""
    grown = Speculator()
    for n in range(len(tokens)):
        grown._look_up(tokens[: n + 1], most)
    found = Speculator()._look_up(tokens, most)
    assert found == grown._look_up(tokens, most)
    for n in range(LONGEST, SHORTEST - 1, -1):
        places = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
        if len(tokens) > n and places:
            period = len(tokens) - places[-1]
            assert found == [tokens[places[-1] + i % period] for i in range(most)]
            return
    assert found == []
