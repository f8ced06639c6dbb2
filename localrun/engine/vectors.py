"""Vectors and scores of many texts: a request is a `Batch`, each of its texts a job with a sequence of its own, so that texts share passes
with each other and with everything else, and a long list holds up nobody. Knows nothing of text, of blocks, or of the pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localrun.engine.jobs import Undrafted
from localrun.engine.selection import Floats
from localrun.engine.sequence import Sequence
from localrun.messages import Embed, Embedded, Finished, FromRunner, Rank, Ranked
from localrun.models.model import RowPeaks

AT_A_TIME = 64
"""Texts of one request that are in the scheduler together; the rest queue up behind whoever has come meanwhile."""


@dataclass
class Batch:
    """One request. `texts`: token ids, at least one each. `whole`: a text must come in one pass. `answer` makes the last event of the
    vectors, float32 (texts, width).
    """

    request_id: str
    texts: list[list[int]]
    answer: Callable[[Floats], FromRunner]
    whole: bool
    priority: int = 0
    live: dict[int, Pooled] = field(default_factory=dict)
    """Jobs that are in the scheduler, by the number of their text."""
    _next: int = 0
    _vectors: Floats | None = None

    @property
    def done(self) -> bool:
        return self._next == len(self.texts) and not self.live

    def next_jobs(self, now: float) -> list[Pooled]:
        """As many more as there is room for."""
        jobs = []
        while self._next < len(self.texts) and len(self.live) < AT_A_TIME:
            job = Pooled(self._sequence(self._next, now), self, self._next)
            self.live[self._next] = job
            jobs.append(job)
            self._next += 1
        return jobs

    def _sequence(self, number: int, now: float) -> Sequence:
        tokens = self.texts[number]
        return Sequence(
            f"{self.request_id}#{number}",
            tokens,
            len(tokens),
            now,
            priority=self.priority,
            may_reuse=not self.whole,
            pools=True,
            whole=len(tokens) if self.whole else 0,
        )

    def put(self, number: int, vector: Floats) -> None:
        """A text's vector (width,)."""
        if self._vectors is None:
            self._vectors = np.zeros((len(self.texts), len(vector)), np.float32)
        self._vectors[number] = vector
        del self.live[number]

    def result(self) -> FromRunner:
        """The answer, once all are done."""
        return self.answer(np.zeros((0, 0), np.float32) if self._vectors is None else self._vectors)

    def cancelled(self) -> Finished:
        return Finished(request_id=self.request_id, reason="cancelled", prompt_tokens=sum(map(len, self.texts)))


@dataclass
class Pooled(Undrafted):
    """One text of a batch."""

    seq: Sequence
    batch: Batch
    number: int

    def outputs(self, start: int, count: int, n_draft: int) -> range:
        return range(0)

    def take(self, rows: Floats, draft: tuple[int, ...], peaks: list[RowPeaks] | None) -> int:
        raise AssertionError("a text that is pooled wants no logits")

    def cancelled(self, now: float) -> Finished:
        return self.batch.cancelled()

    def take_vector(self, vector: Floats) -> None:
        """What the pass that read its last token made of it."""
        self.done = True
        self.batch.put(self.number, vector)


def embedded(asked: Embed, vectors: Floats, lengths: list[int], truncated: list[int]) -> Embedded:
    """The answer to Embed: cut first, then scaled to length 1 (a vector of zeros stays)."""
    if asked.dimensions:
        vectors = vectors[:, : asked.dimensions]
    if asked.normalize:
        vectors = normalized(vectors)
    return Embedded(
        request_id=asked.request_id,
        n=len(vectors),
        width=vectors.shape[1],
        data=np.ascontiguousarray(vectors, "<f4").tobytes(),
        prompt_tokens=lengths,
        truncated=truncated,
    )


def normalized(vectors: Floats) -> Floats:
    """Each row over its Euclidean norm."""
    wide: NDArray[np.float64] = vectors.astype(np.float64)
    norms = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    return (wide / np.where(norms > 0, norms, 1.0)).astype(np.float32)


def ranked(asked: Rank, scores: Floats, lengths: list[int], truncated: list[int]) -> Ranked:
    """The answer to Rank. scores: (documents, 1)."""
    return Ranked(request_id=asked.request_id, scores=[float(s) for s in scores.ravel()], prompt_tokens=lengths, truncated=truncated)
