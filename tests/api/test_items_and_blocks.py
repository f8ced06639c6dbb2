"""Golden tests of the two dialects that speak in items and blocks: /v1/responses and /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.api import anthropic, responses
from localrun.api.answer import Answer
from localrun.api.anthropic_schema import CountTokensBody, MessagesBody
from localrun.api.fields import parse
from localrun.api.options import ModelDefaults
from localrun.api.responses_schema import ResponsesBody
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.messages import Generate, Message, Piece, Sampling, ToolCall
from tests.api.test_dialects import ABLE, CALL, LOGPROBS, PLAIN, outcome


def messages(model: ModelDefaults = PLAIN, **body: Any) -> Generate:
    sent = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}
    read = parse(MessagesBody, json.dumps(sent).encode())
    anthropic.check(read)
    return anthropic.messages_request(read, model, "r")


def response(model: ModelDefaults = PLAIN, **body: Any) -> Generate:
    return responses.response_request(parse(ResponsesBody, json.dumps({"model": "m", "input": "hi", **body}).encode()), model, "r")


# ---- /v1/messages -------------------------------------------------------------------------------------------------------------


def test_messages_plain() -> None:
    assert messages() == Generate(
        request_id="r", messages=[Message(role="user", content="hi")], sampling=Sampling(temperature=1.0, top_p=1.0), max_tokens=9
    )


def test_messages_with_everything() -> None:
    found = messages(
        ABLE,
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}, {"type": "tool_use", "id": "d", "name": "g", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "42"},
                {"type": "tool_result", "tool_use_id": "d", "is_error": True, "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "so?"},
            ]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}], tool_choice={"type": "auto"},
        thinking={"type": "enabled", "budget_tokens": 1024}, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=4, seed=3, num_ctx=50,
        overflow="shift", output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    assert found == Generate(
        request_id="r",
        messages=[
            Message(role="system", content="a\n\nb"),
            Message(role="user", content="q!"),
            Message(
                role="assistant",
                content="I look.",
                thinking="hm",
                tool_calls=[ToolCall(id="c", name="f", arguments={"x": 1}), ToolCall(id="d", name="g", arguments={})],
            ),
            Message(role="tool", content="42", tool_name="f", tool_call_id="c"),
            Message(role="tool", content="Error: no", tool_name="g", tool_call_id="d"),
            Message(role="user", content="so?"),
        ],
        tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
        think=True,
        thinking_budget=1024,
        format={"type": "object"},
        stop=["x"],
        max_tokens=9,
        num_ctx=50,
        overflow="shift",
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=3),
    )


@pytest.mark.parametrize(
    ("body", "think"),
    [
        ({}, None), ({"thinking": {"type": "disabled"}}, False), ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, "max"), ({"output_config": {"effort": "low"}}, "low"),
    ],
)  # fmt: skip
def test_messages_thinking(body: dict[str, Any], think: Any) -> None:
    assert messages(ABLE, **body).think == think
    assert messages(PLAIN, **body).think is None  # a model that does not think is not asked to


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ({"max_tokens": 0}, BadRequest, "max_tokens is required and must be positive"),
        ({"temperature": 1.5}, BadRequest, "temperature: should be less than or equal to 1"),
        ({"tools": [{"name": "f", "type": "bash_20250124"}]}, Unsupported, 'tools of type "bash_20250124" are not supported'),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, Unsupported, '"document" content is not supported'),
        ({"messages": [{"role": "other", "content": "x"}]}, BadRequest, "messages[0].role: should be"),
        ({"output_format": {"type": "text"}}, BadRequest, "output_config.format must be"),
        ({"container": "x"}, Unsupported, '"container" is not supported'),
    ],
)
def test_messages_refuse(body: dict[str, Any], error: type[LocalrunError], text: str) -> None:
    with pytest.raises(error) as caught:
        messages(ABLE, **body)
    assert str(caught.value).startswith(text)


def test_count_tokens_takes_the_same_prompt() -> None:
    sent = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "system": "s"}
    counted = anthropic.count_request(parse(CountTokensBody, json.dumps(sent).encode()), PLAIN, "r")
    assert counted.messages == messages(system="s").messages


USAGE = {"input_tokens": 6, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0}


def test_messages_objects() -> None:
    reply = anthropic.MessageReply("m", request_id="req", id="msg_1")
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
    assert reply.opening(outcome().started) == [
        {
            "type": "message_start",
            "message": {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**USAGE, "output_tokens": 0}},
        },
        {"type": "ping"},
    ]
    assert reply.chunks(0, Piece(request_id="r", text="", thinking="hm")) == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    ]
    assert reply.chunks(0, Piece(request_id="r", text="a")) == [
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "a"}},
    ]
    assert reply.chunks(0, Piece(request_id="r", text="b", tool_calls=[CALL])) == [
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"x": "é"}'}},
        {"type": "content_block_stop", "index": 2},
    ]
    assert reply.closing(0, outcome(called=True)) == [
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {**USAGE, "output_tokens": 3},
            "seed": 9,
        }
    ]
    assert reply.ending([outcome()]) == [{"type": "message_stop"}]
    assert reply.failing(LocalrunError("broken")) == [
        {"type": "error", "error": {"type": "api_error", "message": "broken"}, "request_id": "req"}
    ]
    answer = Answer(text=["a", "b"], thinking=["hm"], tool_calls=[CALL, ToolCall(id="d", name="g", arguments="{bro")])
    assert anthropic.MessageReply("m", id="msg_1").whole([answer], [outcome("length")]) == {
        **head,
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "ab"},
            {"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": "é"}},
            {"type": "tool_use", "id": "d", "name": "g", "input": {"arguments": "{bro"}},
        ],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {**USAGE, "output_tokens": 3},
        "seed": 9,
    }


# ---- /v1/responses ------------------------------------------------------------------------------------------------------------


def test_responses_plain() -> None:
    assert response() == Generate(
        request_id="r", messages=[Message(role="user", content="hi")], sampling=Sampling(temperature=1.0, top_p=1.0)
    )
    assert response(truncation="auto").overflow == "truncate_oldest"
    assert response(truncation="auto", overflow="error").overflow == "error"
    model = ModelDefaults(name="m", system="s")
    assert [one.content for one in response(model).messages or []] == ["s", "hi"]
    assert [one.content for one in response(model, instructions="t").messages or []] == ["t", "hi"]


def test_responses_read_items() -> None:
    found = response(
        ABLE,
        input=[
            {"role": "developer", "content": "d"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "msg", "status": "completed",
             "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "d", "name": "g", "arguments": "{bro"},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
            {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "no"}]},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        reasoning={"effort": "xhigh", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        max_output_tokens=7, temperature=0.5, top_p=0.5, seed=1, top_k=2, min_p=0.1, num_ctx=30, top_logprobs=2,
    )  # fmt: skip
    assert found == Generate(
        request_id="r",
        messages=[
            Message(role="system", content="d"),
            Message(role="user", content="q"),
            Message(
                role="assistant",
                content="I look.",
                thinking="hm",
                tool_calls=[ToolCall(id="c", name="f", arguments={"x": 1}), ToolCall(id="d", name="g", arguments="{bro")],
            ),
            Message(role="tool", content="42", tool_name="f", tool_call_id="c"),
            Message(role="tool", content="no", tool_name="g", tool_call_id="d"),
        ],
        tools=[{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}],
        think="max",
        format={"type": "object"},
        max_tokens=7,
        num_ctx=30,
        logprobs=2,
        sampling=Sampling(temperature=0.5, top_p=0.5, seed=1, top_k=2, min_p=0.1),
    )


def test_responses_objects_of_a_stream_with_everything() -> None:
    read = parse(ResponsesBody, b'{"model": "m", "input": "hi"}')
    reply = responses.ResponseReply(read, id="resp_1", created=5)
    events = reply.opening(outcome().started)
    for piece in (
        Piece(request_id="r", text="", thinking="h"), Piece(request_id="r", text="", thinking="m"),
        Piece(request_id="r", text="a", logprobs=LOGPROBS), Piece(request_id="r", text="b"),
        Piece(request_id="r", text="", tool_calls=[CALL]),
    ):  # fmt: skip
        events += reply.chunks(0, piece)
    end = outcome(called=True)
    events += [*reply.closing(0, end), *reply.ending([end])]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["output_index"] for event in events[2:-1]] == [0] * 7 + [1] * 7 + [2] * 4
    final = events[-1]["response"]
    thought, message, call = final["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert message["content"][0]["text"] == "ab" and len(message["content"][0]["logprobs"]) == 1
    assert (call["call_id"], call["name"], call["arguments"], call["status"]) == ("call_1", "f", '{"x":"é"}', "completed")
    assert final["usage"] == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 13,
    }  # fmt: skip
    answer = Answer(text=["a", "b"], thinking=["h", "m"], tool_calls=[CALL], logprobs=LOGPROBS)
    whole = responses.ResponseReply(read, id="resp_1", created=5).whole([answer], [end])

    def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    assert without_ids(whole["output"]) == without_ids(final["output"])
    assert {**whole, "output": []} == {**final, "output": []}


def test_responses_that_fail() -> None:
    reply = responses.ResponseReply(parse(ResponsesBody, b'{"model": "m", "input": "hi"}'))
    reply.opening(outcome().started)
    (event,) = reply.failing(LocalrunError("broken"))
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "internal_error", "message": "broken"} and event["sequence_number"] == 2
