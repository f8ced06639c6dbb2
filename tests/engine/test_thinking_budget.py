"""Thinking that has a budget ends with it, by the model's own mark, and the answer follows; what was thinking is counted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.gate import Marks, ThinkingGate
from localrun.engine.grammar import GrammarCompiler
from localrun.messages import Generate, Message, Sampling
from tests.engine.harness import Harness, Outcome
from tests.fakes import EOS, THINKING_TEMPLATE, FakeModel, FakeTokenizer, ScriptedModel

LONG = "<think>" + "round and round, " * 20
"""A model that would never come to an end."""
HARMONY = "{% if messages %}<|channel|><|message|>{% endif %}" + THINKING_TEMPLATE.replace("<think></think>", "")


def reply(model: FakeModel | str, template: str = THINKING_TEMPLATE, **fields: Any) -> Outcome:
    harness = Harness(ScriptedModel(model) if isinstance(model, str) else model, n_blocks=256, template=template)
    if template == HARMONY:
        harness.parts.tokenizer.eog_ids = frozenset({EOS})  # there <|end|> ends a message, and no turn
    outcome = harness.add(Generate(request_id="r", messages=[Message(role="user", content="hi")], **{"max_tokens": 200, **fields}))
    harness.run()
    return outcome


@pytest.mark.parametrize("draft", [0, -1])
@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_the_budget_ends_the_thinking(budget: int, logprobs: int | None, draft: int) -> None:
    outcome = reply(LONG, thinking_budget=budget, logprobs=logprobs, draft_num_predict=draft)
    assert outcome.finished is not None
    # what the script says once it is in the answer does not matter
    assert "\n</think>\n\n" in FakeTokenizer().decode(outcome.answer).decode()
    assert LONG.removeprefix("<think>").startswith(outcome.thinking)
    tokens = FakeTokenizer().encode(LONG.removeprefix("<think>"), add_special=False)[:budget]
    assert outcome.thinking == FakeTokenizer().decode(tokens).decode().rstrip()
    # the token that completes the mark, the budget, and what closes it; line breaks behind the end mark are the answer's
    closing = FakeTokenizer().encode("\n</think>", add_special=False)
    assert outcome.finished.thinking_tokens == 1 + budget + len(closing)


def test_thinking_that_ends_by_itself_is_left_alone() -> None:
    plain = reply("<think>short</think>yes")
    bounded = reply("<think>short</think>yes", thinking_budget=100)
    assert (plain.thinking, plain.text, plain.tokens) == (bounded.thinking, bounded.text, bounded.tokens)
    assert plain.finished is not None and plain.finished.thinking_tokens == len(">short</think>")
    assert reply("no thought", thinking_budget=3).text == "no thought"


@pytest.mark.parametrize(("level", "tokens"), [("minimal", 128), ("low", 512)])
def test_a_level_is_a_budget_where_the_template_knows_none(level: str, tokens: int) -> None:
    long = "<think>" + "x" * 700
    fields: dict[str, Any] = {"think": level, "max_tokens": tokens + 100}
    assert reply(long, **fields).thinking == "x" * tokens
    knowing = THINKING_TEMPLATE + "{# reasoning_effort #}"
    assert len(reply(long, knowing, **fields).thinking) > tokens
    assert reply(long, thinking_budget=9, **fields).thinking == "x" * 9


def test_a_grammar_holds_behind_the_budget() -> None:
    bias = {ord("}"): 6.0, ord('"'): 6.0}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    model = ScriptedModel(LONG.removeprefix("<think>"), behind="<think>")
    sampling = Sampling(seed=1, logit_bias=bias)
    outcome = reply(model, THINKING_TEMPLATE + "<think>", thinking_budget=5, format=schema, sampling=sampling)
    assert outcome.thinking == "round" and json.loads(outcome.text)["a"] in (1, 2)


def test_harmony_thinks_within_its_budget_and_answers_in_its_channel() -> None:
    said = "<|channel|>analysis<|message|>" + "x" * 100
    outcome = reply(said, HARMONY, thinking_budget=6, max_tokens=150)
    assert outcome.thinking == "xxxxxx" and outcome.text
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for script, thinking in ((said, "xxxxxx"), ("hello", "")):
        outcome = reply(script, HARMONY, thinking_budget=6, format=schema, max_tokens=300)
        assert (outcome.thinking, json.loads(outcome.text)["a"] in (1, 2)) == (thinking, True)
        written = FakeTokenizer().decode(outcome.answer).decode()
        assert "<|channel|>final<|message|>{" in written


@settings(max_examples=40)
@given(st.lists(st.integers(0, 255), max_size=30), st.integers(0, 12), st.integers(0, 30), st.booleans())
def test_taking_back_leaves_no_trace(tokens: list[int], budget: int, n: int, constrained: bool) -> None:
    tokenizer: Any = FakeTokenizer()
    constraint = GrammarCompiler(tokenizer, tokenizer.n_vocab).compile({"regex": "[a-z]{1,40}"}) if constrained else None
    again = GrammarCompiler(tokenizer, tokenizer.n_vocab).compile({"regex": "[a-z]{1,40}"}) if constrained else None
    marks = Marks("<|user|>", "<|tool|>", "\n<|tool|>\n")
    gate, other = (ThinkingGate(one, tokenizer, tokenizer.n_vocab, marks, begun=True, budget=budget) for one in (constraint, again))
    taken: list[int] = []
    for wanted in tokens:
        mask = gate.allowed()
        if gate.complete:
            break
        taken.append(wanted if mask is None or mask[wanted] else int(np.argmax(mask)))
        gate.accept(taken[-1])
    n = min(n, len(taken))
    gate.take_back(n)
    for token in taken[: len(taken) - n]:
        other.accept(token)
    ours, theirs = gate.allowed(), other.allowed()
    assert (ours is None and theirs is None) or (ours is not None and theirs is not None and np.array_equal(ours, theirs))
    assert (gate.complete, gate.forced()) == (other.complete, other.forced())
