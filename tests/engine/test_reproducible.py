"""Same prompt, options and seed: the same answer, whatever else is going on. Every request of a random schedule, with everything the engine
can do switched on at once, against the same request alone in an engine that does nothing of it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localrun.engine.sessions import SessionStore, root_key
from localrun.messages import Generate, Sampling
from tests.engine.harness import Harness, Outcome
from tests.engine.test_drafting import SmallerModel
from tests.fakes import BOS, FakeClock, FakeModel

LETTERS = {97: 30.0, 98: 30.0, 99: 30.0}
KINDS: list[dict[str, Any]] = [
    {"seed": 3},
    {"seed": 3, "temperature": 0.0},
    {"seed": 5, "temperature": 1.5, "top_k": 0, "top_p": 1.0},
    {"seed": 5, "logit_bias": LETTERS, "repeat_penalty": 1.2},
    {"seed": 7, "logit_bias": LETTERS, "banned_strings": ["aab", "cc"]},
    {"seed": 7, "mirostat": 2},
    {"seed": 9, "logit_bias": LETTERS, "format": {"regex": "[abc]{1,30}x"}},
    {"seed": 9, "logit_bias": LETTERS, "overflow": "sinks", "num_ctx": 70, "max_tokens": 150},
    {"seed": 9, "xtc_probability": 0.5, "dry_multiplier": 0.5, "logprobs": 2},
    {"num_beams": 3, "max_tokens": 8},
]
PROMPTS = [(BOS, *range(65, 65 + n)) for n in (1, 15, 16, 17, 40)]
PROMPTS += [(BOS, *range(65, 85), *(97 + i % 3 for i in range(n))) for n in (9, 33)]


def ask(harness: Harness, prompt: tuple[int, ...], kind: dict[str, Any], name: str, **extras: Any) -> Outcome:
    fields = {"max_tokens": 30, **kind, **extras}
    sampling = Sampling(**{key: fields.pop(key) for key in list(fields) if key in Sampling.__struct_fields__})
    request = Generate(request_id=name, prompt_tokens=list(prompt), sampling=sampling, **fields)
    if request.num_beams > 1:
        return harness.add_search(harness.intake.search(request))
    return harness.add(request)


@cache
def alone(prompt: tuple[int, ...], number: int, limit: int) -> tuple[str, tuple[int, ...]]:
    """Text and tokens of the request in an engine of its own, without drafts, in a pool of a size that gives it the same limit."""
    harness = Harness(FakeModel(max_batch=256), limit // 16)
    outcome = ask(harness, prompt, KINDS[number], "alone", draft_num_predict=0)
    harness.run()
    return outcome.text, tuple(outcome.tokens)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    asked=st.lists(
        st.tuples(
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, len(KINDS) - 1),
            st.integers(0, 25),
            st.integers(-1, 1),
            st.booleans(),
            st.none() | st.integers(0, 60),
        ),
        min_size=1,
        max_size=8,
    ),
    n_blocks=st.integers(12, 50),
    draft_blocks=st.integers(4, 50),
    max_batch=st.integers(6, 64),
    max_running=st.integers(4, 10),
    agreement=st.sampled_from([0.0, 0.6, 1.0]),
)
@example(  # all kinds at once with one prompt, in a pool that holds few of them
    asked=[(6, i % len(KINDS), 0, 0, True, None) for i in range(len(KINDS))],
    n_blocks=14,
    draft_blocks=10,
    max_batch=16,
    max_running=6,
    agreement=0.6,
)
def test_same_answer_whatever_else_goes_on(
    tmp_path: Path,
    asked: list[tuple[int, int, int, int, bool, int | None]],
    n_blocks: int,
    draft_blocks: int,
    max_batch: int,
    max_running: int,
    agreement: float,
) -> None:
    """Two lives of an engine over the same sessions: among others, cold and warm, chunked, preempted, speculated, restored, cancelled."""
    folder = tmp_path / str(random.random())
    for cancels in (True, False):
        clock = FakeClock()
        model = FakeModel(max_batch=max_batch, clock=clock, cost=lambda rows, attended: 0.02 + 0.001 * rows)
        draft = SmallerModel(agreement, max_batch=max_batch, clock=clock, cost=lambda rows, attended: 0.002 + 0.0001 * rows)
        sessions = SessionStore(folder, root_key("", "f16", 1024, 4096), 16, 40 * 1160)
        harness = Harness(model, n_blocks, clock=clock, draft=draft, draft_blocks=draft_blocks, sessions=sessions, max_running=max_running)
        live(harness, asked, n_blocks * 16, cancels)
        sessions.close()


def live(harness: Harness, asked: list[tuple[int, int, int, int, bool, int | None]], limit: int, cancels: bool) -> None:
    outcomes = {}

    def act(step: int) -> None:
        for i, (prompt, number, at, priority, session, until) in enumerate(asked):
            if until == step and cancels:
                harness.engine.cancel(f"request {i}")
            if at == step:
                extras = {"session": session} if not {"overflow", "num_beams"} & KINDS[number].keys() else {}
                outcomes[i] = ask(harness, PROMPTS[prompt], KINDS[number], f"request {i}", priority=priority, **extras)

    for step in range(26):
        act(step)
        harness.step()
    harness.run(between=lambda step: act(step + 26))
    for i, outcome in outcomes.items():
        assert outcome.finished is not None, outcome.failed
        text, tokens = alone(PROMPTS[asked[i][0]], asked[i][1], limit)
        if outcome.finished.reason == "cancelled":
            assert KINDS[asked[i][1]].get("num_beams") or text.startswith(outcome.text)
        else:
            assert (outcome.text, tuple(outcome.tokens)) == (text, tokens)
