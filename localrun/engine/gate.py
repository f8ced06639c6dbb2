"""The thinking in front of an answer: a grammar for the answer holds from its end on, and a budget ends it. Knows marks and tokens, no
template. The same interface as grammar.Constraint.

Whether thinking comes is the model's choice where the prompt has not begun it: it may begin with the mark, or with the answer. When the
budget is used up, the tokens that end the thinking are put in place of whatever would have come, and the answer goes on behind them, as in
"budget forcing" (Muennighoff et al. 2025, s1: Simple test-time scaling).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localrun.engine.grammar import Constraint


@dataclass(frozen=True)
class Marks:
    """Texts of a model that thinks."""

    start: str
    end: str
    closing: str
    """What ends the thinking that has used up its budget, the end mark included."""
    lead: str = ""
    """What begins an answer that must follow a grammar, and is no part of it."""
    bridge: str = ""
    """What comes between the end mark and the lead."""


class State(Enum):
    BEFORE = "nothing has been said, or the beginning of a mark"
    THINKING = "the end of the thinking is to come"
    CLOSING = "the budget is used up, the end of the thinking is being written"
    BRIDGING = "the thinking has ended, what leads to the answer is being written"
    ANSWER = "the grammar holds"


class Standing(NamedTuple):
    """Where one token has brought it."""

    state: State
    thought: int = 0
    """Tokens of thinking so far."""
    written: int = 0
    """Tokens of what is being written."""


class ThinkingGate:
    def __init__(
        self, constraint: Constraint | None, tokenizer: Tokenizer, n_vocab: int, marks: Marks, *, begun: bool, budget: int = -1
    ) -> None:
        """constraint: of the answer. begun: the prompt ends inside the thinking. budget: most tokens of it; below 0: as many as come."""
        self._constraint = constraint
        self._tokenizer = tokenizer
        self.n_vocab = n_vocab
        self._eog = np.array(sorted(tokenizer.eog_ids), np.int64)
        self._budget = budget
        self._start_text, self._end_text = marks.start.encode("utf-8"), marks.end.encode("utf-8")
        bridge = marks.bridge + marks.lead if constraint is not None else ""
        self._start, self._lead, self._bridge = (self._tokens(text) for text in (marks.start, marks.lead, bridge))
        self._closing = self._tokens(marks.closing)
        # A mark of plain text cannot be told from an answer that begins with the same letters.
        clear = len(self._start) == 1 or bool(marks.lead) or not tokenizer.piece(self._start[0])
        state = State.THINKING if begun else State.BEFORE if clear or constraint is None else State.ANSWER
        self._history = [self._looked(Standing(state))]
        """Before the first token and after each."""
        self._said: list[int] = []

    @property
    def complete(self) -> bool:
        return self._history[-1].state is State.ANSWER and self._constraint is not None and self._constraint.complete

    def allowed(self) -> NDArray[np.bool_] | None:
        """bool (n_vocab,): which tokens may come next; None: any."""
        now = self._history[-1]
        if now.state in (State.CLOSING, State.BRIDGING):
            return self._only(self._being_written(now)[now.written])
        if self._constraint is None:
            return None
        if now.state is State.THINKING:
            free = np.ones(self.n_vocab, np.bool_)
            free[self._eog] = False  # the answer is still owed
            return free
        if now.state is State.ANSWER:
            return self._constraint.allowed()
        following = self._following()
        if self._said or self._lead:
            return self._only(*following)
        mask = self._constraint.allowed().copy()
        mask[following] = True
        return mask

    def accept(self, token: int) -> None:
        """The token has been chosen."""
        now = self._history[-1]
        following = self._following() if now.state is State.BEFORE else []
        self._said.append(token)
        match now.state:
            case State.BEFORE:
                now = self._begun(token, following)
            case State.THINKING:
                now = now._replace(thought=now.thought + 1)
                if self._end_text in self._tail():
                    now = now._replace(state=State.BRIDGING if self._bridge else State.ANSWER)
            case State.CLOSING | State.BRIDGING:
                now = now._replace(written=now.written + 1)
                if now.written == len(self._being_written(now)):
                    bridges = now.state is State.CLOSING and self._bridge
                    now = now._replace(state=State.BRIDGING if bridges else State.ANSWER, written=0)
            case State.ANSWER if self._constraint is not None:
                self._constraint.accept(token)
        self._history.append(self._looked(now))

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; mostly none."""
        now = self._history[-1]
        if now.state in (State.CLOSING, State.BRIDGING):
            return self._being_written(now)[now.written :]
        return self._constraint.forced() if now.state is State.ANSWER and self._constraint is not None else []

    def take_back(self, n: int) -> None:
        """The last n tokens have not been chosen after all."""
        if not n:
            return
        in_answer = 0
        for before, after in zip(self._history[-n - 1 : -1], self._history[-n:], strict=True):
            began = before.state is State.BEFORE and not self._lead
            in_answer += after.state is State.ANSWER and (began or before.state is State.ANSWER)
        del self._history[-n:]
        del self._said[-n:]
        if self._constraint is not None:
            self._constraint.take_back(in_answer)

    def _following(self) -> list[int]:
        """What may follow the beginning of a mark that has been said."""
        k = len(self._said)
        return [mark[k] for mark in (self._start, self._lead) if len(mark) > k and mark[:k] == self._said]

    def _begun(self, token: int, following: list[int]) -> Standing:
        """What the first tokens have made certain."""
        if self._constraint is None:
            said = b"".join(self._tokenizer.piece(one, special=True) for one in self._said).lstrip()
            if said.startswith(self._start_text):
                return Standing(State.THINKING)
            return Standing(State.BEFORE if self._start_text.startswith(said) else State.ANSWER)
        if token not in following:
            self._constraint.accept(token)
            return Standing(State.ANSWER)
        return Standing(State.THINKING if self._said == self._start else State.ANSWER if self._said == self._lead else State.BEFORE)

    def _looked(self, now: Standing) -> Standing:
        """Ends thinking that has used up its budget."""
        return now._replace(state=State.CLOSING) if now.state is State.THINKING and 0 <= self._budget <= now.thought else now

    def _being_written(self, now: Standing) -> list[int]:
        return self._closing if now.state is State.CLOSING else self._bridge

    def _only(self, *tokens: int) -> NDArray[np.bool_]:
        mask = np.zeros(self.n_vocab, np.bool_)
        mask[list(tokens)] = True
        return mask

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)

    def _tail(self) -> bytes:
        """The end of what was said, at least as long as the end mark, with its last token."""
        tail, last = b"", self._tokenizer.piece(self._said[-1], special=True)
        for token in reversed(self._said):
            tail = self._tokenizer.piece(token, special=True) + tail
            if len(tail) >= len(self._end_text) + len(last):
                break
        return tail
