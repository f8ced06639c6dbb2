"""Thinking and tool calls through every dialect, with the real clients: whole, streamed, and as history that comes back."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests import fakes
from tests.daemon import serving
from tests.daemon.serving import Daemon

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS: Any = [WEATHER]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
SAID = "Let me look.\n" + CALL % "서울" + "\n" + CALL % "Paris"
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
THOUGHT = "<think>\nthey want a greeting\n</think>\n\nhello world"


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model calls two tools."""
    hook = functools.partial(fakes.load_scripted, reply=SAID, template=fakes.TOOLS_TEMPLATE)
    with serving.daemon(tmp_path_factory.mktemp("calling"), hook) as running:
        running.add_model("tooled", serving.tiny_gguf(fakes.TOOLS_TEMPLATE))
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model thinks."""
    hook = functools.partial(fakes.load_scripted, reply=THOUGHT, template=fakes.THINKING_TEMPLATE)
    with serving.daemon(tmp_path_factory.mktemp("thinking"), hook) as running:
        running.add_model("thinker", serving.tiny_gguf(fakes.THINKING_TEMPLATE))
        yield running


@pytest.fixture
def v1(calling: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="x", max_retries=0) as client:
        yield client


# ---- calls --------------------------------------------------------------------------------------------------------------------


def test_ollama_calls(calling: Daemon) -> None:
    client = ollama.Client(host=calling.url)
    whole = client.chat("tooled", ASK, tools=[WEATHER])
    assert whole.message.content == "Let me look." and whole.done_reason == "stop"
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []] == [
        ("weather", {"city": "서울"}),
        ("weather", {"city": "Paris"}),
    ]
    *pieces, final = client.chat("tooled", ASK, tools=[WEATHER], stream=True)
    calls = [call for piece in pieces for call in piece.message.tool_calls or []]
    assert [call.function.arguments["city"] for call in calls] == ["서울", "Paris"]
    assert "".join(piece.message.content or "" for piece in pieces).strip() == "Let me look."
    assert final.done and not final.message.tool_calls and all(not piece.done for piece in pieces)
    lines = calling.lines("/api/chat", {"model": "tooled", "messages": ASK, "tools": [WEATHER]})
    raw = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["index"] for call in raw] == [0, 1]
    assert len({call["id"] for call in raw}) == 2 and all(call["id"].startswith("call_") for call in raw)
    client._client.close()


def test_what_a_tool_said_goes_back_to_the_model(calling: Daemon) -> None:
    history = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    body = {"model": "tooled", "messages": history, "tools": [WEATHER], "_debug_render_only": True}
    rendered = calling.http.post("/api/chat", json=body).json()["_debug_info"]["rendered_template"]
    assert "<|tool|>rain" in rendered and "weather" in rendered


def test_openai_calls(v1: openai.OpenAI) -> None:
    answer = v1.chat.completions.create(model="tooled", messages=ASK, tools=TOOLS, tool_choice="auto")
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls: list[Any] = list(choice.message.tool_calls or [])
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "weather", {"city": "서울"}),
        ("function", "weather", {"city": "Paris"}),
    ]


def test_openai_calls_streamed_through_the_clients_own_accumulator(v1: openai.OpenAI) -> None:
    with v1.chat.completions.stream(model="tooled", messages=ASK, tools=TOOLS) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls or []] == ["서울", "Paris"]
    assert (choice.message.content or "").strip() == "Let me look."


def test_no_more_than_one_call_where_that_is_asked(v1: openai.OpenAI, calling: Daemon) -> None:
    asked: dict[str, Any] = {"model": "tooled", "messages": ASK, "tools": [WEATHER], "parallel_tool_calls": False}
    (choice,) = v1.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    cities = [
        json.loads(call.function.arguments)["city"]
        for chunk in v1.chat.completions.create(**asked, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert cities == ["서울"]
    assert calling.loaded()[0]["running"] == 0


def test_tools_that_are_not_to_be_called(v1: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tooled", "messages": ASK, "tools": [WEATHER]}
    (choice,) = v1.chat.completions.create(**asked, tool_choice="none").choices
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and "<tool_call>" in (choice.message.content or "")


ONE_OR_TWO = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
CHOSEN: Any = [{"type": "function", "function": {"name": name, "parameters": ONE_OR_TWO}} for name in ("one", "two")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"one", "two"}),
        ({"type": "function", "function": {"name": "two"}}, {"two"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOSEN[0]]}}, {"one"}),
    ],
)
def test_a_call_that_must_come(v1: openai.OpenAI, choice: Any, names: set[str], stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tooled", "messages": ASK, "tools": CHOSEN, "tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        chunks = list(v1.chat.completions.create(**asked, stream=True))
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        (answered,) = v1.chat.completions.create(**asked).choices
        (call,), reason = answered.message.tool_calls, answered.finish_reason
        assert not answered.message.content
    assert call.function.name in names and json.loads(call.function.arguments)["x"] in (1, 2) and reason == "tool_calls"


def test_a_call_that_must_come_in_the_other_dialects(v1: openai.OpenAI, calling: Daemon) -> None:
    items: Any = [{"type": "function", **tool["function"], "strict": True} for tool in CHOSEN]
    answer: Any = v1.responses.create(
        model="tooled", input="?", tools=items, tool_choice={"type": "function", "name": "two"}, parallel_tool_calls=False
    )
    assert [(item.type, item.name) for item in answer.output] == [("function_call", "two")]
    blocks: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in CHOSEN]
    with anthropic.Anthropic(base_url=calling.url, api_key="x", max_retries=0) as client:
        for choice, names in (({"type": "any"}, ("one", "two")), ({"type": "tool", "name": "one"}, ("one",))):
            wanted: Any = {**choice, "disable_parallel_tool_use": True}
            message = client.messages.create(model="tooled", max_tokens=500, messages=ASK, tools=blocks, tool_choice=wanted)
            (block,) = message.content
            assert message.stop_reason == "tool_use" and block.type == "tool_use" and block.name in names
            assert isinstance(block.input, dict) and block.input["x"] in (1, 2)


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"type": "function", "function": {"name": "three"}}, 'there is no tool "three"'),
        ("must", "tool_choice: "),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "tool_choice: "),
        ({"type": "custom", "custom": {"name": "one"}}, "tool_choice: "),
    ],
)
def test_choices_that_are_none(v1: openai.OpenAI, choice: Any, problem: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        v1.chat.completions.create(model="tooled", messages=ASK, tools=CHOSEN, tool_choice=choice)
    assert caught.value.param == "tool_choice" and problem in str(caught.value)


def test_arguments_that_break_the_schema_are_said(calling: Daemon, v1: openai.OpenAI) -> None:
    numbered = {"type": "function", "function": {**WEATHER["function"], "parameters": {"properties": {"city": {"type": "integer"}}}}}
    final = calling.lines("/api/chat", {"model": "tooled", "messages": ASK, "tools": [numbered]})[-1]
    assert final["tool_call_problems"] == [
        f'the arguments of weather.city break its schema: "{city}" is not of type "integer"' for city in ("서울", "Paris")
    ]
    asked: Any = {"model": "tooled", "messages": ASK, "tools": [numbered]}
    (choice,) = v1.chat.completions.create(**asked).choices
    assert choice.model_extra["tool_call_problems"] == final["tool_call_problems"] and len(choice.message.tool_calls) == 2
    last = list(v1.chat.completions.create(**asked, stream=True))[-1].choices[0]
    assert last.model_extra is not None and last.model_extra["tool_call_problems"] == final["tool_call_problems"]
    fine = calling.lines("/api/chat", {"model": "tooled", "messages": ASK, "tools": [WEATHER]})[-1]
    assert "tool_call_problems" not in fine


def test_responses_calls(v1: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    answer = v1.responses.create(model="tooled", input="How is the weather?", tools=[tool])
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    call = answer.output[1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "서울"} and call.call_id.startswith("call_")
    kinds = [event.type for event in v1.responses.create(model="tooled", input="?", tools=[tool], stream=True)]
    assert kinds.count("response.function_call_arguments.done") == 2 and kinds[-1] == "response.completed"


def test_anthropic_calls(calling: Daemon) -> None:
    tool: Any = {"name": "weather", "description": "The weather", "input_schema": WEATHER["function"]["parameters"]}
    with anthropic.Anthropic(base_url=calling.url, api_key="x", max_retries=0) as client:
        answer = client.messages.create(model="tooled", max_tokens=500, messages=ASK, tools=[tool])
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
        assert answer.content[1].type == "tool_use" and answer.content[1].input == {"city": "서울"}
        with client.messages.stream(model="tooled", max_tokens=500, messages=ASK, tools=[tool]) as stream:
            final = stream.get_final_message()
        assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "서울"}, {"city": "Paris"}]
        one = client.messages.create(
            model="tooled", max_tokens=500, messages=ASK, tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert [block.type for block in one.content] == ["text", "tool_use"]


# ---- thoughts -----------------------------------------------------------------------------------------------------------------


def test_ollama_thoughts(thinking: Daemon) -> None:
    client = ollama.Client(host=thinking.url)
    whole = client.chat("thinker", ASK, think=True)
    assert (whole.message.thinking, whole.message.content) == ("they want a greeting", "hello world")
    pieces = list(client.chat("thinker", ASK, think=True, stream=True))
    assert "".join(piece.message.thinking or "" for piece in pieces) == "they want a greeting"
    assert "".join(piece.message.content or "" for piece in pieces) == "hello world"
    written = client.generate("thinker", "x", think=True)
    assert (written.thinking, written.response) == ("they want a greeting", "hello world")
    assert "thinking" in (client.show("thinker").capabilities or [])
    client._client.close()


def test_thinking_is_switched_off_in_the_prompt(thinking: Daemon) -> None:
    def rendered(**body: Any) -> str:
        sent = {"model": "thinker", "messages": ASK, "_debug_render_only": True, **body}
        text: str = thinking.http.post("/api/chat", json=sent).json()["_debug_info"]["rendered_template"]
        return text

    assert rendered(think=False).endswith("<think></think>")
    assert not rendered(think=True).endswith("<think></think>")


def test_openai_thoughts(thinking: Daemon) -> None:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="x", max_retries=0) as client:
        (choice,) = client.chat.completions.create(model="thinker", messages=ASK, reasoning_effort="low").choices
        assert choice.message.content == "hello world"
        assert choice.message.model_extra is not None and choice.message.model_extra["reasoning"] == "they want a greeting"
        chunks = list(client.chat.completions.create(model="thinker", messages=ASK, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == "they want a greeting"
        assert "".join(delta.content or "" for delta in deltas) == "hello world"
        answer = client.responses.create(model="thinker", input="x", reasoning={"effort": "high"})
        assert [item.type for item in answer.output] == ["reasoning", "message"] and answer.output_text == "hello world"
        assert answer.output[0].type == "reasoning" and answer.output[0].summary[0].text == "they want a greeting"


def test_anthropic_thoughts(thinking: Daemon) -> None:
    with anthropic.Anthropic(base_url=thinking.url, api_key="x", max_retries=0) as client:
        answer = client.messages.create(model="thinker", max_tokens=500, messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[0].type == "thinking" and answer.content[0].thinking == "they want a greeting"
        with client.messages.stream(model="thinker", max_tokens=500, messages=ASK) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
