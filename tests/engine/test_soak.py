"""Hundreds of mixed requests, cancelled at random: nothing is lost, nothing is left behind."""

from __future__ import annotations

import json
import random
from typing import Any

from localrun.errors import Busy
from localrun.messages import Evaluate, Generate
from tests.engine.harness import Harness
from tests.fakes import BOS, FakeClock, FakeModel

LETTERS = dict.fromkeys(range(97, 101), 20.0)


def some_options(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {},
            {"temperature": 0.0},
            {"logit_bias": LETTERS},
            {"logit_bias": LETTERS, "banned_strings": ["aab"]},
            {"logprobs": 3},
            {"stop": ["e", "\n"]},
            {"format": {"regex": "[abc]{1,30}"}},
            {"format": "json", "logit_bias": {34: 9.0, 125: 9.0, 92: -20.0}},
            {"repeat_penalty": 1.2, "dry_multiplier": 0.5},
            {"mirostat": 2},
            {"overflow": "shift", "num_ctx": 48, "max_tokens": 120},
            {"overflow": "sinks", "num_ctx": 96, "max_tokens": 200},
            {"max_tokens": 0},
            {"priority": rng.randint(-1, 2)},
            {"draft_num_predict": 0},
            {"deadline_s": 0.5},
        ]
    )


def test_five_hundred_mixed_requests() -> None:
    rng = random.Random(4)
    clock = FakeClock()
    model = FakeModel(clock=clock, cost=lambda rows, attended: 0.01 + 0.001 * rows + 1e-6 * attended, max_batch=48)
    harness = Harness(model, n_blocks=60, clock=clock, max_running=12, max_waiting=8)
    shared = [[BOS, *(rng.randint(97, 122) for _ in range(rng.randint(5, 120)))] for _ in range(6)]
    asked = refused = 0
    cancelled = set()
    while asked - refused < 500:
        for _ in range(rng.choice([0] * 18 + [1, 1, 1, 3, 20])):
            asked += 1
            prompt = rng.choice(shared)[: rng.randint(1, 120)] + [rng.randint(97, 122) for _ in range(rng.randint(0, 20))]
            request_id = f"r{asked}"
            try:
                if rng.random() < 0.05:
                    harness.add_job(harness.intake.evaluation(Evaluate(request_id=request_id, tokens=prompt)))
                elif rng.random() < 0.05:
                    n, most = rng.randint(2, 6), rng.randint(1, 20)
                    request = Generate(request_id=request_id, prompt_tokens=prompt, num_beams=n, max_tokens=most)
                    harness.add_search(harness.intake.search(request))
                else:
                    fields = {"max_tokens": rng.randint(1, 80), "seed": rng.randint(0, 9), **some_options(rng)}
                    harness.ask(prompt, request_id=request_id, **fields)
            except Busy:
                refused += 1
                del harness.outcomes[request_id]
        open_ids = [i for i, o in harness.outcomes.items() if not o.ended]
        if open_ids and rng.random() < 0.1:
            cancelled.add(victim := rng.choice(open_ids))
            harness.engine.cancel(victim)
        harness.engine.step()
        if rng.random() < 0.1:
            harness.engine.check()
    harness.run()

    assert refused > 0
    ends = {"failed": 0, "stop": 0, "length": 0, "cancelled": 0}
    for request_id, outcome in harness.outcomes.items():
        if outcome.failed is not None:
            assert outcome.failed.code in ("deadline_exceeded", "internal_error"), outcome.failed
            assert outcome.failed.code == "deadline_exceeded" or "no token is allowed" in outcome.failed.message
            ends["failed"] += 1
        else:
            assert outcome.finished is not None
            assert (outcome.finished.reason == "cancelled") == (request_id in cancelled)
            ends[outcome.finished.reason] += 1
    assert sum(ends.values()) == asked - refused
    assert min(ends.values()) > 0, ends
    assert harness.engine.inspected("i").preemptions > 0
    assert harness.engine.inspected("i").evicted_blocks > 0

    engine = harness.engine
    assert (engine._jobs, engine._reported, engine.scheduler.sequences) == ({}, set(), [])
    engine.cache.tree.clear()
    engine.check()
    assert engine.cache.pool.n_free == 60
    assert len(engine.cache.tree) == 0


def test_finished_json_always_parses() -> None:
    harness = Harness(FakeModel(max_batch=64), n_blocks=200)
    bias = {34: 9.0, 125: 9.0, 92: -20.0}
    outcomes = [harness.ask("x", seed=i, format="json", logit_bias=bias, max_tokens=400) for i in range(40)]
    harness.run()
    for outcome in outcomes:
        assert outcome.finished is not None
        if outcome.finished.reason == "stop":
            assert isinstance(json.loads(outcome.text), dict)
    assert sum(o.finished is not None and o.finished.reason == "stop" for o in outcomes) > 30
