"""What localrun adds to the dialects: the best of several answers, budgets of thinking and of time, and how an engine stands."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import fakes
from tests.daemon import serving
from tests.daemon.serving import Daemon

HI: Any = [{"role": "user", "content": "hi"}]
LONG_THOUGHT = "<think>" + "round and round, " * 40


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model says something else for every seed."""
    with serving.daemon(tmp_path_factory.mktemp("noisy"), functools.partial(fakes.load_fake, eog_bias=6.0)) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    hook = functools.partial(fakes.load_scripted, reply=LONG_THOUGHT, template=fakes.THINKING_TEMPLATE)
    with serving.daemon(tmp_path_factory.mktemp("thinking"), hook) as running:
        running.add_model("thinker", serving.tiny_gguf(fakes.THINKING_TEMPLATE))
        yield running


def likelihood(choice: Any) -> float:
    """Per token, the end of the turn left out, of which no log-probability is sent."""
    return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))


def test_the_best_of_several(noisy: Daemon) -> None:
    with openai.OpenAI(base_url=f"{noisy.url}/v1", api_key="x", max_retries=0) as client:
        asked: Any = {"model": "tiny", "prompt": ["a", "b"], "seed": 5, "max_tokens": 6, "logprobs": 0}
        asked["extra_body"] = {"options": {"ignore_eos": True}}
        everything = client.completions.create(**asked, n=5)
        best = client.completions.create(**asked, best_of=5, n=2)
    assert len(everything.choices) == 10 and [choice.index for choice in best.choices] == [0, 1, 2, 3]
    for prompt in (0, 1):
        group = sorted(everything.choices[5 * prompt : 5 * prompt + 5], key=likelihood, reverse=True)
        assert [choice.text for choice in best.choices[2 * prompt : 2 * prompt + 2]] == [choice.text for choice in group[:2]]
    assert best.usage is not None and everything.usage is not None
    assert best.usage.model_dump(exclude={"prompt_tokens_details"}) == everything.usage.model_dump(exclude={"prompt_tokens_details"})


@pytest.mark.parametrize("more", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}])
def test_best_of_what_cannot_be(noisy: Daemon, more: dict[str, Any]) -> None:
    refused = noisy.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", **more})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_every_answer_says_its_seed(noisy: Daemon) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4, "n": 2}
    drawn = noisy.http.post("/v1/chat/completions", json=body).json()
    seeds = [choice["seed"] for choice in drawn["choices"]]
    again = [noisy.http.post("/v1/chat/completions", json={**body, "n": 1, "seed": seed}).json()["choices"][0] for seed in seeds]
    assert [one["message"] for one in again] == [choice["message"] for choice in drawn["choices"]]
    for path, more in (("/api/chat", {"stream": False}), ("/v1/responses", {"input": "hi"}), ("/v1/messages", {"max_tokens": 4})):
        asked = {"model": "tiny", **({"messages": HI} if "input" not in more else {}), **more}
        assert isinstance(noisy.http.post(path, json=asked).json()["seed"], int)


def _openai(reply: Any) -> Any:
    return reply["usage"]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize(
    ("path", "more", "usage"),
    [
        ("/api/chat", {"stream": False, "thinking_budget": 5}, lambda reply: reply["thinking_eval_count"]),
        ("/v1/chat/completions", {"thinking_budget": 5}, _openai),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 5}}, _openai),
        ("/v1/responses", {"reasoning": {"max_tokens": 5}}, lambda reply: reply["usage"]["output_tokens_details"]["reasoning_tokens"]),
        ("/v1/messages", {"max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 5}}, None),
    ],
)
def test_a_budget_of_thinking(thinking: Daemon, path: str, more: dict[str, Any], usage: Any) -> None:
    body: dict[str, Any] = {"model": "thinker", "messages": HI, "options": {"num_predict": 60}, **more}
    if path == "/v1/responses":
        body["input"] = body.pop("messages")
    reply = thinking.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert '"round"' in reply.text and "round and" not in reply.text.partition("round")[2][:5]
    if usage is not None:
        assert usage(reply.json()) == 1 + 5 + len("\n</think>")


def test_a_budget_of_time(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, serving.saying("word " * 1000, delay=0.02)) as running:
        for path, kind in (("/api/chat", "error"), ("/v1/chat/completions", "error")):
            late = running.http.post(path, json={"model": "tiny", "messages": HI, "stream": False, "timeout": 0.2})
            assert late.status_code == 504 and "deadline of 0.2 s" in str(late.json()[kind])
        for seconds in (0.2, 2, 20):
            reply = running.http.post("/api/chat", json={"model": "tiny", "messages": HI, "timeout": seconds})
            if reply.status_code != 504:  # which it is when not even one token has come in time, on a busy machine
                break
        assert reply.status_code == 200
        assert f"deadline of {seconds} s" in json.loads(reply.text.splitlines()[-1])["error"]
        assert running.loaded()[0]["engine"]["running"] == 0


def test_ps_says_what_is_reserved_and_what_is_used(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        running.http.post("/api/generate", json={"model": "tiny"})
        (fresh,) = running.loaded()
        assert fresh["kv_bytes_in_use"] == 0 and fresh["size"] == fresh["weight_bytes"] and fresh["kv_bytes"] > 0
        running.http.post("/api/generate", json={"model": "tiny", "prompt": "x" * 200, "stream": False, "options": {"num_predict": 9}})
        (used,) = running.loaded()
        tokens = used["engine"]["kv_tokens_cached"]
        assert tokens >= 200 and used["engine"]["kv_tokens_held"] == 0
        assert used["kv_bytes_in_use"] == used["kv_bytes"] // used["kv_tokens"] * tokens
        assert used["size"] == used["weight_bytes"] + used["kv_bytes_in_use"] < used["weight_bytes"] + used["kv_bytes"]
        assert used["engine"]["passes"] > 0 and used["engine"]["near_misses"] == []


def test_a_near_miss_is_told(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        text = "abcdefghij " * 60
        first, second = "today is Monday " + text, "today is Sunday " + text
        asked = {"model": "tiny", "raw": True, "stream": False, "options": {"num_predict": 2}}
        running.http.post("/api/generate", json={**asked, "prompt": first})
        reply = running.http.post("/api/generate", json={**asked, "prompt": second}).json()
        assert "tokens are read again" in reply["near_miss"] and "Sun" in reply["near_miss"]
        assert running.loaded()[0]["engine"]["near_misses"] == [reply["near_miss"]]


def test_prompts_are_logged_only_where_that_is_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    body = {"model": "tiny", "prompt": "a secret\nof mine", "stream": False}
    for asked in (False, True):
        caplog.clear()
        with serving.daemon(tmp_path / str(asked), log_requests=asked) as running:
            assert running.http.post("/api/generate", json=body).status_code == 200
        assert ("secret" in caplog.text) == asked
        lines = [record.getMessage() for record in caplog.records if record.name == "localrun.requests"]
        assert all("\n" not in line for line in lines) and any("completion_tokens=" in line for line in lines)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/detokenize", {"tokens": [2**64]}),
        ("/api/generate", {"prompt": "x", "context": [-(2**70)]}),
        ("/api/chat", {"messages": HI, "priority": 2**80}),
        ("/v1/completions", {"prompt": [2**65]}),
        ("/v1/embeddings", {"input": [[2**65]]}),
    ],
)
def test_numbers_beyond_all_bounds_are_refused_and_harm_nobody(noisy: Daemon, path: str, body: dict[str, Any]) -> None:
    refused = noisy.http.post(path, json={"model": "tiny", **body})
    assert refused.status_code == 400, refused.text
    assert noisy.http.post("/api/tokenize", json={"model": "tiny", "content": "x"}).status_code == 200


def test_vectors_come_from_the_engine(noisy: Daemon) -> None:
    texts = ["one", "another one"]
    several = noisy.http.post("/api/embed", json={"model": "tiny", "input": texts}).json()
    alone = [noisy.http.post("/api/embed", json={"model": "tiny", "input": text}).json() for text in texts]
    assert several["embeddings"] == [one["embeddings"][0] for one in alone]
    assert several["prompt_eval_count"] == sum(one["prompt_eval_count"] for one in alone) > 0
    assert sum(value * value for value in several["embeddings"][0]) == pytest.approx(1, rel=1e-5)
    tokens = noisy.http.post("/api/tokenize", json={"model": "tiny", "content": "one"}).json()["tokens"]
    as_tokens = noisy.http.post("/v1/embeddings", json={"model": "tiny", "input": tokens}).json()
    assert as_tokens["data"][0]["embedding"] == several["embeddings"][0]
