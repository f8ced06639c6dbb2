"""Endless answers in a bounded context, without a pause: attention sinks and a window of the latest tokens (`overflow: "sinks"`).

When the context is full, the first few tokens stay (attention leans on them: Xiao et al. 2023, StreamingLLM) and the older half of the rest
goes. Positions are those in the window, as that paper has them: what stays moves to the front. K is kept rotated by its position, so it is
not moved but computed anew there, which also frees it from what it had taken from tokens that are gone: after a shift the context is what
the model makes of these tokens alone, whoever computes them, in whatever order, to the bit.

What will stay is known long before the shift. While the answer goes on, a Preparation reads it into the prefix tree, a block or two at a
time, about one row for each token of the answer; when the shift comes nearly all is there. Without room or time for that, the rest is read
at the shift, which then takes longer; the text is the same. `overflow: "shift"` drops the same tokens and reads what stays at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrun.engine.jobs import Generation, Undrafted
from localrun.engine.selection import Floats
from localrun.engine.sequence import Sequence
from localrun.messages import Finished
from localrun.models.model import RowPeaks

STEP_TOKENS = 32
"""Tokens read ahead at a time."""


@dataclass
class Preparation(Undrafted):
    """Reads a part of what an answer's context will be after its next shift. Says nothing to anybody."""

    seq: Sequence

    def outputs(self, start: int, count: int, n_draft: int) -> range:
        return range(0)

    def take(self, rows: Floats, draft: tuple[int, ...], peaks: list[RowPeaks] | None) -> int:
        self.done = not self.seq.pending
        return 0

    def cancelled(self, now: float) -> Finished:
        raise AssertionError("nobody knows of it")


def preparation_id(request_id: str) -> str:
    """No request of a client is called so."""
    return f"{request_id}\0next window"


def next_preparation(job: Generation, now: float) -> Preparation | None:
    """What is to be read ahead for an answer now; None where it is too little."""
    seq = job.seq
    stays = seq.after_shift()
    whole = len(stays) - len(stays) % STEP_TOKENS
    if whole <= job.n_prepared:
        return None
    job.n_prepared = whole
    prepared = Sequence(
        preparation_id(seq.request_id),
        stays[:whole],
        seq.limit,
        now,
        priority=seq.priority + 1,
        adapter=seq.adapter,
        adapter_scale=seq.adapter_scale,
        max_chunk=STEP_TOKENS,
    )
    return Preparation(prepared)
