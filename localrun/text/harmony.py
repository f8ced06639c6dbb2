"""The reply format of gpt-oss ("harmony"): messages with a header that names their channel and whom they are for.

    <|channel|>analysis<|message|>THINKING<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>

Thinking is in the channel analysis, calls go to functions.NAME, everything else is text. (OpenAI, "Harmony response format", 2025.)
"""

from __future__ import annotations

import json
import re

from localrun.messages import ToolCall
from localrun.text.parts import CallPart, NewId, Part, TextPart, ThinkingPart, new_call_id
from localrun.text.stops import overlap

_MESSAGE = "<|message|>"
_START = "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START)
MARKS = ("<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)
BRIDGE = "<|start|>assistant"
"""Between two messages of one reply."""
FINAL = "<|channel|>final<|message|>"
"""Begins the answer."""
CALL = "<|channel|>commentary to=functions."
"""Begins a call; the tool's name follows."""
THINKING = ("<|channel|>analysis<|message|>", "<|end|>")
"""Begins thinking, and ends it."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w./:-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER = 256


def is_harmony(source: str) -> bool:
    """Whether a chat template's text is of this format."""
    return "<|channel|>" in source and _MESSAGE in source


class HarmonyParser:
    """Splits a reply into thinking, text and tool calls."""

    def __init__(self, prompt: str, *, new_id: NewId = new_call_id) -> None:
        """prompt: the text the reply follows, which may have begun a message."""
        self._new_id = new_id
        self._buffer = ""
        self._channel: str | None = None
        self._recipient: str | None = None
        self._in_header = True
        header, found, begun = prompt.rpartition(_START)[2].rpartition(_MESSAGE)
        if found and not begun:
            self._open(header)
        elif not found:
            self._buffer = begun.removeprefix("assistant")

    @property
    def in_thinking(self) -> bool:
        """Whether what comes next is thinking, as far as it is known."""
        return not self._in_header and self._channel == "analysis" and self._recipient is None

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        rest, self._buffer = self._buffer, ""
        if self._in_header:
            if rest.strip() and not rest.lstrip().startswith("<|"):
                parts.append(TextPart(rest))
        else:
            self._close(rest, parts)
        return parts

    def _step(self, parts: list[Part]) -> bool:
        if self._in_header:
            header, found, rest = self._buffer.partition(_MESSAGE)
            if not found:
                if len(self._buffer) <= _LONGEST_HEADER:
                    return False
                # No header at all: a reply outside the format is text.
                self._open("")
                return True
            self._open(header)
            self._buffer = rest
            return True
        found_end = min(((at, end) for end in _ENDS if (at := self._buffer.find(end)) >= 0), default=None)
        if found_end is None:
            if self._recipient is None:
                cut = len(self._buffer) - max(overlap(self._buffer, end) for end in _ENDS)
                self._say(self._buffer[:cut], parts)
                self._buffer = self._buffer[cut:]
            return False
        at, end = found_end
        self._close(self._buffer[:at], parts)
        self._buffer = self._buffer[at + len(end) :]
        self._in_header = True
        return True

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else None
        self._recipient = recipient[1] if recipient and recipient[1] not in ("assistant", "user") else None
        self._in_header = False

    def _say(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(ThinkingPart(text) if self._channel == "analysis" else TextPart(text))

    def _close(self, content: str, parts: list[Part]) -> None:
        """The message ends with `content`."""
        if self._recipient is None:
            self._say(content, parts)
            return
        try:
            arguments = json.loads(content, strict=False) if content.strip() else {}
            if not isinstance(arguments, dict):
                raise ValueError("its arguments are no object")
        except (ValueError, RecursionError) as error:
            parts.append(TextPart(content, f"what looked like a call of {self._recipient} is none: {error}"))
            return
        parts.append(CallPart(ToolCall(id=self._new_id(), name=self._recipient, arguments=arguments)))
