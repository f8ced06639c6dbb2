"""Thinking that models write before their answer, told apart from it. Which marks surround it is read off the chat template."""

from __future__ import annotations

from dataclasses import dataclass

from localrun.text.parts import Part, TextPart, ThinkingPart
from localrun.text.stops import overlap


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    start: str
    end: str


KNOWN_MARKS = (
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B, Command A
    ThinkingMarks("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ThinkingMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThinkingMarks("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThinkingMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThinkingMarks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ThinkingMarks("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Nemotron and most others
)


def thinking_marks(source: str) -> ThinkingMarks | None:
    """The marks that a chat template's text names, or None if the model does not mark its thinking (in a way known here)."""
    written = source.replace("\\n", "\n")
    return next((marks for marks in KNOWN_MARKS if marks.start in written and marks.end in written), None) or next(
        (marks for marks in KNOWN_MARKS if marks.end in written), None
    )


class ThinkingSplitter:
    """Splits a reply into thinking and the rest.

    Thinking begins with the reply (white space may come before), or has begun in the prompt already; the mark anywhere later is text. White
    space around thinking, and before the text behind it, belongs to neither.
    """

    def __init__(self, marks: ThinkingMarks, prompt: str) -> None:
        """prompt: the text the reply follows; if it ends with the start mark, the reply begins inside the thinking."""
        self._marks = marks
        self._buffer = ""
        self._thinking = prompt.rstrip().endswith(marks.start.rstrip())
        self._before = not self._thinking
        self._drop_space = self._thinking
        """White space at the front of what comes next is not kept."""

    @property
    def in_thinking(self) -> bool:
        """Whether what comes next is thinking, as far as it is known."""
        return self._thinking

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        if self._before:
            begun = self._buffer.lstrip()
            if self._marks.start.startswith(begun) and begun != self._marks.start:
                return []
            self._before = False
            if begun.startswith(self._marks.start):
                self._thinking = self._drop_space = True
                self._buffer = begun[len(self._marks.start) :]
        if self._thinking:
            self._think(parts)
        if not self._thinking:
            self._take(self._buffer, parts)
            self._buffer = ""
        return parts

    def flush(self) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        self._before = False
        parts: list[Part] = []
        if self._thinking:
            self._take(rest.rstrip(), parts)
        else:
            self._take(rest, parts)
        return parts

    def _think(self, parts: list[Part]) -> None:
        end = self._marks.end
        at = self._buffer.find(end)
        if at >= 0:
            self._take(self._buffer[:at].rstrip(), parts)
            self._buffer = self._buffer[at + len(end) :]
            self._thinking = False
            self._drop_space = True
            return
        sure = self._buffer[: len(self._buffer) - overlap(self._buffer, end)].rstrip()
        self._take(sure, parts)
        self._buffer = self._buffer[len(sure) :]

    def _take(self, text: str, parts: list[Part]) -> None:
        if self._drop_space:
            text = text.lstrip()
        if text:
            self._drop_space = False
            parts.append(ThinkingPart(text) if self._thinking else TextPart(text))
