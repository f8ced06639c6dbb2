"""Reads a model's reply as its chat template's family writes it: thinking first, then text and tool calls.

    parser = reply_parser(template, prompt.text, request.tools)
    decoder = StreamDecoder(tokenizer, special=mark_tokens(tokenizer, parser.marks))
    for token in tokens:
        parts = parser.push(decoder.push(token))
    parts = parser.flush()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localrun.text.harmony import MARKS as HARMONY_MARKS
from localrun.text.harmony import HarmonyParser, is_harmony
from localrun.text.parts import NewId, Part, PartsParser, TextPart, new_call_id
from localrun.text.template import ChatTemplate
from localrun.text.thinking import ThinkingSplitter, thinking_marks
from localrun.text.tokenizer import Tokenizer
from localrun.text.toolcalls import ToolCallParser
from localrun.text.toolformats import tool_format


class ReplyParser:
    """One reply's parser. How the reply is cut into pieces changes only where texts are cut, never the parts."""

    def __init__(self, stages: list[PartsParser], marks: tuple[str, ...]) -> None:
        """stages: each takes the text that the one before it leaves as text."""
        self._stages = stages
        self.marks = marks
        """The texts it looks for. Tokens they are made of must reach it even if they are control tokens."""

    @property
    def in_thinking(self) -> bool:
        """Whether what comes next is thinking, as far as it is known."""
        first = self._stages[0] if self._stages else None
        return isinstance(first, ThinkingSplitter | HarmonyParser) and first.in_thinking

    def push(self, text: str) -> list[Part]:
        return self._through([TextPart(text)] if text else [], 0)

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        for i, stage in enumerate(self._stages):
            parts += self._through(stage.flush(), i + 1)
        return parts

    def _through(self, parts: list[Part], first: int) -> list[Part]:
        for stage in self._stages[first:]:
            passed: list[Part] = []
            for part in parts:
                if isinstance(part, TextPart) and part.reason is None:
                    passed += stage.push(part.text)
                else:
                    passed.append(part)
            parts = passed
        return parts


def reply_parser(
    template: ChatTemplate, prompt: str, tools: list[dict[str, Any]] | None = None, *, new_id: NewId = new_call_id
) -> ReplyParser:
    """The parser for a reply to `prompt` (its text), which `template` rendered. Without tools nothing is taken for a tool call."""
    source = template.tool_source if tools and template.tool_source is not None else template.source
    if is_harmony(source):
        return ReplyParser([HarmonyParser(prompt, new_id=new_id)], HARMONY_MARKS)
    stages: list[PartsParser] = []
    marks: tuple[str, ...] = ()
    thinking = thinking_marks(source)
    if thinking is not None:
        stages.append(ThinkingSplitter(thinking, prompt))
        marks += (thinking.start, thinking.end)
    form = tool_format(source) if tools else None
    if form is not None:
        stages.append(ToolCallParser(form, tools or [], new_id=new_id))
        marks += form.marks
    return ReplyParser(stages, marks)


def mark_tokens(tokenizer: Tokenizer, marks: Iterable[str]) -> frozenset[int]:
    """Control tokens that are part of one of `marks`; they must be shown to a parser that looks for these."""
    marks = list(marks)
    tokens = tokenizer.vocab.tokens
    return frozenset(token for token in tokenizer.vocab.special() if any(tokens[token] in mark for mark in marks))
