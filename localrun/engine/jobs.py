"""What is asked of a sequence: an answer (`Generation`) or the likelihood of a text (`Evaluation`). A job takes the logits of its rows,
decides what they mean for its sequence, and says what to report. Knows nothing of other jobs, of blocks, or of the pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localrun.engine import ratio
from localrun.engine.answer import Answer, Shown
from localrun.engine.bans import BannedStrings, Chosen
from localrun.engine.ratio import Distribution
from localrun.engine.sampler import Sampler, logprobs_of
from localrun.engine.selection import Floats, largest, log_sum_exp
from localrun.engine.sequence import Sequence
from localrun.engine.speculate import Speculator
from localrun.messages import Evaluated, Finished, FinishReason, FromRunner, Piece, Started
from localrun.models.model import RowPeaks

if TYPE_CHECKING:
    from localrun.engine.gate import ThinkingGate
    from localrun.engine.grammar import Constraint


class Job(Protocol):
    """One request in the engine."""

    seq: Sequence
    near_miss: str
    """See Started."""

    @property
    def done(self) -> bool:
        """Nothing more is to be computed."""

    @property
    def is_full(self) -> bool:
        """Its context must be shifted before it can go on."""

    def outputs(self, start: int, count: int, n_draft: int) -> range:
        """Which of the rows start.. of its slice it wants logits of, as indices into the slice."""

    def draft(self, cost: Callable[[int], float], others: int, most: int) -> list[int]:
        """Guesses at its next tokens, at most `most`; see Speculator.draft."""

    def wish(self, cost: Callable[[int], float], guess_s: float, others: int, most: int) -> int:
        """How many guesses of a draft model it wants, at most `most`; see Speculator.wish."""

    def guess(self, row: Floats, tokens: list[int], ahead: int) -> int:
        """See drafting.Guesser."""

    def guessed(self, n: int, cost: Callable[[int], float], spent_s: float) -> None:
        """A draft model has made n guesses; see Speculator.guessed."""

    def started(self) -> list[FromRunner]:
        """What to report when it is first scheduled."""

    def take(self, rows: Floats, draft: tuple[int, ...], peaks: list[RowPeaks] | None) -> int:
        """Decides on the logits (n outputs, n_vocab), which it may change; peaks: of each row (see Model), where there are some. Returns
        how many of the draft's tokens have proved right."""

    def shifted(self) -> None:
        """Its sequence has lost tokens in the middle."""

    def report(self, now: float) -> list[FromRunner]:
        """What the last `take` has brought, the end included if it is one."""

    def cancelled(self, now: float) -> Finished:
        """The last event of a job that nobody wants any more."""


class Undrafted:
    """What jobs have in common that take no guesses at their tokens and never outgrow their context."""

    near_miss: str = ""
    done: bool = False
    is_full: bool = False

    def draft(self, cost: Callable[[int], float], others: int, most: int) -> list[int]:
        return []

    def wish(self, cost: Callable[[int], float], guess_s: float, others: int, most: int) -> int:
        return 0

    def guess(self, row: Floats, tokens: list[int], ahead: int) -> int:
        raise AssertionError(f"{type(self).__name__} takes no guesses")

    def guessed(self, n: int, cost: Callable[[int], float], spent_s: float) -> None:
        raise AssertionError(f"{type(self).__name__} takes no guesses")

    def started(self) -> list[FromRunner]:
        return []

    def shifted(self) -> None:
        raise AssertionError(f"{type(self).__name__} never outgrows its context")

    def report(self, now: float) -> list[FromRunner]:
        return []


@dataclass
class Generation:
    """An answer to a prompt."""

    seq: Sequence
    sampler: Sampler
    answer: Answer
    bans: BannedStrings
    eog_ids: frozenset[int]
    n_logprobs: int | None = None
    scores: bool = False
    max_tokens: int = -1
    speculator: Speculator | None = None
    guesser: Sampler | None = None
    """Chooses from a draft model's logits; None: no draft model is asked."""
    by_ratio: bool = False
    """Whether guesses are kept by the textbook rule (ratio.py)."""
    constraint: Constraint | ThinkingGate | None = None
    shifts: bool = False
    """Whether a full context loses its middle instead of ending the answer."""
    keeps: bool = False
    """Whether its K/V are brought back from disk, and saved there."""
    prepares: bool = False
    """Whether what stays after that is read ahead (window.py)."""
    n_prepared: int = 0
    """How many tokens of it have been, or are being, read."""
    dropped_messages: int = 0
    dropped_tokens: int = 0
    reason: FinishReason | None = None
    stop: str | None = None
    n_chosen: int = 0
    near_miss: str = ""
    n_passes: int = 0
    """Passes that brought tokens."""
    _shown: Shown = field(default_factory=Shown)
    _scores: list[float] = field(default_factory=list)
    """Log-probability of each token of the answer, where they are looked at."""
    _banned: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that must not come at a position."""
    _guesses: list[Distribution] = field(default_factory=list)
    """What the draft model's guesses were drawn from, with the textbook rule."""

    @property
    def done(self) -> bool:
        return self.reason is not None

    @property
    def is_full(self) -> bool:
        return not self.done and len(self.seq.tokens) >= self.seq.limit

    def outputs(self, start: int, count: int, n_draft: int) -> range:
        if start + count < len(self.seq.tokens) or self.max_tokens == 0:
            return range(0)
        return range(count - 1, count + n_draft)

    def draft(self, cost: Callable[[int], float], others: int, most: int) -> list[int]:
        if self.speculator is None or most < 1:
            return []
        self._guesses = []
        return self.speculator.draft(self.seq.tokens, cost, others, self._at_most(most))

    def wish(self, cost: Callable[[int], float], guess_s: float, others: int, most: int) -> int:
        if self.speculator is None or self.guesser is None or most < 1:
            return 0
        return self.speculator.wish(cost, guess_s, others, self._at_most(most))

    def _at_most(self, most: int) -> int:
        return max(0, most if self.max_tokens < 0 else min(most, self.max_tokens - self.n_chosen - 1))

    def guess(self, row: Floats, tokens: list[int], ahead: int) -> int:
        """By the draw that the answer itself will make there: the more alike the two models are, the more often it is the same token."""
        assert self.guesser is not None
        position = self.seq.position + ahead
        if not self.by_ratio:
            return self.guesser.choose(row, tokens, position)
        self._guesses.append(self.guesser.distribution(row, tokens, position))
        return ratio.guess(self._guesses[-1], self.sampler.seed, position)

    def guessed(self, n: int, cost: Callable[[int], float], spent_s: float) -> None:
        if self.speculator is not None:
            self.speculator.guessed(n, cost, spent_s)

    def started(self) -> list[FromRunner]:
        seq = self.seq
        return [
            Started(
                request_id=seq.request_id,
                prompt_tokens=seq.n_prompt,
                cached_tokens=seq.n_cached,
                seed=self.sampler.seed,
                dropped_messages=self.dropped_messages,
                dropped_tokens=self.dropped_tokens,
                near_miss=self.near_miss,
            )
        ]

    def take(self, rows: Floats, draft: tuple[int, ...], peaks: list[RowPeaks] | None) -> int:
        """Chooses row by row, for as long as what is chosen is what the draft had guessed: the same tokens as without a draft."""
        seq = self.seq
        if self.max_tokens == 0:
            self.reason = "length" if not seq.pending else None
            return 0
        accepted, before = 0, len(seq.tokens)
        for i, row in enumerate(rows):
            guess = draft[i] if self.by_ratio and i < len(draft) else None
            went_on = self._take_token(row, guess, i, None if peaks is None else peaks[i])
            accepted = i
            if not went_on or i >= len(draft) or seq.tokens[-1] != draft[i]:
                break
        self.n_passes += len(rows) > 0
        if self.speculator is not None:
            self.speculator.observe(seq.tokens[before:], accepted)
        return accepted

    def _take_token(self, row: Floats, guess: int | None, ahead: int, peaks: RowPeaks | None) -> bool:
        """Chooses the next token, and adds what must follow it. False when the next row, if there is one, is of no use.

        guess: the `ahead`-th token of the draft, where the textbook rule decides on it.
        """
        seq = self.seq
        raw = row.copy() if self.n_logprobs is not None or self.scores else None
        allowed = None if self.constraint is None else self.constraint.allowed()
        banned = self._banned.get(seq.position, ())
        if guess is None:
            token = self.sampler.choose(row, seq.tokens, seq.position, allowed, banned, peaks)
        else:
            q = self._guesses[ahead] if ahead < len(self._guesses) else Distribution.of(guess)
            p = self.sampler.distribution(row, seq.tokens, seq.position, allowed, banned, peaks)
            token = ratio.verdict(p, q, guess, self.sampler.seed, seq.position)
        logprobs = None if raw is None else logprobs_of(raw, token, self.n_logprobs or 0)
        went_on = self._add(Chosen(token, logprobs))
        if self.constraint is None or not went_on or raw is not None:
            return went_on
        forced = self.constraint.forced()
        for token in forced:
            self.sampler.forced()
            if not self._add(Chosen(token)):
                break
        return not forced

    def _add(self, chosen: Chosen) -> bool:
        """Appends a token and passes on what can be shown. False when the answer is done or full, or tokens were taken back."""
        seq = self.seq
        seq.tokens.append(chosen.token)
        self.n_chosen += 1
        if chosen.logprobs is not None:
            self._scores.append(chosen.logprobs.chosen)
        if chosen.token in self.eog_ids:
            self.reason = "stop"
            self._pass_on(self.bans.flush(), n_behind=1)
            return False
        if self.constraint is not None:
            self.constraint.accept(chosen.token)
        released, n_back = self.bans.push(chosen)
        if n_back:
            self._take_back(n_back)
            return False
        if self.constraint is not None and self.constraint.complete:
            self.reason = "stop"
        elif 0 <= self.max_tokens <= self.n_chosen or (len(seq.tokens) >= seq.limit and not self.shifts):
            self.reason = "length"
        if self.done:
            released += self.bans.flush()
        self._pass_on(released, n_behind=self.bans.n_held)
        return not self.done and not self.is_full

    def _pass_on(self, released: list[Chosen], n_behind: int) -> None:
        """Text of tokens that stay; n_behind tokens came after them. A stop string ends the answer with the token that completes it."""
        for i, chosen in enumerate(released):
            part = self.answer.push(chosen.token, chosen.logprobs if self.n_logprobs is not None else None)
            self._shown.add(part)
            if part.stop is not None:
                self.reason = "stop"
                self._drop_last(len(released) - i - 1 + n_behind)
                return

    def _take_back(self, n: int) -> None:
        """A banned string has come: its first token shall not come at that place again."""
        seq = self.seq
        token = seq.tokens[-n]
        self._drop_last(n)
        self.sampler.take_back(n)
        if self.constraint is not None:
            self.constraint.take_back(n)
        if self.speculator is not None:
            self.speculator.forget()
        # What was banned further on belonged to a text that is no more.
        self._banned = {position: tokens for position, tokens in self._banned.items() if position <= seq.position}
        self._banned.setdefault(seq.position, []).append(token)

    def _drop_last(self, n: int) -> None:
        if n:
            del self.seq.tokens[-n:]
            del self._scores[-n:]
            self.n_chosen -= n

    def shifted(self) -> None:
        self.n_prepared = 0
        if self.speculator is not None:
            self.speculator.forget()

    def report(self, now: float) -> list[FromRunner]:
        seq = self.seq
        if self.n_chosen:
            seq.last_token_at = now
            seq.first_token_at = seq.first_token_at or now
        shown, self._shown = self._shown, Shown()
        if self.done and shown.stop is None:
            shown.add(self.answer.end())
        events: list[FromRunner] = []
        if shown:
            events.append(
                Piece(
                    request_id=seq.request_id,
                    text=shown.text,
                    thinking=shown.thinking,
                    tool_calls=shown.tool_calls,
                    logprobs=shown.logprobs,
                )
            )
        if self.done:
            if shown.stop is not None:
                self.reason, self.stop = "stop", shown.stop
            events.append(self.finished(now))
        return events

    def cancelled(self, now: float) -> Finished:
        self.reason = "cancelled"
        return self.finished(now)

    def finished(self, now: float) -> Finished:
        """The last event. Times are those of this request alone."""
        seq = self.seq
        assert self.reason is not None
        scheduled = seq.scheduled_at if seq.scheduled_at is not None else now
        first = seq.first_token_at if seq.first_token_at is not None else now
        return Finished(
            request_id=seq.request_id,
            reason=self.reason,
            stop=self.stop,
            prompt_tokens=seq.n_prompt,
            cached_tokens=seq.n_cached,
            completion_tokens=self.n_chosen,
            seed=self.sampler.seed,
            queue_s=scheduled - seq.arrival,
            prefill_s=first - scheduled,
            decode_s=(seq.last_token_at or first) - first,
            first_token_s=first - seq.arrival,
            context=seq.tokens,
            dropped_tokens=seq.n_dropped,
            passes=self.n_passes,
            logprob=sum(self._scores) if self.scores else 0.0,
            tool_problems=self.answer.problems,
            thinking_tokens=self.answer.n_thinking,
            drafted_tokens=self.speculator.n_drafted if self.speculator else 0,
            accepted_tokens=self.speculator.n_accepted if self.speculator else 0,
            draft_saved_s=self.speculator.saved_s if self.speculator else 0.0,
        )


@dataclass
class Evaluation(Undrafted):
    """How likely a text is, token by token: teacher forcing, all rows' logits wanted."""

    seq: Sequence
    top: int
    ids: list[list[int]] | None = None
    _first: int = 0
    _chunk: Evaluated | None = None

    def outputs(self, start: int, count: int, n_draft: int) -> range:
        self._first = start
        return range(count)

    def started(self) -> list[FromRunner]:
        return [Started(request_id=self.seq.request_id, prompt_tokens=self.seq.n_prompt, cached_tokens=0, seed=0)]

    def take(self, rows: Floats, draft: tuple[int, ...], peaks: list[RowPeaks] | None) -> int:
        tokens, first = self.seq.tokens, self._first
        self._chunk = Evaluated(
            request_id=self.seq.request_id, first=first, tokens=tokens[first : first + len(rows)], nll=[], top_ids=[], top_logprobs=[]
        )
        for i, row in enumerate(rows):
            total = log_sum_exp(row)
            top = largest(row, self.top)
            self._chunk.top_ids.append(top.tolist())
            self._chunk.top_logprobs.append((row[top].astype(np.float64) - total).tolist())
            if self.ids is not None:
                self._chunk.logprobs.append((row[self.ids[first + i]].astype(np.float64) - total).tolist())
            if first + i + 1 < len(tokens):
                self._chunk.nll.append(total - float(row[tokens[first + i + 1]]))
        self.done = first + len(rows) == len(tokens)
        return 0

    def report(self, now: float) -> list[FromRunner]:
        seq = self.seq
        seq.last_token_at = now
        events: list[FromRunner] = [] if self._chunk is None else [self._chunk]
        self._chunk = None
        if self.done:
            events.append(self._finished("stop", now))
        return events

    def cancelled(self, now: float) -> Finished:
        return self._finished("cancelled", now)

    def _finished(self, reason: FinishReason, now: float) -> Finished:
        seq = self.seq
        scheduled = seq.scheduled_at if seq.scheduled_at is not None else now
        return Finished(
            request_id=seq.request_id,
            reason=reason,
            prompt_tokens=seq.n_prompt,
            queue_s=scheduled - seq.arrival,
            prefill_s=now - scheduled,
        )
