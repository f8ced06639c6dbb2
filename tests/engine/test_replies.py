"""Thinking and tool calls, told apart from text on their way out; grammars that begin behind the thinking."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import Unsupported
from localrun.messages import Generate, Message, Sampling
from tests.engine.harness import Harness, Outcome
from tests.fakes import THINKING_TEMPLATE, TOOLS_TEMPLATE, FakeModel, ScriptedModel

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"], "additionalProperties": False}
ENDING = {ord('"'): 9.0, ord("}"): 9.0, ord("\\"): -20.0}


def reply(says: str | FakeModel, template: str, **fields: Any) -> Outcome:
    model = ScriptedModel(says) if isinstance(says, str) else says
    harness = Harness(model, template=template)
    fields.setdefault("sampling", Sampling(temperature=0))
    outcome = harness.add(Generate(request_id="r", messages=[Message(role="user", content="hi")], **fields))
    harness.run()
    return outcome


def test_thinking_is_told_apart() -> None:
    outcome = reply("<think>\nlet me see 한\n</think>\n\nhello world", THINKING_TEMPLATE)
    assert (outcome.thinking, outcome.text) == ("let me see 한", "hello world")
    assert all(not (p.text and p.thinking) or p.thinking for p in outcome.pieces)
    assert len(outcome.pieces) > 10, "both are streamed"


def test_without_thinking_all_is_text() -> None:
    outcome = reply(ScriptedModel("hello <think> world", behind="<think></think>"), THINKING_TEMPLATE, think=False)
    assert (outcome.thinking, outcome.text) == ("", "hello <think> world")


def test_stop_strings_and_logprobs_go_with_thinking_too() -> None:
    outcome = reply("<think>one two three</think>four", THINKING_TEMPLATE, stop=["three"], logprobs=1)
    assert (outcome.thinking, outcome.text) == ("one two", "")
    assert outcome.finished is not None
    assert outcome.finished.stop == "three"
    said = b"".join(bytes(item.bytes) for piece in outcome.pieces for item in piece.logprobs)
    assert said.decode() == "<think>one two "


def test_a_raw_prompt_has_no_marks() -> None:
    harness = Harness(ScriptedModel("<think>x</think>y"), template=THINKING_TEMPLATE)
    outcome = harness.ask("Q:", temperature=0)
    harness.run()
    assert outcome.text == "<think>x</think>y"


def test_a_tool_call_is_told_apart() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>'
    outcome = reply(f"Let me look.\n{call}", TOOLS_TEMPLATE, tools=[WEATHER])
    assert outcome.text == "Let me look."
    (made,) = outcome.tool_calls
    assert (made.name, made.arguments) == ("weather", {"city": "서울"})
    assert outcome.finished is not None
    assert outcome.finished.reason == "stop"


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    outcome = reply(text, TOOLS_TEMPLATE)
    assert (outcome.text, outcome.tool_calls) == (text, [])


def test_a_call_that_cannot_be_read_is_text() -> None:
    outcome = reply("<tool_call>nonsense</tool_call>", TOOLS_TEMPLATE, tools=[WEATHER])
    assert "nonsense" in outcome.text
    assert outcome.tool_calls == []


def test_what_the_template_does_not_know_is_refused() -> None:
    for fields, name in (({"think": True}, "think"), ({"tools": [WEATHER]}, "tools")):
        harness = Harness()
        with pytest.raises(Unsupported) as caught:
            harness.add(Generate(request_id="r", messages=[Message(role="user", content="hi")], **fields))
        assert caught.value.param == name


def test_capabilities_are_the_template_s() -> None:
    assert Harness().parts.capabilities == ["completion"]
    assert Harness(template=THINKING_TEMPLATE).parts.capabilities == ["completion", "thinking"]
    assert Harness(template=TOOLS_TEMPLATE).parts.capabilities == ["completion", "tools"]


# ---- grammars and thinking ------------------------------------------------------------------------------------------------------

BEGUN = THINKING_TEMPLATE + "<think>"


def thinker(thought: str) -> FakeModel:
    """Thinks as scripted, then says whatever noise it is allowed to."""
    return ScriptedModel(thought, behind="<think>")


def test_a_grammar_begins_behind_thinking_that_the_prompt_began() -> None:
    outcome = reply(thinker("so {not json}</think>"), BEGUN, format=PERSON, max_tokens=300, sampling=Sampling(seed=1, logit_bias=ENDING))
    assert outcome.thinking == "so {not json}"
    assert json.loads(outcome.text).keys() == {"name"}


def test_a_thinking_model_may_not_end_before_its_answer() -> None:
    """The script ends inside the thinking: the end of the turn is not allowed there, and the length is what ends it."""
    outcome = reply(thinker("so"), BEGUN, format=PERSON, max_tokens=20)
    assert outcome.finished is not None
    assert (outcome.finished.reason, outcome.finished.completion_tokens) == ("length", 20)


def test_told_not_to_think_the_grammar_holds_at_once() -> None:
    outcome = reply(
        FakeModel(), THINKING_TEMPLATE, format=PERSON, think=False, max_tokens=300, sampling=Sampling(seed=1, logit_bias=ENDING)
    )
    assert outcome.thinking == ""
    assert json.loads(outcome.text).keys() == {"name"}


def test_drafts_and_bans_across_the_end_of_thinking() -> None:
    outcome = reply(
        thinker("aaaa</think>"),
        BEGUN,
        format={"regex": "[abc]{20}"},
        max_tokens=300,
        sampling=Sampling(seed=1, logit_bias=ENDING, banned_strings=["ab"]),
    )
    assert outcome.thinking == "aaaa"
    assert len(outcome.text) == 20
    assert "ab" not in outcome.text
