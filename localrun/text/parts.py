"""What a model's reply is made of, once its marks are understood: text, thinking, tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from localrun.messages import ToolCall

_ID_CHARACTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text to show."""

    text: str
    reason: str | None = None
    """Set when this looked like a tool call and is none: why."""


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """Thinking that came before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool is to be called."""

    call: ToolCall


Part = TextPart | ThinkingPart | CallPart


class PartsParser(Protocol):
    """Takes a reply piece by piece. How it is cut into pieces does not change the parts, but for where texts are cut."""

    def push(self, text: str) -> list[Part]:
        """What `text` makes certain."""
        ...

    def flush(self) -> list[Part]:
        """What is left when the reply ends here."""
        ...


def new_call_id() -> str:
    """An id as Ollama's: "call_" and eight letters or digits."""
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(8))


NewId = Callable[[], str]


def joined(parts: list[Part]) -> list[Part]:
    """`parts` with neighbouring texts, and neighbouring thinking, as one."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, TextPart) and isinstance(last, TextPart) and part.reason is None and last.reason is None:
            out[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ThinkingPart) and isinstance(last, ThinkingPart):
            out[-1] = ThinkingPart(last.text + part.text)
        else:
            out.append(part)
    return out
