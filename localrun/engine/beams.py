"""Beam search: of all answers the likeliest that can be found by following the `n` best beginnings at a time (Sutskever et al. 2014; the
length penalty is that of Wu et al. 2016 in its simple form: sum of log-probabilities / length ** penalty).

Each beginning is a sequence of its own; they share the K/V of what they have in common, block by block, and go on in step: when the logits
of all are there, the best continuations of any of them are the next beginnings. Where one has several continuations it is forked, where it
has none it is dropped. An answer that ends (its end of turn among the best n, a stop string, a limit) is set aside; the search is over when
none of the beginnings can still become better than the worst of n that are set aside.

The likelihoods are the model's own: sampling options have no part in it. Knows tokens and logits; which sequences run when is not known
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from localrun.engine.answer import Answer
from localrun.engine.jobs import Undrafted
from localrun.engine.sampler import logprobs_of
from localrun.engine.selection import Floats
from localrun.engine.sequence import Sequence
from localrun.messages import Finished, FinishReason, FromRunner, Piece, Started, ToolCall
from localrun.models.model import RowPeaks


@dataclass(frozen=True)
class Ended:
    """An answer that is complete."""

    tokens: list[int]
    logprob: float
    reason: FinishReason
    n_output: int

    def score(self, length_penalty: float) -> float:
        return _score(self.logprob, self.n_output, length_penalty)


@dataclass(eq=False)
class Beam(Undrafted):
    """One beginning: a job of the engine."""

    search: BeamSearch
    seq: Sequence
    logprob: float = 0.0
    candidates: list[tuple[int, float]] | None = None
    """The likeliest tokens to follow and their log-probabilities, once its pass is made."""

    def outputs(self, start: int, count: int, n_draft: int) -> range:
        return range(0) if start + count < len(self.seq.tokens) else range(count - 1, count)

    def started(self) -> list[FromRunner]:
        return self.search.started(self)

    def take(self, rows: Floats, draft: tuple[int, ...], peaks: list[RowPeaks] | None) -> int:
        for row in rows:
            self.candidates = logprobs_of(row, 0, 2 * self.search.n).top
        return 0

    def cancelled(self, now: float) -> Finished:
        return self.search.cancelled(now)


@dataclass(frozen=True)
class Turn:
    """What one step of the search decides: `go_on`: beams with the token that follows; `forks`: the same for further copies of a beam;
    `dropped`: beams that end here."""

    go_on: list[tuple[Beam, int, float]]
    forks: list[tuple[Beam, int, float]]
    dropped: list[Beam]


class BeamSearch:
    """`prompt`: the sequence that all begin as. `ends(tokens)`: whether the text of an answer's tokens holds a stop string."""

    def __init__(
        self,
        prompt: Sequence,
        n: int,
        length_penalty: float,
        answer: Answer,
        eog_ids: frozenset[int],
        max_tokens: int,
        ends: Callable[[list[int]], bool],
        dropped_messages: int = 0,
        dropped_tokens: int = 0,
    ) -> None:
        self.request_id = prompt.request_id
        self.adapter = prompt.adapter
        self._dropped = (dropped_messages, dropped_tokens)
        self.n = n
        prompt.search = prompt.request_id, n
        self.beams = [Beam(self, prompt)]
        self._penalty = length_penalty
        self._answer = answer
        self._eog_ids = eog_ids
        self._max_tokens = max_tokens
        self._ends = ends
        self._n_prompt = prompt.n_prompt
        self._prompt = prompt
        self._ended: list[Ended] = []
        self._names = 0
        self._started = False
        self._first_at: float | None = None
        self.n_turns = 0

    @property
    def ready(self) -> bool:
        """All beams have had their pass."""
        return all(beam.candidates is not None for beam in self.beams)

    def new_name(self) -> str:
        """No request of a client is called so."""
        self._names += 1
        return f"{self.request_id}\0beam {self._names}"

    def turn(self, now: float) -> Turn:
        """Decides how the search goes on; nothing goes on when it is over. The beams are changed by `follow`."""
        self._first_at = self._first_at or now
        self.n_turns += 1
        options = [
            (beam.logprob + logprob, -i, -token, beam)
            for i, beam in enumerate(self.beams)
            for token, logprob in beam.candidates or []
            if logprob > -math.inf
        ]
        options.sort(key=lambda option: option[:3], reverse=True)
        chosen: list[tuple[Beam, int, float]] = []
        for rank, (total, _, negative, beam) in enumerate(options[: 2 * self.n]):
            if len(chosen) == self.n:
                break
            token = -negative
            tokens = [*beam.seq.tokens, token]
            answered = len(tokens) - self._n_prompt
            if token in self._eog_ids:
                if rank < self.n:
                    self._ended.append(Ended(tokens, total, "stop", answered))
            elif self._ends(tokens[self._n_prompt :]):
                self._ended.append(Ended(tokens, total, "stop", answered))
            elif len(tokens) >= beam.seq.limit or 0 <= self._max_tokens <= answered:
                self._ended.append(Ended(tokens, total, "length", answered))
            else:
                chosen.append((beam, token, total))
        self._ended = sorted(self._ended, key=lambda one: -one.score(self._penalty))[: self.n]
        if self._is_over(chosen):
            chosen = []
        go_on: list[tuple[Beam, int, float]] = []
        forks: list[tuple[Beam, int, float]] = []
        seen = set[int]()
        for beam, token, total in chosen:
            (forks if id(beam) in seen else go_on).append((beam, token, total))
            seen.add(id(beam))
        return Turn(go_on, forks, [beam for beam in self.beams if id(beam) not in seen])

    def follow(self, turn: Turn, copies: list[Sequence]) -> list[Beam]:
        """Carries a turn out: `copies` are the sequences of its forks, which end before the token. Returns the forks' beams."""
        born = []
        for (_, token, total), seq in zip(turn.forks, copies, strict=True):
            seq.tokens.append(token)
            born.append(Beam(self, seq, total))
        for beam, token, total in turn.go_on:
            beam.seq.tokens.append(token)
            beam.logprob, beam.candidates = total, None
        self.beams = [beam for beam, _, _ in turn.go_on] + born
        return born

    def started(self, beam: Beam) -> list[FromRunner]:
        if self._started:
            return []
        self._started = True
        seq = beam.seq
        return [
            Started(
                request_id=self.request_id,
                prompt_tokens=seq.n_prompt,
                cached_tokens=seq.n_cached,
                seed=0,
                dropped_messages=self._dropped[0],
                dropped_tokens=self._dropped[1],
                near_miss=beam.near_miss,
            )
        ]

    def result(self, now: float) -> list[FromRunner]:
        """The best answer, as text and end."""
        best = self._ended[0]
        answered = best.tokens[self._n_prompt :]
        text, thinking, stop = "", "", None
        calls: list[ToolCall] = []
        for token in answered:
            if token in self._eog_ids:
                break
            shown = self._answer.push(token, None)
            text, thinking, calls = text + shown.text, thinking + shown.thinking, calls + shown.tool_calls
            if shown.stop is not None:
                stop = shown.stop
                break
        if stop is None:
            shown = self._answer.end()
            text, thinking, calls = text + shown.text, thinking + shown.thinking, calls + shown.tool_calls
        piece = Piece(request_id=self.request_id, text=text, thinking=thinking, tool_calls=calls)
        return [piece, self._finished(best, now, stop)]

    def cancelled(self, now: float) -> Finished:
        longest = max(self.beams, key=lambda beam: beam.logprob)
        ended = Ended(longest.seq.tokens, longest.logprob, "cancelled", len(longest.seq.tokens) - self._n_prompt)
        return self._finished(ended, now, None)

    def _is_over(self, chosen: list[tuple[Beam, int, float]]) -> bool:
        """Log-probabilities only fall, so the best that a beginning can still reach is bounded: as it is now, at the length that suits the
        penalty best."""
        if not chosen or len(self._ended) < self.n:
            return not chosen
        limit = self._prompt.limit if self._max_tokens < 0 else min(self._prompt.limit, self._n_prompt + self._max_tokens)
        longest = max(1, limit - self._n_prompt)
        now = len(chosen[0][0].seq.tokens) + 1 - self._n_prompt
        reach = max(_score(total, longest if self._penalty > 0 else now, self._penalty) for _, _, total in chosen)
        return self._ended[-1].score(self._penalty) >= reach

    def _finished(self, ended: Ended, now: float, stop: str | None) -> Finished:
        prompt = self._prompt
        scheduled = prompt.scheduled_at if prompt.scheduled_at is not None else now
        first = self._first_at if self._first_at is not None else now
        return Finished(
            request_id=self.request_id,
            reason=ended.reason,
            stop=stop,
            prompt_tokens=self._n_prompt,
            cached_tokens=prompt.n_cached,
            completion_tokens=ended.n_output,
            queue_s=scheduled - prompt.arrival,
            prefill_s=first - scheduled,
            decode_s=now - first,
            first_token_s=now - prompt.arrival,
            context=ended.tokens,
            passes=self.n_turns,
            logprob=ended.logprob,
        )


def fork_of(seq: Sequence, name: str) -> Sequence:
    """A sequence that says the same and has nothing computed yet."""
    copy = replace(
        seq, request_id=name, tokens=list(seq.tokens), blocks=[], saves={}, draft=[], computed=0, in_tree=0, tree_cursor=None, slot=-1
    )
    copy.n_prompt = seq.n_prompt
    return copy


def _score(logprob: float, length: int, penalty: float) -> float:
    return float(logprob / max(1, length) ** penalty)
