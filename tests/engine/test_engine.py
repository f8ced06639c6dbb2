"""Whole requests through the engine on the fake model: what comes out never depends on what else happens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localrun.errors import Busy
from localrun.messages import Evaluate, Finished, Generate, Message, Sampling, Started
from tests.engine import oracle
from tests.engine.harness import Harness
from tests.fakes import BOS, END, FakeClock, FakeModel, ScriptedModel

SAMPLINGS = [
    Sampling(temperature=0.0, seed=1),
    Sampling(seed=7),
    Sampling(seed=7, top_k=0, top_p=1.0, temperature=1.0),
    Sampling(seed=3, repeat_penalty=1.3, repeat_last_n=-1, presence_penalty=0.2),
    Sampling(seed=3, top_k=5, min_p=0.1, temperature=2.0),
    Sampling(seed=4, logit_bias={97: 40.0, 98: 40.0, 99: 40.0}),  # of three letters, some of what is guessed comes true
]
PREFIXES = [[BOS], [BOS, *range(65, 65 + 40)], [BOS, *range(65, 65 + 20), *range(40, 60)]]


@dataclass(frozen=True)
class Asked:
    """A request of a random schedule: queued before step `at`, cancelled before step `until`, if that comes first."""

    prompt: tuple[int, ...]
    sampling: int
    max_tokens: int
    at: int
    until: int | None
    priority: int


def joined(lists: Iterable[list]) -> list:
    return list(chain.from_iterable(lists))


asked = st.builds(
    Asked,
    prompt=st.builds(lambda prefix, rest: tuple(PREFIXES[prefix] + rest), st.integers(0, 2), st.lists(st.integers(97, 99), max_size=30)),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    max_tokens=st.integers(1, 25),
    at=st.integers(0, 30),
    until=st.none() | st.integers(0, 60),
    priority=st.integers(-1, 1),
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(asked, min_size=1, max_size=9),
    n_blocks=st.integers(6, 40),
    max_batch=st.integers(4, 64),
    max_running=st.integers(1, 12),
    per_row=st.sampled_from([0.0, 0.001, 0.02, 0.5]),
)
@example(  # eight at once with one prompt, in a pool that holds three of them
    requests=[Asked(tuple(PREFIXES[1]), 1, 20, 0, None, 0)] * 8, n_blocks=12, max_batch=16, max_running=8, per_row=0.02
)
def test_nothing_changes_an_answer(requests: list[Asked], n_blocks: int, max_batch: int, max_running: int, per_row: float) -> None:
    """Alone, among others, cold or warm, chunked, preempted and resumed: each answer is the one the model gives by itself."""
    clock = FakeClock()
    model = FakeModel(max_batch=max_batch, clock=clock, cost=lambda rows, attended: 0.01 + per_row * rows)
    harness = Harness(model, n_blocks, clock=clock, max_running=max_running)
    outcomes = {}

    def act(step: int) -> None:
        for i, request in enumerate(requests):
            if request.until == step:
                harness.engine.cancel(f"request {i}")
            if request.at == step and len(request.prompt) < n_blocks * 16:
                fields = {name: getattr(SAMPLINGS[request.sampling], name) for name in Sampling.__struct_fields__}
                outcomes[i] = harness.ask(
                    list(request.prompt),
                    request_id=f"request {i}",
                    max_tokens=request.max_tokens,
                    priority=request.priority,
                    **fields,
                )

    for step in range(31):
        act(step)
        harness.step()
    harness.run(between=lambda step: act(step + 31))
    harness.step()
    for i, outcome in outcomes.items():
        request = requests[i]
        assert outcome.finished is not None, outcome.failed
        expected = oracle.answer(list(request.prompt), SAMPLINGS[request.sampling], request.max_tokens, limit=min(4096, n_blocks * 16))
        if outcome.finished.reason == "cancelled":
            assert request.until is not None
            assert outcome.answer == expected[: len(outcome.answer)]
        else:
            assert outcome.answer == expected
            assert outcome.finished.completion_tokens == len(expected)


def test_preemption_happens_and_is_invisible() -> None:
    """The pool holds two of four growing answers: the youngest give way, and nobody can tell from the text."""
    alone = [oracle.answer(PREFIXES[0] + [97 + i], Sampling(seed=1), 60, eog_bias=-100) for i in range(4)]
    harness = Harness(FakeModel(eog_bias=-100), n_blocks=10)
    seqs = []
    outcomes = []
    for i in range(4):
        outcomes.append(harness.ask(PREFIXES[0] + [97 + i], max_tokens=60))
        seqs.append(harness.engine.scheduler.waiting[-1])
        harness.clock.advance(1)
    harness.run()
    assert [o.answer for o in outcomes] == alone
    assert sum(seq.n_preempted for seq in seqs) > 0
    assert seqs[0].n_preempted == 0, "the oldest never gives way"


def test_warm_prefix_is_reported_and_saves_rows() -> None:
    harness = Harness(FakeModel(eog_bias=-100), n_blocks=64)
    prompt = [BOS, *([97, 98, 99] * 60)]
    first = harness.ask(prompt, max_tokens=8)
    harness.run()
    cold_rows = harness.model.rows
    second = harness.ask(prompt, max_tokens=8)
    harness.run()
    assert first.finished is not None
    assert second.finished is not None
    assert first.finished.cached_tokens == 0
    assert second.finished.cached_tokens == len(prompt) - 1
    assert second.started is not None
    assert second.started.cached_tokens == len(prompt) - 1
    assert harness.model.rows - cold_rows == 8
    assert second.answer == first.answer


def test_a_growing_chat_reuses_its_own_answer() -> None:
    """The next turn's prompt begins with the last turn's prompt and answer: all of it but the last block's rest comes from the tree."""
    harness = Harness(n_blocks=64)
    first = harness.ask([BOS, *range(97, 117)], max_tokens=30)
    harness.run()
    second = harness.ask([*first.tokens, 65, 66, 67], max_tokens=5)
    harness.run()
    assert second.finished is not None
    assert second.finished.cached_tokens == len(first.tokens) - 1  # the answer's last token was never read
    assert second.answer == oracle.answer([*first.tokens, 65, 66, 67], Sampling(seed=1), 5)


def test_a_prompt_that_leaves_the_tree_inside_a_block_copies_it() -> None:
    harness = Harness(n_blocks=64)
    harness.ask([BOS, *range(65, 95)], max_tokens=4)
    harness.run()
    other = [BOS, *range(65, 85), 40, 41, 42]
    outcome = harness.ask(other, max_tokens=4)
    harness.run()
    assert outcome.finished is not None
    assert outcome.finished.cached_tokens == 21
    assert harness.engine.cache.n_copied == 1
    assert outcome.answer == oracle.answer(other, Sampling(seed=1), 4)


def test_eight_at_once_read_their_prompt_once() -> None:
    """A prompt that several bring at the same moment is computed by the first; the others wait a step and take it."""
    prompt = [BOS, *([97, 98, 99, 100] * 25)]
    harness = Harness(FakeModel(max_batch=256), n_blocks=64)
    outcomes = [harness.ask(prompt, max_tokens=3, seed=i) for i in range(8)]
    harness.run()
    assert [o.finished.cached_tokens if o.finished else None for o in outcomes] == [0] + [96] * 7
    assert harness.model.rows == 101 + 7 * 5 + 8 * 2
    assert [o.answer for o in outcomes] == [oracle.answer(prompt, Sampling(seed=i), 3) for i in range(8)]


def test_cancelling_gives_everything_back_at_once() -> None:
    harness = Harness(n_blocks=64)
    running = harness.ask([BOS, *([97] * 100)], max_tokens=500)
    queued = [harness.ask([BOS, 98 + i]) for i in range(3)]
    for _ in range(4):
        harness.step()
    held = harness.engine.cache.pool.n_held
    assert held > 0
    for request_id in list(harness.outcomes):
        harness.engine.cancel(request_id)
    harness.engine.check()
    assert harness.engine.cache.pool.n_held == 0
    assert not harness.engine.has_work
    for outcome in [running, *queued]:
        assert outcome.finished is not None
        assert outcome.finished.reason == "cancelled"
    harness.engine.cancel("request 1")
    harness.engine.cancel("never heard of")
    passes = harness.model.passes
    harness.engine.step()
    assert harness.model.passes == passes


def test_a_full_queue_answers_busy() -> None:
    harness = Harness(max_running=2, max_waiting=3)
    for i in range(5):
        harness.ask([BOS, 97 + i], max_tokens=4)
    with pytest.raises(Busy):
        harness.ask([BOS, 110])
    del harness.outcomes["request 6"]
    harness.run()
    harness.ask([BOS, 110], max_tokens=2)
    harness.run()


def test_order_of_events() -> None:
    harness = Harness()
    outcome = harness.ask("hello", max_tokens=5)
    harness.run()
    assert isinstance(harness.events[0], Started)
    assert isinstance(harness.events[-1], Finished)
    assert outcome.text == "".join(p.text for p in outcome.pieces)
    assert outcome.finished is not None
    assert outcome.finished.context[: outcome.finished.prompt_tokens] == harness.parts.tokenizer.encode("hello")


def test_times_are_this_request_s_own() -> None:
    clock = FakeClock()
    model = FakeModel(clock=clock, cost=lambda rows, attended: 0.5)
    harness = Harness(model, clock=clock, max_running=1)
    first = harness.ask([BOS, 97], max_tokens=4)
    second = harness.ask([BOS, 98], max_tokens=3)
    harness.run()
    assert first.finished is not None
    assert second.finished is not None
    a, b = first.finished, second.finished
    assert (a.queue_s, a.prefill_s, a.decode_s, a.first_token_s) == (0.0, 0.5, 1.5, 0.5)
    assert (b.queue_s, b.prefill_s, b.decode_s, b.first_token_s) == (2.0, 0.5, 1.0, 2.5)


def test_end_of_turn_is_no_text() -> None:
    harness = Harness(ScriptedModel("hello world"))
    outcome = harness.add(Generate(request_id="a", messages=[Message(role="user", content="hi")], sampling=Sampling(temperature=0)))
    harness.run()
    assert outcome.finished is not None
    assert (outcome.text, outcome.finished.reason, outcome.finished.stop) == ("hello world", "stop", None)
    assert outcome.finished.completion_tokens == 3
    assert outcome.tokens[-1] == END


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        (["world"], "say hello ", "world"),
        (["STOP"], "say hello world and ", "STOP"),
        (["d and S"], "say hello worl", "d and S"),  # begins and ends inside longer tokens
        (["zebra", "and STOPPED", "TOP"], "say hello world and S", "TOP"),
        (["never said"], "say hello world and STOP the rest한", None),
        ([], "say hello world and STOP the rest한", None),
        (["say"], "", "say"),
        (["한"], "say hello world and STOP the rest", "한"),
    ],
)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_stop_strings_leak_nothing(stop: list[str], text: str, found: str | None, logprobs: int | None) -> None:
    harness = Harness(ScriptedModel("say hello world and STOP the rest한"))
    outcome = harness.ask("Q:", temperature=0, stop=stop, logprobs=logprobs)
    harness.run()
    assert outcome.finished is not None
    assert (outcome.text, outcome.finished.stop, outcome.finished.reason) == (text, found, "stop")
    reported = [item for piece in outcome.pieces for item in piece.logprobs]
    if logprobs is None:
        assert not reported
    else:
        spelled = b"".join(bytes(item.bytes) for item in reported)
        assert spelled.startswith(text.encode()), "a shown text without its log-probabilities"
        last = reported[-1].bytes if reported else []
        assert len(spelled) - len(last) < max(1, len(text.encode())), "log-probabilities of tokens that are not shown"
        assert all(len(item.top) == logprobs for item in reported)


def test_a_character_is_never_cut() -> None:
    """한 is one token here, but its bytes may come one by one."""
    harness = Harness(ScriptedModel("é한"))
    model = harness.model
    assert isinstance(model, ScriptedModel)
    model._script = lambda prompt: list("é한글".encode())  # type: ignore[method-assign]
    outcome = harness.ask("Q:", temperature=0)
    harness.run()
    assert outcome.text == "é한글"
    assert all("\ufffd" not in piece.text for piece in outcome.pieces)
    assert [piece.text for piece in outcome.pieces] == ["é", "한", "글"]


def test_max_tokens_and_context_end_with_length() -> None:
    harness = Harness(FakeModel(eog_bias=-100), n_blocks=8)
    short = harness.ask([BOS, 97], max_tokens=3)
    narrow = harness.ask([BOS, 97], num_ctx=10)
    widest = harness.ask([BOS, 97])
    harness.run()
    for outcome, n in ((short, 3), (narrow, 8), (widest, 126)):
        assert outcome.finished is not None
        assert (outcome.finished.reason, outcome.finished.completion_tokens) == ("length", n)


def test_max_tokens_0_reads_the_prompt_only() -> None:
    harness = Harness()
    outcome = harness.ask([BOS, *([97] * 40)], max_tokens=0)
    harness.run()
    assert outcome.finished is not None
    assert (outcome.text, outcome.finished.reason, outcome.finished.completion_tokens) == ("", "length", 0)
    warm = harness.ask([BOS, *([97] * 40)], max_tokens=1)
    harness.run()
    assert warm.finished is not None
    assert warm.finished.cached_tokens == 40


def test_logprobs_are_the_model_s_own() -> None:
    """Before bias, penalties and temperature; the sum over the vocabulary is 1."""
    harness = Harness(FakeModel(eog_bias=-100))
    outcome = harness.ask("hello", max_tokens=3, logprobs=273, temperature=0.3, repeat_penalty=2.0, logit_bias={97: 50.0})
    harness.run()
    for piece in outcome.pieces:
        for item in piece.logprobs:
            assert sum(math.exp(t.logprob) for t in item.top) == pytest.approx(1.0, abs=1e-5)
            assert [t.logprob for t in item.top] == sorted((t.logprob for t in item.top), reverse=True)
            assert item.logprob == next(t.logprob for t in item.top if t.id == item.id)
    assert outcome.text == "aaa"


def test_a_pass_that_fails_fails_its_requests_only() -> None:
    harness = Harness(n_blocks=32)
    broken = harness.ask([BOS, 97], max_tokens=5)
    real = harness.model.forward
    harness.model.forward = lambda spans: 1 // 0  # type: ignore
    harness.step()
    harness.model.forward = real  # type: ignore[method-assign]
    assert broken.failed is not None
    assert broken.failed.code == "internal_error"
    assert "ZeroDivisionError" in broken.failed.message
    after = harness.ask([BOS, 97], max_tokens=5)
    harness.run()
    assert after.answer == oracle.answer([BOS, 97], Sampling(seed=1), 5)


def test_a_row_of_nan_fails_its_own_request() -> None:
    harness = Harness()
    harness.ask([BOS, 97], max_tokens=5)
    bad = harness.ask([BOS, 98], max_tokens=5)
    real = harness.model.logits
    harness.model.logits = lambda e, t: real(e, t) * np.float32("nan" if 98 in t[:2] else 1.0)  # type: ignore
    harness.run()
    assert bad.failed is not None
    assert "not a number" in bad.failed.message
    assert harness.outcomes["request 1"].answer == oracle.answer([BOS, 97], Sampling(seed=1), 5)


def test_evaluation_is_teacher_forcing() -> None:
    """Every position's likelihoods, in chunks, equal to those of single passes; the prefix tree is neither used nor filled."""
    harness = Harness(FakeModel(max_batch=8), n_blocks=32)
    tokens = [BOS, *range(97, 117)]
    ids = [[t, 65] for t in tokens]
    job = harness.intake.evaluation(Evaluate(request_id="e", tokens=tokens, top=4, ids=ids))
    outcome = harness.add_job(job)
    other = harness.ask([BOS, 97], max_tokens=5)
    harness.run()
    assert [c.first for c in outcome.evaluated] == sorted(c.first for c in outcome.evaluated)
    assert joined(c.tokens for c in outcome.evaluated) == tokens
    nll = joined(c.nll for c in outcome.evaluated)
    assert len(nll) == len(tokens) - 1
    assert len(outcome.evaluated) > 2
    for n in range(1, len(tokens)):
        single = harness.add_job(harness.intake.evaluation(Evaluate(request_id=f"e{n}", tokens=tokens[: n + 1], top=4, ids=ids[: n + 1])))
        harness.run()
        assert joined(c.nll for c in single.evaluated)[n - 1] == nll[n - 1]
    top = joined(c.top_ids for c in outcome.evaluated)
    values = joined(c.top_logprobs for c in outcome.evaluated)
    wanted = joined(c.logprobs for c in outcome.evaluated)
    assert all(len(t) == 4 for t in top)
    assert all(v == sorted(v, reverse=True) for v in values)
    for i in range(len(tokens) - 1):
        if tokens[i + 1] in top[i]:
            assert values[i][top[i].index(tokens[i + 1])] == pytest.approx(-nll[i])
        assert len(wanted[i]) == 2
    assert other.answer == oracle.answer([BOS, 97], Sampling(seed=1), 5)
    assert outcome.finished is not None
    assert outcome.finished.prompt_tokens == len(tokens)


def test_shift_takes_the_middle_out_and_goes_on() -> None:
    harness = Harness(FakeModel(eog_bias=-100), n_blocks=32)
    outcome = harness.ask([BOS, *range(97, 107)], num_ctx=32, max_tokens=100, overflow="shift")
    harness.run()
    assert outcome.finished is not None
    assert outcome.finished.completion_tokens == 100
    assert outcome.finished.reason == "length"
    assert outcome.finished.dropped_tokens + len(outcome.finished.context) == 111
    assert outcome.finished.context[:4] == [BOS, 97, 98, 99]
    # Up to the first shift it is the answer without one; behind it, the model really reads the shortened sequence from its start.
    expected = oracle.answer([BOS, *range(97, 107)], Sampling(seed=1), 21, eog_bias=-100)
    text = harness.parts.tokenizer.decode(expected).decode("utf-8", "replace")
    assert outcome.text.startswith(text.rstrip("\ufffd"))
    again = Harness(FakeModel(max_batch=5, eog_bias=-100), n_blocks=9)
    same = again.ask([BOS, *range(97, 107)], num_ctx=32, max_tokens=100, overflow="shift")
    again.ask([BOS, *range(97, 107)], max_tokens=100)
    again.run()
    assert same.text == outcome.text


@settings(max_examples=8, deadline=None)
@given(
    n_blocks=st.integers(14, 60),
    max_batch=st.integers(8, 64),
    others=st.integers(0, 3),
    num_ctx=st.integers(70, 200),
    seed=st.integers(0, 9),
)
def test_sinks_are_a_shift_without_a_pause(n_blocks: int, max_batch: int, others: int, num_ctx: int, seed: int) -> None:
    """The text of `shift`, whatever room there is for reading ahead, whoever else is there."""
    texts = []
    for overflow in ("shift", "sinks"):
        harness = Harness(FakeModel(max_batch=max_batch, eog_bias=-100), n_blocks)
        outcome = harness.ask([BOS, *range(97, 107)], num_ctx=num_ctx, max_tokens=300, overflow=overflow, seed=seed)
        for i in range(others if overflow == "sinks" else 0):
            harness.ask([BOS, 65 + i], max_tokens=40 * i)
        harness.run()
        assert outcome.finished is not None
        assert outcome.finished.dropped_tokens > 0
        texts.append((outcome.text, outcome.finished.context, outcome.finished.dropped_tokens))
    assert texts[0] == texts[1]


def test_sinks_cost_the_same_at_every_token() -> None:
    """Over many contexts: no pause at a shift, about one row more for each token, as many blocks as one context and a half."""
    clock = FakeClock()
    model = FakeModel(clock=clock, cost=lambda rows, attended: 0.04 + 0.004 * rows, eog_bias=-100, max_batch=256, n_ctx_train=512)
    worst, rows = {}, {}
    for overflow in ("shift", "sinks"):
        model = FakeModel(clock=clock, cost=lambda rows, attended: 0.04 + 0.004 * rows, eog_bias=-100, max_batch=256, n_ctx_train=512)
        harness = Harness(model, 60, clock=clock)
        harness.ask([BOS, *range(97, 107)], max_tokens=3000, overflow=overflow, draft_num_predict=0)
        gaps, most = [], 0
        while harness.engine.has_work:
            began = clock()
            harness.step()
            gaps.append(clock() - began)
            most = max(most, harness.engine.cache.pool.n_held)
        worst[overflow], rows[overflow] = max(gaps[1:]), model.rows
        assert most <= 32 + 18
    assert worst["shift"] > 1.0
    assert worst["sinks"] < 0.2
    assert rows["sinks"] < 2.1 * 3000


def test_a_request_that_ends_takes_what_was_read_ahead_with_it() -> None:
    harness = Harness(FakeModel(eog_bias=-100, max_batch=8), 60)
    harness.ask([BOS, *range(97, 107)], num_ctx=200, max_tokens=500, overflow="sinks")
    for _ in range(500):
        harness.step()
        if len(harness.engine._jobs) == 2:
            break
    assert len(harness.engine._jobs) == 2
    harness.engine.cancel("request 1")
    assert harness.engine._jobs == {}
    assert harness.engine.scheduler.sequences == []
    harness.run()


# ---- what is told about it -----------------------------------------------------------------------------------------------------


def test_a_near_miss_is_explained() -> None:
    """A long prompt that was not reused for one early difference: where, and what stood there."""
    harness = Harness(FakeModel(max_batch=256), n_blocks=128)
    first = harness.ask("on Monday " + "hello world " * 150, max_tokens=2)
    harness.run()
    second = harness.ask("on Sunday " + "hello world " * 150, max_tokens=2)
    harness.run()
    assert first.started is not None
    assert second.started is not None
    assert first.started.near_miss == ""
    note = second.started.near_miss
    assert note.startswith("4 tokens agree with a cached prompt, then this one says Sunday hello")
    assert "where that one says Monday hello" in note
    assert f"{second.started.prompt_tokens - 4} tokens are read again" in note
    assert harness.engine.inspected("i").near_misses == [note]


def test_hits_and_short_prompts_are_no_near_misses() -> None:
    harness = Harness(FakeModel(max_batch=256), n_blocks=128)
    long = "hello world " * 150
    for prompt in (long, long + "and more", "short one", "short two"):
        outcome = harness.ask(prompt, max_tokens=2)
        harness.run()
        assert outcome.started is not None
        assert outcome.started.near_miss == ""


def test_inspection_counts_what_happened() -> None:
    clock = FakeClock()
    harness = Harness(FakeModel(clock=clock, cost=lambda rows, attended: 0.5, eog_bias=-100), n_blocks=10, clock=clock, max_running=2)
    for i in range(3):
        harness.ask([BOS, 97 + i], max_tokens=70)
    harness.step()
    now = harness.engine.inspected("i")
    assert (now.running, now.waiting, now.kv_blocks, now.kv_blocks_held) == (2, 1, 10, 2)
    harness.run()
    later = harness.engine.inspected("i")
    assert (later.running, later.waiting, later.kv_blocks_held) == (0, 0, 0)
    assert later.kv_blocks_cached > 0
    assert later.evicted_blocks > 0
    assert later.passes == harness.model.passes
    assert later.rows == harness.model.rows
    assert later.busy_s == pytest.approx(0.5 * later.passes)


def test_a_deadline_ends_what_is_late_wherever_it_is() -> None:
    clock = FakeClock()
    harness = Harness(FakeModel(clock=clock, cost=lambda rows, attended: 1.0, eog_bias=-100), clock=clock, max_running=1)
    running = harness.ask([BOS, 97], max_tokens=100, deadline_s=5.5)
    queued = harness.ask([BOS, 98], max_tokens=100, deadline_s=3.5)
    in_time = harness.ask([BOS, 99], max_tokens=3, deadline_s=50)
    harness.run()
    for outcome, seconds in ((running, "5.5"), (queued, "3.5")):
        assert outcome.failed is not None
        assert outcome.failed.code == "deadline_exceeded"
        assert seconds in outcome.failed.message
    assert len(running.text) > 0
    assert queued.started is None
    assert in_time.finished is not None
    assert in_time.finished.completion_tokens == 3


def test_score_is_the_sum_of_the_answer_s_logprobs() -> None:
    harness = Harness(FakeModel(eog_bias=-100))
    scored = harness.ask("hello", max_tokens=6, score=True)
    told = harness.ask("hello", max_tokens=6, logprobs=0)
    neither = harness.ask("hello", max_tokens=6)
    harness.run()
    items = [item for piece in told.pieces for item in piece.logprobs]
    assert scored.finished is not None
    assert neither.finished is not None
    assert scored.finished.logprob == pytest.approx(sum(item.logprob for item in items))
    assert not any(piece.logprobs for piece in scored.pieces)
    assert neither.finished.logprob == 0.0
