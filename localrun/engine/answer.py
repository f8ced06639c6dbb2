"""From chosen tokens to text that may be shown. Knows one answer's bytes, stop strings and log-probabilities; knows no logits, no blocks.

Text is given out once it is whole characters and can no longer become part of a stop string; a token's log-probability goes with the text
it belongs to, so nothing of a stop string leaks, not even there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from localrun.engine.sampler import TokenLogprobs
from localrun.messages import Logprob, TokenLogprob, ToolCall
from localrun.text.arguments import ArgumentCheck
from localrun.text.parts import CallPart, TextPart, ThinkingPart
from localrun.text.reply import ReplyParser, mark_tokens
from localrun.text.stops import StopMatcher
from localrun.text.stream import StreamDecoder
from localrun.text.tokenizer import Tokenizer


@dataclass
class Shown:
    """What one or more tokens have made showable."""

    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    stop: str | None = None
    """The stop string that was found; the answer ends before it."""

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.tool_calls or self.logprobs)

    def add(self, later: Shown) -> None:
        self.text += later.text
        self.thinking += later.thinking
        self.tool_calls += later.tool_calls
        self.logprobs += later.logprobs
        self.stop = later.stop


class Answer:
    """`parser` tells thinking and tool calls from text; it sees what the stop strings leave. None: all is text. `check` looks at calls."""

    def __init__(
        self, tokenizer: Tokenizer, stops: list[str], parser: ReplyParser | None = None, check: ArgumentCheck | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._check = check
        self.n_thinking = 0
        """Tokens that were thinking, its marks included."""
        self.problems: list[str] = []
        """Why what looked like a tool call is text, and what is wrong with a call's arguments."""
        self._decoder = StreamDecoder(tokenizer, special=mark_tokens(tokenizer, parser.marks) if parser is not None else False)
        self._stops = StopMatcher(stops)
        self._decoded = 0
        self._shown = 0
        self._held: deque[tuple[int, Logprob]] = deque()
        """Log-probabilities not given out yet, with the length of the answer up to the token's start."""

    def push(self, token: int, logprobs: TokenLogprobs | None) -> Shown:
        """A token that was chosen, and is no end of the turn."""
        if logprobs is not None:
            self._held.append((self._decoded, self._named(token, logprobs)))
        before = self._parser is not None and self._parser.in_thinking
        text = self._decoder.push(token)
        self._decoded += len(text)
        shown = self._show(*self._stops.push(text), last=False)
        self.n_thinking += before or (self._parser is not None and self._parser.in_thinking)
        return shown

    def end(self) -> Shown:
        """The turn is over: what was held back for a stop string that did not come, or a character that was never completed."""
        text = self._decoder.flush()
        self._decoded += len(text)
        shown, stop = self._stops.push(text)
        if stop is None:
            shown += self._stops.flush()
        return self._show(shown, stop, last=True)

    def _show(self, text: str, stop: str | None, *, last: bool) -> Shown:
        self._shown += len(text)
        shown = Shown(stop=stop)
        # A token whose text is still to come, or held back, keeps its log-probability back too.
        while self._held and (self._held[0][0] < self._shown or (stop is None and (last or self._shown == self._decoded))):
            shown.logprobs.append(self._held.popleft()[1])
        if self._parser is None:
            shown.text = text
            return shown
        parts = self._parser.push(text)
        if last or stop is not None:
            parts += self._parser.flush()
        for part in parts:
            match part:
                case TextPart():
                    shown.text += part.text
                    if part.reason is not None:
                        self.problems.append(part.reason)
                case ThinkingPart():
                    shown.thinking += part.text
                case CallPart():
                    shown.tool_calls.append(part.call)
                    problem = self._check.problem(part.call) if self._check is not None else ""
                    if problem:
                        self.problems.append(problem)
        return shown

    def _named(self, token: int, logprobs: TokenLogprobs) -> Logprob:
        chosen = self._spelled(token, logprobs.chosen)
        top = [self._spelled(i, value) for i, value in logprobs.top]
        return Logprob(id=token, token=chosen.token, bytes=chosen.bytes, logprob=chosen.logprob, top=top)

    def _spelled(self, token: int, logprob: float) -> TokenLogprob:
        piece = self._tokenizer.piece(token, special=True)
        return TokenLogprob(id=token, token=piece.decode("utf-8", "replace"), bytes=list(piece), logprob=logprob)
