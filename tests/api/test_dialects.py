"""Golden tests: bodies to requests, events to objects, in both dialects. What the wire looks like is written out here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.api import ollama, openai
from localrun.api.answer import Answer, Outcome
from localrun.api.fields import parse
from localrun.api.openai_schema import ChatCompletionBody, CompletionBody
from localrun.api.options import ModelDefaults
from localrun.api.schema import ChatBody, GenerateBody
from localrun.errors import BadRequest, ContextOverflow, LocalrunError, ModelNotFound, RunnerDied, Unsupported
from localrun.messages import Finished, Generate, Logprob, Message, Piece, Sampling, Started, TokenLogprob, ToolCall

PLAIN = ModelDefaults(name="m")
ABLE = ModelDefaults(name="m", capabilities=frozenset({"completion", "tools", "thinking", "insert"}))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TIME = "2026-01-02T03:04:05.000006Z"


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama, "now", lambda: TIME)


def generate(model: ModelDefaults = PLAIN, **body: Any) -> Generate:
    read = parse(GenerateBody, json.dumps({"model": "m", **body}).encode())
    ollama.check_generate(read)
    return ollama.generate_request(read, model, "r")


def chat(model: ModelDefaults = PLAIN, **body: Any) -> Generate:
    read = parse(ChatBody, json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}).encode())
    ollama.check_chat(read)
    return ollama.chat_request(read, model, "r")


def v1_chat(model: ModelDefaults = PLAIN, **body: Any) -> list[Generate]:
    read = parse(ChatCompletionBody, json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}).encode())
    return openai.chat_requests(read, model, "r")


def v1_completion(model: ModelDefaults = PLAIN, **body: Any) -> list[Generate]:
    return openai.completion_requests(parse(CompletionBody, json.dumps({"model": "m", "prompt": "p", **body}).encode()), model, "r")


# ---- requests -----------------------------------------------------------------------------------------------------------------


def test_generate_plain() -> None:
    assert generate(prompt="p") == Generate(request_id="r", prompt="p", overflow="truncate_oldest")


def test_generate_with_everything() -> None:
    found = generate(
        ABLE,
        prompt="p",
        system="s",
        template="{{ t }}",
        context=[1, 2],
        format={"type": "object"},
        think="low",
        logprobs=True,
        top_logprobs=3,
        priority=2,
        overflow="shift",
        options={
            "temperature": 0,
            "top_k": 1,
            "top_p": 0.5,
            "min_p": 0.1,
            "typical_p": 0.9,
            "repeat_penalty": 1.2,
            "repeat_last_n": 8,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "seed": 7,
            "stop": ["x"],
            "num_predict": 9,
            "num_ctx": 100,
        },
    )
    assert found == Generate(
        request_id="r",
        prompt="p",
        system="s",
        template="{{ t }}",
        context=[1, 2],
        format={"type": "object"},
        think="low",
        logprobs=3,
        priority=2,
        overflow="shift",
        stop=["x"],
        max_tokens=9,
        num_ctx=100,
        sampling=Sampling(
            temperature=0.0,
            top_k=1,
            top_p=0.5,
            min_p=0.1,
            typical_p=0.9,
            repeat_penalty=1.2,
            repeat_last_n=8,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            seed=7,
        ),
    )


def test_generate_raw_takes_nothing_of_the_model_but_its_parameters() -> None:
    model = ModelDefaults(name="m", system="s", messages=(Message(role="user", content="a"),), params={"num_predict": 3})
    assert generate(model, prompt="p", raw=True) == Generate(request_id="r", prompt="p", raw=True, max_tokens=3, overflow="truncate_oldest")


def test_generate_goes_on_from_a_context_without_the_models_messages() -> None:
    model = ModelDefaults(name="m", system="s", messages=(Message(role="user", content="a"),))
    assert generate(model, prompt="p", context=[5]) == Generate(
        request_id="r", prompt="p", system="s", context=[5], overflow="truncate_oldest"
    )


@pytest.mark.parametrize(
    ("body", "overflow"),
    [
        ({}, "truncate_oldest"),
        ({"truncate": True}, "truncate_oldest"),
        ({"truncate": False}, "error"),
        ({"shift": False}, "truncate_oldest"),
        ({"shift": True}, "shift"),
        ({"truncate": False, "shift": True}, "error"),
        ({"overflow": "error", "shift": True}, "error"),
        ({"overflow": "truncate_oldest", "truncate": False}, "truncate_oldest"),
    ],
)
def test_overflow(body: dict[str, Any], overflow: str) -> None:
    assert chat(**body).overflow == overflow


def test_chat_reads_history() -> None:
    history = [
        {"role": "System", "content": "s"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}],
        },
        {"role": "tool", "content": "42", "tool_name": "f", "tool_call_id": "c"},
    ]
    found = chat(ABLE, messages=history, tools=[TOOL])
    assert found.messages == [
        Message(role="system", content="s"),
        Message(role="user", content="q"),
        Message(role="assistant", thinking="hm", tool_calls=[ToolCall(id="c", name="f", arguments={"b": 1, "a": 2})]),
        Message(role="tool", content="42", tool_name="f", tool_call_id="c"),
    ]
    assert list(found.messages[2].tool_calls[0].arguments) == ["b", "a"]  # type: ignore[index]
    assert found.tools == [TOOL]


def test_v1_chat_defaults() -> None:
    (found,) = v1_chat()
    assert found == Generate(
        request_id="r-0", messages=[Message(role="user", content="hi")], sampling=Sampling(temperature=1.0, top_p=1.0), overflow="error"
    )
    model = ModelDefaults(name="m", params={"temperature": 0.2}, system="s")
    (found,) = v1_chat(model)
    assert found.sampling.temperature == 0.2 and found.messages is not None and found.messages[0] == Message(role="system", content="s")
    assert v1_chat(model, temperature=0.7)[0].sampling.temperature == 0.7


def test_v1_chat_with_everything() -> None:
    first, second = v1_chat(
        ABLE,
        n=2,
        max_tokens=5,
        max_completion_tokens=6,
        seed=3,
        stop="x",
        temperature=0.5,
        top_p=0.6,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        logit_bias={"7": -100, "8": 1.5},
        top_k=4,
        min_p=0.3,
        typical_p=0.4,
        repeat_penalty=1.1,
        repeat_last_n=5,
        num_ctx=50,
        overflow="shift",
        priority=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
        tools=[TOOL],
        tool_choice="auto",
        reasoning_effort="minimal",
        logprobs=True,
        top_logprobs=4,
        chat_template_kwargs={"a": 1},
    )
    sampling = Sampling(
        temperature=0.5,
        top_p=0.6,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        top_k=4,
        min_p=0.3,
        typical_p=0.4,
        repeat_penalty=1.1,
        repeat_last_n=5,
        seed=3,
        logit_bias={7: -100.0, 8: 1.5},
    )
    assert first == Generate(
        request_id="r-0",
        messages=[Message(role="user", content="hi")],
        sampling=sampling,
        max_tokens=6,
        stop=["x"],
        num_ctx=50,
        overflow="shift",
        priority=1,
        format={"type": "object"},
        tools=[TOOL],
        think="low",
        logprobs=4,
        template_kwargs={"a": 1},
    )
    assert (second.request_id, second.sampling.seed) == ("r-1", 4)


def test_v1_messages() -> None:
    (found,) = v1_chat(
        ABLE,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                    {"id": "d", "type": "function", "function": {"name": "g", "arguments": "{broken"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "2"}]},
        ],
    )
    assert found.messages == [
        Message(role="system", content="ab"),
        Message(
            role="assistant",
            thinking="hm",
            tool_calls=[ToolCall(id="c", name="f", arguments={"x": 1}), ToolCall(id="d", name="g", arguments="{broken")],
        ),
        Message(role="tool", content="1", tool_name="f", tool_call_id="c"),
        Message(role="tool", content="2", tool_name="g", tool_call_id="d"),
    ]


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ({"messages": []}, BadRequest, "[] is too short - 'messages'"),
        ({"tools": [TOOL]}, Unsupported, "m does not support tools"),
        ({"reasoning_effort": "high"}, Unsupported, '"m" does not support thinking'),
        ({"reasoning": {"effort": "high"}}, Unsupported, '"m" does not support thinking'),
        ({"reasoning_effort": "huge"}, BadRequest, "reasoning_effort: should be"),
        ({"tool_choice": "required"}, BadRequest, "tool_choice needs tools"),
        ({"logit_bias": {"x": 1}}, BadRequest, 'logit_bias: "x" is no token id'),
        ({"logit_bias": {"1": 101}}, BadRequest, "logit_bias: 101 is not from -100 to 100"),
        ({"top_logprobs": 2}, BadRequest, "top_logprobs needs logprobs to be true"),
        ({"temperature": 2.1}, BadRequest, "temperature: should be less than or equal to 2"),
        ({"n": 0}, BadRequest, "n: should be greater than or equal to 1"),
        ({"max_tokens": -1}, BadRequest, "max_tokens: should be greater than or equal to 0"),
        ({"response_format": {"type": "json_schema"}}, BadRequest, "response_format: json_schema is required"),
        ({"thinking_budget": 5}, Unsupported, '"m" does not support thinking'),
        ({"timeout": 0}, BadRequest, "timeout: should be greater than 0"),
        ({"functions": [{}]}, Unsupported, '"functions" is not supported'),
        ({"modalities": ["text", "audio"]}, Unsupported, '"modalities" is not supported (only ["text"] is)'),
    ],
)
def test_v1_chat_refuses(body: dict[str, Any], error: type[LocalrunError], text: str) -> None:
    with pytest.raises(error) as caught:
        v1_chat(**body)
    assert str(caught.value).startswith(text)


def test_v1_completions() -> None:
    assert v1_completion() == [Generate(request_id="r-0", prompt="p", raw=True, sampling=Sampling(temperature=1.0, top_p=1.0))]
    found = v1_completion(prompt=["a", "b"], n=2, seed=1)
    assert [(one.request_id, one.prompt, one.sampling.seed) for one in found] == [
        ("r-0", "a", 1),
        ("r-1", "a", 2),
        ("r-2", "b", 1),
        ("r-3", "b", 2),
    ]
    assert [one.prompt_tokens for one in v1_completion(prompt=[[1, 2], [3]])] == [[1, 2], [3]]
    assert [one.prompt_tokens for one in v1_completion(prompt=[1, 2])] == [[1, 2]]
    with pytest.raises(BadRequest, match="too short"):
        v1_completion(prompt=[])


# ---- replies ------------------------------------------------------------------------------------------------------------------

LOGPROBS = [Logprob(id=1, token="a", bytes=[97], logprob=-0.5, top=[TokenLogprob(id=1, token="a", bytes=[97], logprob=-0.5)])]
WIRE_LOGPROBS = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]}]
CALL = ToolCall(id="call_1", name="f", arguments={"x": "é"})


def outcome(reason: Any = "stop", dropped: int = 0, called: bool = False) -> Outcome:
    started = Started(request_id="r", prompt_tokens=10, cached_tokens=4, seed=9, dropped_messages=dropped, dropped_tokens=dropped * 7)
    finished = Finished(
        request_id="r",
        reason=reason,
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=3,
        seed=9,
        queue_s=0.001,
        prefill_s=0.25,
        decode_s=0.5,
        first_token_s=0.26,
        context=[1, 2],
    )
    return Outcome(started, finished, 1.5, 0.125, called)


FINAL = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 1_500_000_000,
    "load_duration": 125_000_000,
    "prompt_eval_count": 10,
    "prompt_eval_duration": 250_000_000,
    "eval_count": 3,
    "eval_duration": 500_000_000,
    "cached_prompt_eval_count": 4,
    "queue_duration": 1_000_000,
    "first_token_duration": 260_000_000,
    "seed": 9,
}


def test_native_generate_objects() -> None:
    reply = ollama.OllamaReply("m", chat=False, with_context=True)
    head = {"model": "m", "created_at": TIME}
    assert reply.opening(outcome().started) == []
    assert reply.chunks(0, Piece(request_id="r", text="a", logprobs=LOGPROBS)) == [
        {**head, "response": "a", "logprobs": WIRE_LOGPROBS, "done": False}
    ]
    assert reply.chunks(0, Piece(request_id="r", text="", thinking="hm")) == [{**head, "response": "", "thinking": "hm", "done": False}]
    assert reply.chunks(0, Piece(request_id="r", text="")) == []
    assert reply.closing(0, outcome()) == [{**head, "response": "", **FINAL, "context": [1, 2]}]
    assert reply.ending([outcome()]) == []
    assert reply.failing(RunnerDied("dead")) == [{"error": "dead"}]


def test_native_chat_objects() -> None:
    reply = ollama.OllamaReply("m", chat=True)
    head = {"model": "m", "created_at": TIME}
    text, calls = reply.chunks(0, Piece(request_id="r", text="a", tool_calls=[CALL]))
    assert text == {**head, "message": {"role": "assistant", "content": "a"}, "done": False}
    wire_call = {"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"x": "é"}}}
    assert calls == {**head, "message": {"role": "assistant", "content": "", "tool_calls": [wire_call]}, "done": False}
    (more,) = reply.chunks(0, Piece(request_id="r", text="", tool_calls=[CALL]))
    assert more["message"]["tool_calls"][0]["function"]["index"] == 1
    assert reply.closing(0, outcome(dropped=2)) == [
        {**head, "message": {"role": "assistant", "content": ""}, **FINAL, "messages_dropped": 2, "prompt_tokens_dropped": 14}
    ]
    answer = Answer(text=["a", "b"], thinking=["h", "m"], tool_calls=[CALL], logprobs=LOGPROBS)
    assert ollama.OllamaReply("m", chat=True).whole([answer], [outcome()]) == {
        **head,
        "message": {"role": "assistant", "content": "ab", "thinking": "hm", "tool_calls": [wire_call]},
        "logprobs": WIRE_LOGPROBS,
        **FINAL,
    }


def test_v1_chat_objects() -> None:
    reply = openai.ChatReply("m", n=2, include_usage=True, id="chatcmpl-1", created=5)
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m", "system_fingerprint": "fp_localrun"}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": index, "delta": delta, "finish_reason": reason, **more}], "usage": None}

    assert reply.opening(outcome().started) == [chunk(i, {"role": "assistant", "content": ""}) for i in (0, 1)]
    assert reply.chunks(1, Piece(request_id="r", text="a", logprobs=LOGPROBS)) == [
        chunk(1, {"content": "a"}, logprobs={"content": WIRE_LOGPROBS, "refusal": None})
    ]
    assert reply.chunks(0, Piece(request_id="r", text="", thinking="hm")) == [chunk(0, {"reasoning": "hm"})]
    wire_call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}}
    for index in (0, 1):
        assert reply.chunks(0, Piece(request_id="r", text="", tool_calls=[CALL])) == [
            chunk(0, {"tool_calls": [{"index": index, **wire_call}]})
        ]
    assert reply.closing(0, outcome(called=True)) == [chunk(0, {}, "tool_calls", seed=9)]
    assert reply.closing(1, outcome("length", called=True)) == [chunk(1, {}, "length", seed=9)]
    usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16, "prompt_tokens_details": {"cached_tokens": 4}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    assert reply.ending([outcome(), outcome()]) == [{**head, "choices": [], "usage": usage, "seed": 9}]
    answers = [Answer(text=["a"], thinking=["hm"]), Answer(tool_calls=[CALL])]
    assert reply.whole(answers, [outcome(), outcome(called=True, dropped=1)]) == {
        **head,
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "a", "reasoning": "hm"}, "finish_reason": "stop", "seed": 9},
            {
                "index": 1,
                "message": {"role": "assistant", "content": None, "tool_calls": [wire_call]},
                "finish_reason": "tool_calls",
                "seed": 9,
            },
        ],
        "usage": usage,
        "seed": 9,
    }


def test_v1_completion_objects() -> None:
    reply = openai.CompletionReply("m", id="cmpl-1", created=5)
    head = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "system_fingerprint": "fp_localrun"}
    assert reply.chunks(0, Piece(request_id="r", text="xy")) == [
        {**head, "choices": [{"index": 0, "text": "xy", "logprobs": None, "finish_reason": None}]}
    ]
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [2]}
    assert reply.chunks(0, Piece(request_id="r", text="a", logprobs=LOGPROBS))[0]["choices"][0]["logprobs"] == logprobs
    assert reply.closing(0, outcome("length")) == [
        {**head, "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "seed": 9}]}
    ]
    assert reply.ending([outcome()]) == []


def test_errors() -> None:
    assert ollama.error_body(ModelNotFound("gone")) == {"error": "gone"}
    overflow = openai.error_body(ContextOverflow(10, 5))["error"]
    assert (overflow["type"], overflow["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert openai.error_body(ModelNotFound("gone", param="model")) == {
        "error": {"message": "gone", "type": "not_found_error", "param": "model", "code": "model_not_found"}
    }
    assert openai.error_body(RunnerDied("dead"))["error"]["type"] == "api_error"


def test_beams_reach_the_runner_and_are_for_one_answer() -> None:
    (request,) = v1_completion(options={"num_beams": 4, "length_penalty": 0.5})
    assert (request.num_beams, request.length_penalty) == (4, 0.5)
    bodies: list[dict[str, Any]] = [{"n": 2}, {"best_of": 3}]
    for body in bodies:
        with pytest.raises(Unsupported, match="num_beams with several answers"):
            v1_completion(options={"num_beams": 4}, **body)
