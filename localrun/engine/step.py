"""One step of the engine: schedule > prepare > forward > sample > commit. Owns the jobs, the cache and the model; knows no pipe, no thread.

Everything here happens in one thread, between two forward passes: a cancelled job has given everything back when `cancel` returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from localrun.engine.cache import KVCache
from localrun.engine.cost import CostModel
from localrun.engine.jobs import Job
from localrun.engine.parts import as_localrun_error
from localrun.engine.scheduler import Plan, Scheduler, Slice
from localrun.engine.selection import Floats
from localrun.engine.sequence import Sequence
from localrun.errors import LocalrunError
from localrun.messages import Failed, FromRunner
from localrun.models.model import BLOCK_TOKENS, Model, Span

log = logging.getLogger(__name__)

Emit = Callable[[FromRunner], None]


class Engine:
    """`model` has had its KV pool of n_blocks allocated. `emit` gets every event, in order."""

    def __init__(
        self,
        model: Model,
        n_blocks: int,
        emit: Emit,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_running: int = 64,
        max_waiting: int = 512,
        target_s: float = 0.2,
    ) -> None:
        self.model = model
        self.cache = KVCache(n_blocks, BLOCK_TOKENS, model.copy_block)
        self.cost = CostModel(model.info.max_batch)
        self.scheduler = Scheduler(
            self.cache, self.cost, max_rows=model.info.max_batch, max_running=max_running, max_waiting=max_waiting, target_s=target_s
        )
        self._emit = emit
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._reported: set[str] = set()
        """Jobs whose `started` has been sent."""

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def submit(self, job: Job) -> None:
        """Queues a job. Raises Busy, or LocalrunError when its id is taken."""
        request_id = job.seq.request_id
        if request_id in self._jobs:
            raise LocalrunError(f"request id {request_id!r} is in use")
        self.scheduler.add(job.seq)
        self._jobs[request_id] = job

    def cancel(self, request_id: str) -> None:
        """Ends a job now; an id that is unknown or has ended is fine."""
        if request_id in self._jobs:
            job = self._jobs[request_id]
            self._remove(job)
            self._emit(job.cancelled(self._clock()))

    def fail(self, request_id: str, error: LocalrunError) -> None:
        """Ends a job with an error."""
        self._remove(self._jobs[request_id])
        self._emit(Failed(request_id=request_id, code=error.code, message=str(error), param=error.param))

    def step(self) -> None:
        """One forward pass and what it brings. Does nothing without work."""
        plan = self._schedule()
        if plan.slices:
            spans = self._prepare(plan)
            logits = self._forward(plan, spans)
            if logits is not None:
                self._commit(self._sample(plan, logits))
        elif self._jobs and not plan.preempted:
            self._give_up()

    def check(self) -> None:
        """Raises AssertionError where blocks, tables and tree contradict each other."""
        self.cache.check(self.scheduler.sequences)

    def _schedule(self) -> Plan:
        self._draft()
        plan = self.scheduler.plan(self._clock())
        for s in plan.slices:
            job = self._job(s.seq)
            if s.seq.request_id not in self._reported:
                self._reported.add(s.seq.request_id)
                for event in job.started():
                    self._emit(event)
        return plan

    def _draft(self) -> None:
        """Lets every sequence that is about to decode propose what may follow, as long as that makes the pass better for all."""
        decoding = [seq for seq in self.scheduler.running if seq.is_decoding]
        rows, attended = len(decoding), sum(seq.computed for seq in decoding)
        if not self.cost.knows(rows):
            return
        for seq in decoding:
            room = min(seq.limit - len(seq.tokens) - 1, self.model.info.max_batch - rows)
            seq.draft = self._job(seq).draft(self._cost_of_more(rows, attended, seq.computed), len(decoding) - 1, room)
            rows += len(seq.draft)
            attended += len(seq.draft) * seq.computed

    def _cost_of_more(self, rows: int, attended: int, per_row: int) -> Callable[[int], float]:
        return lambda k: self.cost.predict(rows + k, attended + k * per_row, rows + k)

    def _prepare(self, plan: Plan) -> list[Span]:
        return [
            Span(
                tokens=np.array([*s.seq.tokens[s.start : s.start + s.count], *s.draft], np.int32),
                start=s.start,
                block_table=np.array(s.seq.blocks[: self.cache.pool.blocks_for(s.start + s.rows)], np.int32),
                outputs=np.array(self._job(s.seq).outputs(s.start, s.count, len(s.draft)), np.int32),
            )
            for s in plan.slices
        ]

    def _forward(self, plan: Plan, spans: list[Span]) -> list[Floats] | None:
        """The logits of each slice's outputs; None when the pass failed, and with it every job in it."""
        began = self._clock()
        try:
            logits = self.model.forward(spans)
        except Exception as error:
            failure = as_localrun_error(error, f"a forward pass of {plan.rows} rows")
            for s in plan.slices:
                s.seq.may_reuse = False  # nothing of what it computed is to be trusted
                self.fail(s.seq.request_id, failure)
            return None
        self.cost.observe(plan.rows, plan.attended, plan.outputs, self._clock() - began)
        ends = np.cumsum([len(span.outputs) for span in spans])
        return np.split(logits, ends[:-1])

    def _sample(self, plan: Plan, logits: list[Floats]) -> list[Slice]:
        """Lets every job decide on its rows. Those that cannot fail alone."""
        taken = []
        for s, rows in zip(plan.slices, logits, strict=True):
            s.seq.computed = s.start + s.count
            s.seq.draft = []
            try:
                job = self._job(s.seq)
                s.seq.computed += job.take(rows, s.draft)
                if s.seq.computed >= len(s.seq.tokens) and not job.done:
                    self.cache.rewind(s.seq, len(s.seq.tokens) - 1)
            except Exception as error:
                self.fail(s.seq.request_id, as_localrun_error(error, f"request {s.seq.request_id}"))
            else:
                taken.append(s)
        return taken

    def _commit(self, taken: list[Slice]) -> None:
        now = self._clock()
        for s in taken:
            job = self._job(s.seq)
            self.cache.publish(s.seq)
            events = job.report(now)
            if job.done:
                self._remove(job)
            elif job.is_full:
                self.cache.drop(s.seq)
                s.seq.shift()
                job.shifted()
            for event in events:
                self._emit(event)

    def _give_up(self) -> None:
        """A scheduler that finds nothing to do would turn in circles for ever: that is a defect, and nobody shall wait for it."""
        log.error("nothing can be scheduled: %s", [(s.request_id, s.phase, s.computed, len(s.tokens)) for s in self.scheduler.sequences])
        for request_id in list(self._jobs):
            self.fail(request_id, LocalrunError("internal error in the runner: nothing can be scheduled"))

    def _job(self, seq: Sequence) -> Job:
        return self._jobs[seq.request_id]

    def _remove(self, job: Job) -> None:
        self.scheduler.finish(job.seq)
        del self._jobs[job.seq.request_id]
        self._reported.discard(job.seq.request_id)
