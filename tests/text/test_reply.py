"""Replies taken apart: thinking, tool calls of all families, and that it never matters how a reply is cut into pieces."""

from __future__ import annotations

import json
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.text.parts import CallPart, Part, TextPart, ThinkingPart, joined, new_call_id
from localrun.text.reply import ReplyParser, mark_tokens, reply_parser
from localrun.text.stream import StreamDecoder
from localrun.text.template import ChatTemplate
from localrun.text.thinking import ThinkingSplitter, thinking_marks
from localrun.text.toolcalls import ToolCallParser
from localrun.text.toolformats import BARE_JSON, FORMATS, ToolFormat, tool_format
from tests.conftest import REFERENCE
from tests.text.vocabularies import CONTROL, bpe, tokenizer

CHAT = REFERENCE / "chat"
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}, "note": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}},
]
BY_NAME = {form.name: form for _, form in FORMATS} | {"json": BARE_JSON}


def cut(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def calls_parser(form: ToolFormat | str) -> ToolCallParser:
    numbers = count(1)
    return ToolCallParser(BY_NAME[form] if isinstance(form, str) else form, TOOLS, new_id=lambda: f"c{next(numbers)}")


def run(parser: Any, pieces: list[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    return joined(parts + parser.flush())


def plain(parts: list[Part]) -> list[Any]:
    """Texts as they are, thinking as ("thinking", text), calls as (name, arguments), what is none as ("none", text)."""
    out: list[Any] = []
    for part in parts:
        if isinstance(part, CallPart):
            out.append((part.call.name, part.call.arguments))
        elif isinstance(part, ThinkingPart):
            out.append(("thinking", part.text))
        else:
            out.append(part.text if part.reason is None else ("none", part.text))
    return out


def parsed(form: ToolFormat | str, text: str) -> list[Any]:
    return plain(run(calls_parser(form), [text]))


# ---- what templates write is what is read ----

CITY = ("get_weather", {"city": "서울", "unit": "celsius", "days": 3})
SHOWN = {
    "Apertus-8B-Instruct": "apertus", "Apriel-1.6-15b-Thinker-fixed": "apriel", "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed", "Cohere2MoE": "command-r7b", "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command-r7b",
    "GLM-4.6": "glm", "GLM-4.7-Flash": "glm", "GigaChat3.1-10B-A1.8B": "gigachat", "LFM2.5-8B-A1B": "lfm2", "MiMo-VL": "hermes",
    "MiniMax-M1": "apriel", "MiniMax-M2": "minimax", "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3-coder", "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes", "Qwen-QwQ-32B": "hermes", "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes", "Qwen3-Coder": "qwen3-coder", "Qwen3.5-4B": "qwen3-coder", "Reka-Edge": "hermes", "Spark2.5": "glm",
    "StepFun3.5-Flash": "qwen3-coder", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek", "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-V3.2": "dsml", "deepseek-ai-DeepSeek-V4": "dsml", "google-gemma-4-31B-it": "gemma",
    "ibm-granite-granite-4.0": "hermes", "ibm-granite-granite-4.1": "hermes", "inclusionai-ling-3.0-flash": "glm",
    "meetkai-functionary-medium-v3.1": "functionary", "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3", "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral", "mistralai-Mistral-Nemo-Instruct-2407": "mistral", "moonshotai-Kimi-K2": "kimi",
    "openai-gpt-oss-120b": "harmony", "llm-jp-llm-jp-4.1-8b-thinking": "harmony", "openbmb-MiniCPM5-1B": "minicpm",
    "poolside-Laguna-XS-2.1": "glm", "unsloth-Apriel-1.5": "apriel", "unsloth-mistral-Devstral-Small-2507": "mistral",
    "upstage-Solar-Open-100B": "solar",
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_calls_as_the_templates_write_them(shared: Path, name: str, cuts: list[int]) -> None:
    recorded = json.loads((CHAT / "rendered" / f"{name}.json").read_text(encoding="utf-8"))
    conversation = json.loads((CHAT / "conversations.json").read_text(encoding="utf-8"))["conversations"]["tool_result"]
    with (CHAT / "templates" / recorded["template"]).open(encoding="utf-8", newline="") as file:
        template = ChatTemplate(file.read())
    prompts = [case["prompt"] for case in recorded["cases"] if case["conversation"] == "tool_result" and "prompt" in case]
    reply = prompts[0].partition("Weather in Seoul?")[2]
    reply = min((reply.partition(result)[0] for result in ('{"temp"', '{"content"', '{\\"temp\\"')), key=len)
    if SHOWN[name] == "llama3":  # here the call is the whole reply
        reply = reply[reply.index("{") : reply.rindex("}") + 1]
    if SHOWN[name] != "harmony":
        form = tool_format(template.source)
        assert form is not None and form.name == SHOWN[name]
    parts = run(reply_parser(template, "", conversation["tools"]), cut(reply, cuts))
    assert [(part.call.name, part.call.arguments) for part in parts if isinstance(part, CallPart)] == [CITY]
    assert not [part for part in parts if isinstance(part, TextPart) and part.reason]


@pytest.mark.parametrize(
    ("form", "reply", "parts"),
    [
        ("hermes", 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n', ["Sure.", ("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>after', [("add", {}), "after"]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"note": "</tool_call>"}}</tool_call>', [("add", {"note": "</tool_call>"})]),
        ("hermes", "<tool_call>{'name': 'add', 'arguments': {'a': True}}</tool_call>", [("add", {"a": True})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"note": "a\nb"}}</tool_call>', [("add", {"note": "a\nb"})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        ("hermes", '{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        ("hermes", '```json\n{"name": "add", "arguments": {"a": 1}}\n```', [("add", {"a": 1})]),
        ("hermes", '```\n{"name": "add"}\n{"name": "add", "arguments": {"a": 1}}\n```\nDone.', [("add", {}), ("add", {"a": 1}), "Done."]),
        ("hermes", '```json\n{"a": 1}\n```', ['```json\n{"a": 1}\n```']),
        ("hermes", "```\ncode\n```\n", ["```\ncode\n```\n"]),
        ("hermes", 'As asked: {"name": "add"}', ['As asked: {"name": "add"}']),
        ("qwen3-coder", '{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        ("hermes", "a < b <tool b", ["a < b <tool b"]),
        ("hermes", " spaced \n", [" spaced \n"]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 2}}', [("add", {}), ("add", {"a": 2})]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama3", '{"answer": 42}', ['{"answer": 42}']),
        ("llama3", 'Here: {"name": "add"}', ['Here: {"name": "add"}']),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abc"}]', [("add", {"a": 1})]),
        ("mistral", 'ok[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]x[ARGS]{}', ["ok", ("add", {"a": 1}), ("add", {})]),
        ("granite", '<|tool_call|>[{"name": "add", "arguments": {"note": "]"}}]', [("add", {"note": "]"})]),
        ("command-r", 'Action: ```json\n[{"tool_name": "add", "parameters": {"a": 1}}]\n```', [("add", {"a": 1})]),
        ("firefunction", 'functools[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
        ("qwen3-coder", "<tool_call><function=add><parameter=a>\n1.5\n</parameter></function></tool_call>", [("add", {"a": 1.5})]),
        ("qwen3-coder", "<tool_call><function=add><parameter=note>\n12\n</parameter></function></tool_call>", [("add", {"note": "12"})]),
        ("glm", "<tool_call>add\n<arg_key>x</arg_key><arg_value>[1, 2]</arg_value></tool_call>", [("add", {"x": [1, 2]})]),
        (
            "gemma",
            '<|tool_call>call:add{a:1,l:[<|"|>x<|"|>,{k:true}],note:<|"|>}{,<|"|>}<tool_call|>',
            [("add", {"a": 1, "l": ["x", {"k": True}], "note": "}{,"})],
        ),
        ("lfm2", "<|tool_call_start|>[add(a=1, note='x'), add()]<|tool_call_end|>", [("add", {"a": 1, "note": "x"}), ("add", {})]),
    ],
)
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_calls(form: str, reply: str, parts: list[Any], cuts: list[int]) -> None:
    assert plain(run(calls_parser(form), cut(reply, cuts))) == parts


@pytest.mark.parametrize(
    ("form", "reply", "parts", "reason"),
    [
        ("hermes", "x <tool_call>{nonsense}</tool_call> y", ["x", ("none", " <tool_call>{nonsense}</tool_call>"), " y"], "no JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', [("none", '<tool_call>{"arguments": {}}</tool_call>')], "names no tool"),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>', None, "no object"),
        ("hermes", '<tool_call>{"name": "add", ', [("none", '<tool_call>{"name": "add", ')], "no JSON"),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>", None, "nested too deep"),
        (
            "hermes",
            '<tool_call>{"name": "add</tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call>',
            [("none", '<tool_call>{"name": "add</tool_call>'), ("add", {})],
            "no JSON",
        ),
        ("llama3", '{"name": "unknown", "parameters": {}}', [("none", '{"name": "unknown", "parameters": {}}')], "no tool 'unknown'"),
        ("hermes", '```json\n{"name": "Bob", "age": 3}\n```', [("none", '```json\n{"name": "Bob", "age": 3}'), "\n```"], "no tool 'Bob'"),
        ("mistral", "[TOOL_CALLS]add and so on, with no brace " + "x" * 300, None, "no JSON"),
        ("gemma", "<|tool_call>call:add{a:1<tool_call|>", None, "missing"),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>", None, "named arguments"),
        ("lfm2", "<|tool_call_start|>[__import__('os')]<|tool_call_end|>", None, "named arguments"),
        ("qwen3-coder", "<tool_call>nothing</tool_call>", None, "names no function"),
    ],
)
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_what_is_no_call_is_text_with_a_reason(form: str, reply: str, parts: list[Any] | None, reason: str, cuts: list[int]) -> None:
    got = run(calls_parser(form), cut(reply, cuts))
    reasons = [part.reason for part in got if isinstance(part, TextPart) and part.reason]
    assert len(reasons) == 1 and reason in reasons[0], reasons
    if parts is not None:
        assert plain(got) == parts
    if not any(isinstance(part, CallPart) for part in got):
        assert "".join(part.text for part in got if isinstance(part, TextPart)) == reply


BITS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "add", "}", "{", '"', "\\"]
BITS += ['{"name": "add"', ', "arguments": {}', "[", "]", " ", "\n", ";", "text", "<tool", "function=", "<function=add>"]
BITS += ["</function>", "<think>", "```", "```json\n", '{"name": "add"}']


@pytest.mark.parametrize("name", sorted(BY_NAME))
@settings(max_examples=60)
@given(bits=st.lists(st.sampled_from(BITS), max_size=14), cuts=st.lists(st.integers(0, 120), max_size=8))
def test_any_cut_gives_the_same_parts(name: str, bits: list[str], cuts: list[int]) -> None:
    form = BY_NAME[name]
    text = "".join(bits).replace("<tool_call>", "".join(form.start[:1])).replace("</tool_call>", "".join(form.end[:1]))
    assert run(calls_parser(form), cut(text, cuts)) == run(calls_parser(form), [text])


@pytest.mark.parametrize("name", sorted(BY_NAME))
@settings(max_examples=20)
@given(st.text(st.characters(exclude_characters="<[{`AfT")))
def test_text_without_marks_stays_as_it_is(name: str, text: str) -> None:
    assert "".join(part.text for part in run(calls_parser(name), list(text)) if isinstance(part, TextPart)) == text


def test_no_mark_begins_another() -> None:
    """Otherwise which one is found would depend on what has arrived."""
    for _, form in FORMATS:
        outer = [*form.start, *form.ignored]
        assert not [(a, b) for a in outer for b in outer if a != b and b.startswith(a)]


def test_ids() -> None:
    first, second = new_call_id(), new_call_id()
    assert first != second and first.startswith("call_") and len(first) == 13
    parts = run(calls_parser("mistral"), ['[TOOL_CALLS][{"name": "add", "id": "own"}, {"name": "add"}]'])
    assert [part.call.id for part in parts if isinstance(part, CallPart)] == ["own", "c1"]


def test_text_streams_before_a_call() -> None:
    parser = calls_parser("hermes")
    assert plain(parser.push("Let me see. <tool")) == ["Let me see."]
    assert plain(parser.push("s")) == [" <tools"]
    assert plain(parser.push('<tool_call>{"name": "add"}</tool_call>')) == [("add", {})]


# ---- thinking ----

THINK = thinking_marks("<think> </think>")
assert THINK is not None


@pytest.mark.parametrize(
    ("prompt", "reply", "parts"),
    [
        ("", "<think>\nhm\n</think>\n\nyes", [("thinking", "hm"), "yes"]),
        ("<assistant><think>\n", "hm </think>yes ", [("thinking", "hm"), "yes "]),
        ("<think></think>", "yes", ["yes"]),
        ("", " \n<think></think> yes", ["yes"]),
        ("", "no <think>x</think>", ["no <think>x</think>"]),
        ("", "<thin", ["<thin"]),
        ("", "<think>never ends\n", [("thinking", "never ends")]),
        ("", "<think>a </thin b</think>", [("thinking", "a </thin b")]),
        ("", " plain", [" plain"]),
        ("", "", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 30), max_size=8))
def test_thinking(prompt: str, reply: str, parts: list[Any], cuts: list[int]) -> None:
    assert THINK is not None
    assert plain(run(ThinkingSplitter(THINK, prompt), cut(reply, cuts))) == parts


def test_marks_of_families() -> None:
    def marks(source: str) -> tuple[str, str] | None:
        found = thinking_marks(source)
        return None if found is None else (found.start, found.end)

    assert marks("{{ '<|START_THINKING|>' }}{{ '<|END_THINKING|>' }}") == ("<|START_THINKING|>", "<|END_THINKING|>")
    assert marks("content.split('</think>')") == ("<think>", "</think>")
    assert marks("{{ messages }}") is None


# ---- together ----

QWEN = "{% if tools %}<tool_call></tool_call>{% endif %}<think></think>"


@given(st.lists(st.integers(0, 120), max_size=8))
def test_thinking_then_text_then_calls(cuts: list[int]) -> None:
    reply = '<think>\nadd them\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    parts = run(reply_parser(ChatTemplate(QWEN), "", TOOLS), cut(reply, cuts))
    assert plain(parts) == [("thinking", "add them"), "I add.", ("add", {"a": 1})]


def test_without_tools_nothing_is_a_call() -> None:
    reply = '<tool_call>{"name": "add"}</tool_call>'
    assert plain(run(reply_parser(ChatTemplate(QWEN), ""), [reply])) == [reply]


def test_a_call_inside_thinking_is_thinking() -> None:
    reply = '<think>maybe <tool_call>{"name": "add"}</tool_call></think>no'
    parts = plain(run(reply_parser(ChatTemplate(QWEN), "", TOOLS), [reply]))
    assert parts == [("thinking", 'maybe <tool_call>{"name": "add"}</tool_call>'), "no"]


HARMONY = "{{ '<|channel|><|message|>' }}"


@pytest.mark.parametrize(
    ("prompt", "reply", "parts"),
    [
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes <b",
            [("thinking", "hm"), "yes <b"],
        ),
        (
            "<|start|>assistant",
            '<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
            [("thinking", "hm"), ("add", {"a": 1})],
        ),
        ("<|start|>assistant", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', [("add", {"a": 1})]),
        ("<|start|>assistant<|channel|>final<|message|>", "yes", ["yes"]),
        ("<|start|>assistant", " to=functions.add<|message|>{nonsense", [("none", "{nonsense")]),
        ("<|start|>assistant", "no header at all", ["no header at all"]),
        ("<|start|>assistant", "no header at all " * 20, ["no header at all " * 20]),
        ("<|start|>assistant", "<|channel|>final", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_harmony(prompt: str, reply: str, parts: list[Any], cuts: list[int]) -> None:
    assert plain(run(reply_parser(ChatTemplate(HARMONY), prompt, TOOLS), cut(reply, cuts))) == parts


def test_control_tokens_that_are_marks_reach_the_parser(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, bpe(extra=(("<think>", CONTROL), ("</think>", CONTROL), ("[TOOL_CALLS]", CONTROL))))
    parser: ReplyParser = reply_parser(ChatTemplate("<think></think>[TOOL_CALLS]{{ tools }}"), "", TOOLS)
    decoder = StreamDecoder(tok, special=mark_tokens(tok, parser.marks))
    ids = tok.encode('<think>hm</think>yes<|user|>[TOOL_CALLS][{"name": "add"}]', add_special=False)
    parts: list[Part] = []
    for token in ids:
        parts += parser.push(decoder.push(token))
    assert plain(joined(parts + parser.flush())) == [("thinking", "hm"), "yes", ("add", {})]
