"""What became of one generation, gathered from its events: the same for every dialect."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from localrun.errors import LocalrunError
from localrun.messages import Finished, Logprob, Piece, Started, ToolCall


def new_id(prefix: str) -> str:
    """`prefix` and 128 random bits: no two replies share one."""
    return prefix + uuid.uuid4().hex


@dataclass
class Answer:
    """Everything the pieces of one generation carried, joined."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if piece.text:
            self.text.append(piece.text)
        if piece.thinking:
            self.thinking.append(piece.thinking)
        self.tool_calls.extend(piece.tool_calls)
        self.logprobs.extend(piece.logprobs)


@dataclass
class Echo:
    """A prompt that is repeated in front of its answer."""

    text: str
    ids: list[int] | None = None
    """Its tokens, where they are known."""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    """Of each token; None of the first, which nothing comes before."""
    top: list[dict[str, float] | None] = field(default_factory=list)
    """The likeliest tokens at each place."""


@dataclass(frozen=True)
class Outcome:
    """How one generation ended."""

    started: Started
    finished: Finished
    total_s: float
    """From the request's arrival in the daemon to now."""
    load_s: float
    """Of that, waiting for the model to be in memory."""
    called_tools: bool = False


def remarks(outcome: Outcome) -> dict[str, Any]:
    """What every dialect says beside the answer, where there is something to say: why what looked like a tool call came as text, and where
    arguments break a tool's schema; where a long prompt stopped agreeing with a cached one."""
    result: dict[str, Any] = {}
    if outcome.finished.tool_problems:
        result["tool_call_problems"] = outcome.finished.tool_problems
    if outcome.started.near_miss:
        result["near_miss"] = outcome.started.near_miss
    return result


class Reply(Protocol):
    """A dialect's way to say an answer. Chunks are JSON-like objects, in the order they are sent.

    `choice` numbers the generations of one request (several only where a dialect has `n` or a list of prompts).
    """

    def opening(self, started: Started) -> list[dict[str, Any]]:
        """Before the first piece of any choice."""

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        """For one piece."""

    def closing(self, choice: int, outcome: Outcome) -> list[dict[str, Any]]:
        """When one choice has ended."""

    def ending(self, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        """When all have."""

    def failing(self, error: LocalrunError) -> list[dict[str, Any]]:
        """When an error ends the stream after it has begun."""

    def whole(self, answers: list[Answer], outcomes: list[Outcome]) -> dict[str, Any]:
        """The reply that is not streamed."""
