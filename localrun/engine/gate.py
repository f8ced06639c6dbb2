"""A grammar for the answer of a model that thinks first: it holds from the end of the thinking on. Knows marks and tokens, no template.

Whether thinking comes is the model's choice where the prompt has not begun it: its first token may be the mark, if that is one token, or
begin the answer. The same interface as grammar.Constraint.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from localrun.engine.grammar import Constraint
from localrun.text.tokenizer import Tokenizer


class State(Enum):
    BEFORE = "nothing has been said"
    THINKING = "the end of the thinking is to come"
    ANSWER = "the grammar holds"


class AfterThinking:
    """`begun`: the prompt ends inside the thinking."""

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer, start: str, end: str, *, begun: bool) -> None:
        self._constraint = constraint
        self._tokenizer = tokenizer
        start_tokens = tokenizer.encode(start, add_special=False)
        self._start = start_tokens[0] if len(start_tokens) == 1 else None
        self._end = end.encode("utf-8")
        self._eog = np.array(sorted(tokenizer.eog_ids), np.int64)
        self._n_vocab = constraint.n_vocab
        self._states = [State.THINKING if begun else State.BEFORE if self._start is not None else State.ANSWER]
        """Before the first token and after each."""
        self._said: list[bytes] = []

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    @property
    def complete(self) -> bool:
        return self._states[-1] is State.ANSWER and self._constraint.complete

    def allowed(self) -> NDArray[np.bool_]:
        if self._states[-1] is State.THINKING:
            free = np.ones(self._n_vocab, np.bool_)
            free[self._eog] = False  # the answer is still owed
            return free
        mask = self._constraint.allowed()
        if self._states[-1] is State.BEFORE:
            mask = mask.copy()
            mask[self._start] = True
        return mask

    def accept(self, token: int) -> None:
        state = self._states[-1]
        self._said.append(self._tokenizer.piece(token, special=True))
        if state is State.BEFORE:
            state = State.THINKING if token == self._start else State.ANSWER
            if state is State.ANSWER:
                self._constraint.accept(token)
        elif state is State.THINKING:
            if self._end in self._tail():
                state = State.ANSWER
        else:
            self._constraint.accept(token)
        self._states.append(state)

    def forced(self) -> list[int]:
        return self._constraint.forced() if self._states[-1] is State.ANSWER else []

    def take_back(self, n: int) -> None:
        in_answer = 0
        for before, after in zip(self._states[-n - 1 : -1], self._states[-n:], strict=True):
            in_answer += after is State.ANSWER and before is not State.THINKING
        del self._states[-n:]
        del self._said[-n:]
        self._constraint.take_back(in_answer)

    def _tail(self) -> bytes:
        """The end of what was said, at least as long as the end mark, with its last token."""
        tail = b""
        for piece in reversed(self._said):
            tail = piece + tail
            if len(tail) >= len(self._end) + len(self._said[-1]):
                break
        return tail
