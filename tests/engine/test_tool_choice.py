"""A tool call that must come does come: under the grammar of every family, whatever a model of noise says is read as a call of the tool
asked for, with arguments that its schema admits."""

from __future__ import annotations

from typing import Any, cast

import jsonschema_rs
import numpy as np
import pytest

from localrun.engine.grammar import Constraint, GrammarCompiler
from localrun.errors import BadRequest, Unsupported
from localrun.messages import Generate, Message, Sampling
from localrun.text.callgrammar import _WRITTEN, call_grammar
from localrun.text.harmony import CALL, HarmonyParser
from localrun.text.parts import CallPart, TextPart
from localrun.text.toolcalls import ToolCallParser
from localrun.text.toolformats import BARE_JSON, FORMATS, tool_format
from tests.engine.harness import Harness, Outcome
from tests.fakes import BYTES, TOOLS_TEMPLATE, FakeTokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "at": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "bare"}},
]
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}, "bare": {"type": "object", "maxProperties": 0}}

SOURCES = {
    **{form.name: " ".join(marks) for marks, form in reversed(FORMATS)},
    "mistral-args": "[TOOL_CALLS] [ARGS]",
    "deepseek-fenced": "<｜tool▁call▁begin｜> ```json",
    "dsml": "｜DSML｜ tool_calls",
    "dsml-functions": "｜DSML｜ function_calls",
    "json": "tools",
    "harmony": "<|channel|> <|message|>",
}


class MarkingTokenizer(FakeTokenizer):
    """Its vocabulary has the family's marks as control tokens too."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        super().__init__()
        self.controls = {text: self.n_vocab + i for i, text in enumerate(dict.fromkeys(marks))}
        self._pieces += [text.encode() for text in self.controls]
        self._special_of = {**self._special_of, **self.controls}
        self.n_vocab = len(self._pieces)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"" if token in self.controls.values() and not special else super().piece(token, special=special)

    def _next(self, data: bytes, at: int, parse_special: bool) -> tuple[int, int]:
        for text, token in sorted(self.controls.items(), key=lambda item: -len(item[0])):
            if data.startswith(text.encode(), at):
                return token, len(text.encode())
        return super()._next(data, at, parse_special)


def wander(constraint: Constraint, tokenizer: FakeTokenizer, endings: list[str], seed: int) -> str:
    """What a model of noise writes, which now and then tries one of `endings`, without which free text would never end."""
    random = np.random.default_rng(seed)
    closers = [ord(character) for character in '"}]']
    said: list[int] = []
    trying: list[int] = []
    while not constraint.complete:
        assert len(said) < 3000, "no end in sight"
        for token in constraint.forced():
            constraint.accept(token)
            said.append(token)
        if bool(constraint.complete):
            break
        allowed = constraint.allowed()
        if not trying and endings and random.random() < 0.2:
            trying = tokenizer.encode(endings[random.integers(len(endings))], add_special=False)
        scores = random.normal(size=len(allowed)) + 4.0 * np.isin(np.arange(len(allowed)), closers)
        scores[128:BYTES] -= 9
        scores[~allowed] = -np.inf
        token = int(np.argmax(scores))
        if trying:
            wanted = trying.pop(0)
            if allowed[wanted]:
                token = wanted
            else:
                trying = []
        if token in tokenizer.eog_ids:
            break
        constraint.accept(token)
        said.append(token)
    return tokenizer.decode(said).decode("utf-8", "replace")


@pytest.mark.parametrize("control", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("style", list(_WRITTEN))
def test_every_family(style: str, control: bool) -> None:
    source = SOURCES[style]
    form = tool_format(source) or BARE_JSON
    harmony = ("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")
    marks = harmony if style == "harmony" else ("<｜tool▁sep｜>", *(mark for mark in form.marks if mark.startswith("<")))
    tokenizer = cast(Any, MarkingTokenizer(marks if control else ()))
    if style == "harmony" and not control:
        return  # its marks are control tokens in every vocabulary; as text they would be part of the thoughts
    compiler = GrammarCompiler(tokenizer, tokenizer.n_vocab)
    endings = [_WRITTEN[style].after_value] if _WRITTEN[style].after_value else []
    for seed in range(6):
        names = [["weather", "now", "bare"], ["weather"], ["now"], ["bare"]][seed % 4]
        grammar = call_grammar(source, TOOLS, names, tokenizer, several=seed % 2 == 0, after_thinking=seed % 3 == 0)
        text = wander(compiler.compile_calls(grammar), tokenizer, endings, seed)
        text = CALL + text if style == "harmony" else text
        parser = HarmonyParser("<|start|>assistant") if style == "harmony" else ToolCallParser(form, TOOLS)
        parts = [*parser.push(text), *parser.flush()]
        calls = [part.call for part in parts if isinstance(part, CallPart)]
        assert not any(isinstance(part, TextPart) and part.text.strip() for part in parts), (text, parts)
        assert calls and (len(calls) == 1 or seed % 2 == 0), text
        for call in calls:
            assert call.name in names
            jsonschema_rs.validate(SCHEMAS[call.name], call.arguments)


def test_a_family_that_cannot_be_enforced_says_so() -> None:
    with pytest.raises(Unsupported, match="tool_choice"):
        call_grammar("<|tool_list_start|>", TOOLS, ["now"], FakeTokenizer(), several=True, after_thinking=False)  # type: ignore[arg-type]


# ---- in the engine ------------------------------------------------------------------------------------------------------------


def ask(**fields: Any) -> Outcome:
    harness = Harness(n_blocks=64, template=TOOLS_TEMPLATE)
    sampling = Sampling(seed=fields.pop("seed", 1), logit_bias={ord('"'): 6.0, ord("}"): 6.0, ord("\\"): -20.0})
    asked = {"tools": TOOLS, "must_call": ["weather"], "max_tokens": 500, "num_ctx": 1200, **fields}
    outcome = harness.add(Generate(request_id="r", messages=[Message(role="user", content="hi")], sampling=sampling, **asked))
    harness.run()
    return outcome


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_comes(seed: int) -> None:
    outcome = ask(seed=seed, parallel_tool_calls=False)
    assert outcome.finished is not None and outcome.finished.reason == "stop" and not outcome.text
    (call,) = outcome.tool_calls
    assert call.name == "weather"
    jsonschema_rs.validate(WEATHER, call.arguments)


def test_a_call_that_cannot_be_promised_is_refused() -> None:
    impossible = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "not": {"required": ["a"]}}}}]
    for fields, problem, kind in (
        ({"must_call": ["wether"]}, "there is no tool 'wether'", BadRequest),
        ({"format": "json"}, "exclude each other", BadRequest),
        ({"tools": impossible}, "not", Unsupported),
    ):
        with pytest.raises(kind, match=problem):
            ask(**fields)  # type: ignore[arg-type]
