"""/v1/responses and /v1/messages with the real clients, and tokenize, detokenize, count_tokens, health."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests import fakes
from tests.daemon import serving
from tests.daemon.serving import Daemon, saying


@pytest.fixture(scope="module")
def v1(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        yield client


# ---- /v1/responses ------------------------------------------------------------------------------------------------------------


def test_responses_whole(v1: openai.OpenAI) -> None:
    answer = v1.responses.create(model="tiny", input="hi", instructions="be brief", max_output_tokens=100, metadata={"a": "b"}, store=False)
    assert answer.output_text == 'You said "hi".'
    assert (answer.status, answer.object, answer.error, answer.incomplete_details) == ("completed", "response", None, None)
    assert answer.id.startswith("resp_") and answer.metadata == {"a": "b"} and answer.instructions == "be brief"
    (item,) = answer.output
    assert item.type == "message" and item.status == "completed" and item.role == "assistant"
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_responses_say_when_they_are_cut(v1: openai.OpenAI) -> None:
    answer = v1.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (answer.output_text, answer.status) == ("You", "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


def test_responses_stream(v1: openai.OpenAI) -> None:
    events = list(v1.responses.create(model="tiny", input=[{"role": "user", "content": "hi"}], stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == 'You said "hi".'
    final = events[-1]
    assert final.type == "response.completed" and final.response.output_text == 'You said "hi".' and final.response.usage is not None


def test_responses_stream_through_the_clients_own_accumulator(v1: openai.OpenAI) -> None:
    with v1.responses.stream(model="tiny", input="hi") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == 'You said "hi".'


def test_responses_logprobs(v1: openai.OpenAI) -> None:
    answer = v1.responses.create(model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs
    assert logprobs is not None and "".join(one.token for one in logprobs) == 'You said "hi".' and len(logprobs[0].top_logprobs) == 2


def test_responses_refuse_what_they_cannot_do(v1: openai.OpenAI) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"), ({"store": True}, "store"),
        ({"conversation": "c"}, "conversation"), ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"), ({"tempo": 1}, "tempo"),
    ]  # fmt: skip
    for more, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            v1.responses.create(model="tiny", input="hi", extra_body=more)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        v1.responses.create(model="none", input="hi")


def test_responses_that_break_off_say_so(tmp_path: Path) -> None:
    with (
        serving.daemon(tmp_path, serving.load_crashing) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        last = list(client.responses.create(model="tiny", input="x", stream=True))[-1]
        assert last.type == "response.failed" and last.response.error is not None
        assert "unexpectedly stopped" in last.response.error.message


# ---- /v1/messages -------------------------------------------------------------------------------------------------------------


def test_messages_whole(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="tiny", max_tokens=50, system="be brief", messages=[{"role": "user", "content": "hi"}],
        metadata={"user_id": "me"}, extra_body={"temperature": 0.5, "top_k": 3},
    )  # fmt: skip
    (block,) = answer.content
    assert block.type == "text" and block.text == 'You said "hi".'
    assert (answer.type, answer.role, answer.stop_reason, answer.stop_sequence) == ("message", "assistant", "end_turn", None)
    assert answer.id.startswith("msg_") and answer.usage.output_tokens > 0
    # what was read before comes from the cache, and is told apart
    again = claude.messages.create(model="tiny", max_tokens=50, system="be brief", messages=[{"role": "user", "content": "hi"}])
    assert again.usage.cache_read_input_tokens is not None and again.usage.cache_read_input_tokens > 0
    assert (
        again.usage.input_tokens + again.usage.cache_read_input_tokens
        == claude.messages.count_tokens(model="tiny", system="be brief", messages=[{"role": "user", "content": "hi"}]).input_tokens
    )


def test_messages_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="tiny", max_tokens=50, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ) as stream:
        kinds = [event.type for event in stream if event.type not in ("text",)]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert final.content[0].type == "text" and final.content[0].text == 'You said "hi".'
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 0


def test_messages_events_have_names(daemon: Daemon) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    response = daemon.http.post("/v1/messages", json=body)
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in response.text


def test_messages_stops(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("one two three")) as running, anthropic.Anthropic(base_url=running.url, api_key="x") as client:

        def ask(**more: Any) -> tuple[str, Any, Any]:
            answer = client.messages.create(**{"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}], **more})
            return answer.content[0].text, answer.stop_reason, answer.stop_sequence

        assert ask() == ("one two three", "end_turn", None)
        assert ask(stop_sequences=["two", "three"]) == ("one ", "stop_sequence", "two")
        assert ask(max_tokens=3) == ("one", "max_tokens", None)


def test_messages_errors(claude: anthropic.Anthropic, daemon: Daemon) -> None:
    hi: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="none", max_tokens=5, messages=hi)
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["error"] == {"type": "not_found_error", "message": "model 'none' not found"}
    assert missing.value.body["type"] == "error" and missing.value.body["request_id"].startswith("req-")
    for body, text in (
        ({"max_tokens": 5, "messages": hi}, "model is required"),
        ({"model": "tiny", "messages": hi}, "max_tokens is required and must be positive"),
        ({"model": "tiny", "max_tokens": 5}, "messages is required"),
        (
            {"model": "tiny", "max_tokens": 5, "messages": hi, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            '"tiny" does not support thinking',
        ),
        ({"model": "tiny", "max_tokens": 5, "messages": hi, "tools": [{"name": "f", "input_schema": {}}]}, "tiny does not support tools"),
        ({"model": "tiny", "max_tokens": 5, "messages": hi, "mcp_servers": [{}]}, '"mcp_servers" is not supported'),
        (
            {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            '"source" is not supported',
        ),
    ):
        response = daemon.http.post("/v1/messages", json=body)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["error"]["message"].startswith(text)
    assert daemon.http.get("/v1/messages").json()["type"] == "error"


def test_messages_that_break_off_end_with_an_error_event(tmp_path: Path) -> None:
    with (
        serving.daemon(tmp_path, serving.load_crashing) as running,
        anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="unexpectedly stopped"),
    ):
        list(client.messages.create(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "x"}], stream=True))


# ---- tokens -------------------------------------------------------------------------------------------------------------------


def test_tokenize_and_back(daemon: Daemon) -> None:
    def tokens(**more: Any) -> list[int]:
        answer = daemon.http.post("/api/tokenize", json={"model": "tiny", "content": "héllo <|end|>", **more}).json()
        assert answer["model"] == "tiny" and answer["count"] == len(answer["tokens"])
        found: list[int] = answer["tokens"]
        return found

    full = tokens()
    assert full[0] == fakes.BOS and fakes.END in full
    assert tokens(add_special=False) == full[1:]
    plain = tokens(add_special=False, parse_special=False)
    assert fakes.END not in plain
    assert daemon.http.post("/api/detokenize", json={"model": "tiny", "tokens": plain}).json()["content"] == "héllo <|end|>"
    bad = daemon.http.post("/api/detokenize", json={"model": "tiny", "tokens": [10**6]})
    assert bad.status_code == 400 and "1000000" in bad.json()["error"]
    assert daemon.http.post("/api/tokenize", json={"model": "tiny"}).json() == {"error": "content is required"}
    assert daemon.http.post("/api/tokenize", json={"model": "none", "content": ""}).status_code == 404


def test_health(daemon: Daemon) -> None:
    assert daemon.http.get("/health").json() == {"status": "ok"}
    assert daemon.http.head("/health").status_code == 200
