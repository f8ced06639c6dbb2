"""Guesses from a smaller model that has the same vocabulary (speculative decoding: Leviathan et al. 2023, Chen et al. 2023).

The draft model has a KV cache of its own, in which every sequence that uses it has a shadow: what the draft model has read of it, guesses
that did not come true included until they are found out. One pass makes the next guess of all sequences together. Reading up on a
sequence, at its beginning or after a while without drafts, is done in parts, so that nobody's tokens wait for it long.

Knows neither how many guesses are worth while (speculate.py) nor what is made of them (jobs.py). When the draft model fails, answers go
on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from localrun.engine.cache import KVCache
from localrun.engine.cost import CostModel
from localrun.engine.selection import Floats
from localrun.engine.sequence import Sequence
from localrun.models.model import BLOCK_TOKENS, Model, Span

log = logging.getLogger(__name__)

_BEHIND = 16
"""Tokens that a shadow may lack for guesses to follow in the same step; more are read up on first."""


class Guesser(Protocol):
    """Chooses what the draft model's logits stand for."""

    def guess(self, row: Floats, tokens: list[int], ahead: int) -> int:
        """The token to follow `tokens`, the last `ahead` of which are guesses too. `row` (n_vocab,) may be changed."""


@dataclass
class Wish:
    """`most`: tokens to be guessed for the sequence."""

    seq: Sequence
    guesser: Guesser
    most: int


class Drafter:
    """`model` has had its KV pool of n_blocks allocated. n_vocab: of the model that is drafted for."""

    def __init__(self, model: Model, n_blocks: int, n_vocab: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self.cache = KVCache(n_blocks, BLOCK_TOKENS, model.copy_block)
        self.cost = CostModel(model.info.max_batch)
        self.failed = False
        self._n_vocab = n_vocab
        self._clock = clock
        self._behind = min(_BEHIND, model.info.max_batch)
        self._shadows: dict[str, Sequence] = {}

    def seconds(self, n: int) -> float:
        """Expected of one guess for each of n sequences, which share a pass."""
        return self.cost.predict(n, outputs=n) if self.cost.knows(n) else 0.0  # to be tried

    def propose(self, wishes: list[Wish], budget_s: float) -> list[list[int]]:
        """Guesses for each wish, fewer or none where the shadow has to catch up, room is lacking, or the model fails."""
        guesses: list[list[int]] = [[] for _ in wishes]
        if self.failed:
            return guesses
        try:
            ready = [i for i, wish in enumerate(wishes) if self._caught_up(wish.seq, budget_s / max(1, len(wishes)))]
            while ready := [i for i in ready if len(guesses[i]) < wishes[i].most]:
                self._guess_one_more([(wishes[i], guesses[i]) for i in ready])
        except Exception as error:
            log.error("the draft model failed and is used no more", exc_info=error)
            self.failed = True
            return [[] for _ in wishes]
        return guesses

    def forget(self, request_id: str) -> None:
        """Gives a sequence's blocks back; what was read stays for another that begins alike while there is room."""
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self.cache.drop(shadow)

    def check(self) -> None:
        """Raises AssertionError where blocks, tables and tree contradict each other."""
        self.cache.check(self._shadows.values())

    def _caught_up(self, seq: Sequence, budget_s: float) -> bool:
        """Whether all of the sequence but a few tokens has been read; reads on for about budget_s where not."""
        shadow = self._shadows.get(seq.request_id)
        if shadow is None:
            shadow = Sequence(seq.request_id, list(seq.tokens), seq.limit, seq.arrival)
            self._shadows[seq.request_id] = shadow
        self._follow(shadow, seq.tokens)
        self.cache.adopt(shadow)
        lacking = shadow.pending
        if lacking <= self._behind:
            return True
        count = min(lacking - 1, self.model.info.max_batch)
        count = max(1, self.cost.rows_within(budget_s, 0, 0, 0, shadow.computed, count), min(count, self._behind))
        if not self.cache.grow(shadow, count):
            self.forget(seq.request_id)
            return False
        self._forward([self._span(shadow, count, wants_logits=False)])
        shadow.computed += count
        self.cache.publish(shadow)
        return shadow.pending <= self._behind

    def _follow(self, shadow: Sequence, tokens: list[int]) -> None:
        """Makes the shadow say what its sequence says now: guesses that did not come true are taken back."""
        n = min(shadow.computed, len(tokens) - 1)
        if shadow.tokens[:n] != tokens[:n]:
            n = next(i for i, (a, b) in enumerate(zip(shadow.tokens, tokens, strict=False)) if a != b)
        if n < shadow.computed:
            self.cache.rewind(shadow, n)
        shadow.tokens = list(tokens)

    def _guess_one_more(self, wanted: list[tuple[Wish, list[int]]]) -> None:
        """For as many as a pass takes; at least one."""
        spans, shadows, rows = list[Span](), [], 0
        for wish, guessed in wanted:
            shadow = self._shadows.get(wish.seq.request_id)
            if shadow is not None and rows + shadow.pending > self.model.info.max_batch:
                continue
            if shadow is None or not self.cache.grow(shadow, shadow.pending):
                self.forget(wish.seq.request_id)
                wish.most = len(guessed)
                continue
            rows += shadow.pending
            spans.append(self._span(shadow, shadow.pending, wants_logits=True))
            shadows.append((wish, guessed, shadow))
        if not spans:
            return
        for row, (wish, guessed, shadow) in zip(self._forward(spans), shadows, strict=True):
            shadow.computed = len(shadow.tokens)
            token = wish.guesser.guess(row[: self._n_vocab].copy(), shadow.tokens, len(guessed))
            guessed.append(token)
            shadow.tokens.append(token)

    def _span(self, shadow: Sequence, count: int, *, wants_logits: bool) -> Span:
        end = shadow.computed + count
        return Span(
            tokens=np.array(shadow.tokens[shadow.computed : end], np.int32),
            start=shadow.computed,
            block_table=np.array(shadow.blocks[: self.cache.pool.blocks_for(end)], np.int32),
            outputs=np.array([count - 1] if wants_logits else [], np.int32),
        )

    def _forward(self, spans: list[Span]) -> Floats:
        began = self._clock()
        logits = self.model.forward(spans)
        rows = sum(len(span.tokens) for span in spans)
        attended = sum(len(span.tokens) * span.start for span in spans)
        self.cost.observe(rows, attended, sum(len(span.outputs) for span in spans), self._clock() - began)
        return logits
