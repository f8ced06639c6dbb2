"""One step of the engine: schedule > prepare > forward > sample > commit. Owns the jobs, the cache and the model; knows no pipe, no thread.

Everything here happens in one thread, between two forward passes: a cancelled job has given everything back when `cancel` returns.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate, repeat
from math import inf
from typing import TypeVar

import numpy as np

from localrun.engine.adapters import AdapterShelf
from localrun.engine.beams import Beam, BeamSearch, fork_of
from localrun.engine.cache import KVCache
from localrun.engine.cost import CostModel
from localrun.engine.drafting import Drafter, Wish
from localrun.engine.jobs import Generation, Job
from localrun.engine.parts import as_localrun_error
from localrun.engine.restoring import Keeper
from localrun.engine.scheduler import Plan, Scheduler, Slice
from localrun.engine.selection import Floats
from localrun.engine.sequence import Sequence
from localrun.engine.sessions import SessionStore
from localrun.engine.states import StateSlots
from localrun.engine.vectors import Batch, Pooled
from localrun.engine.window import Preparation, next_preparation, preparation_id
from localrun.errors import BadRequest, DeadlineExceeded, LocalrunError
from localrun.messages import Failed, FromRunner, Inspected
from localrun.models.model import BLOCK_TOKENS, Model, RowPeaks, Span

log = logging.getLogger(__name__)
T = TypeVar("T", Floats, list[RowPeaks])

Emit = Callable[[FromRunner], None]

_WORTH_EXPLAINING = 256
"""Tokens that must be read again, and that the cache must have held, for a near miss to be told."""
_NEAR_MISSES = 8
"""Of the latest ones that are remembered."""


class Engine:
    """`model` has had its KV pool of n_blocks allocated, and n_slots for recurrent state if it has any. `emit` gets every event, in order.
    `say` writes tokens as a person reads them.
    """

    def __init__(
        self,
        model: Model,
        n_blocks: int,
        emit: Emit,
        *,
        n_slots: int = 0,
        say: Callable[[list[int]], str] = repr,
        clock: Callable[[], float] = time.monotonic,
        max_running: int = 64,
        max_waiting: int = 512,
        target_s: float = 0.25,
        drafter: Drafter | None = None,
        sessions: SessionStore | None = None,
    ) -> None:
        self.model = model
        self.drafter = drafter
        states = StateSlots(n_slots, model.copy_state) if model.info.state_bytes else None
        self.cache = KVCache(n_blocks, BLOCK_TOKENS, model.copy_block, states)
        self.keeper = None if sessions is None else Keeper(sessions, self.cache, model, clock)
        self.cost = CostModel(model.info.max_batch)
        self.scheduler = Scheduler(
            self.cache, self.cost, max_rows=model.info.max_batch, max_running=max_running, max_waiting=max_waiting, target_s=target_s
        )
        self.adapters = AdapterShelf(model)
        self._emit = emit
        self._clock = clock
        self._say = say
        self._jobs: dict[str, Job] = {}
        self._batches: dict[str, Batch] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._preemptions = self._passes = self._rows = 0
        self._busy_s = 0.0
        self._near_misses: deque[str] = deque(maxlen=_NEAR_MISSES)
        self._reported: set[str] = set()
        """Jobs whose `started` has been sent."""

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def inspected(self, request_id: str) -> Inspected:
        """How things stand, between two steps."""
        pool, tree = self.cache.pool, self.cache.tree
        return Inspected(
            request_id=request_id,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks=pool.n_blocks,
            kv_blocks_held=pool.n_held,
            kv_blocks_cached=pool.n_cached,
            block_tokens=pool.block_tokens,
            evicted_blocks=tree.n_evicted,
            copied_blocks=self.cache.n_copied,
            preemptions=self._preemptions,
            passes=self._passes,
            rows=self._rows,
            busy_s=self._busy_s,
            near_misses=list(self._near_misses),
            **self._slots(),
        )

    def _slots(self) -> dict[str, int]:
        """How recurrent state stands, as Inspected names it."""
        states = self.cache.states
        if states is None:
            return {}
        held = states.n_slots - states.n_free - states.n_snapshots
        return {"state_slots": states.n_slots, "state_snapshots": states.n_snapshots, "state_slots_held": held,
                "evicted_snapshots": states.n_evicted}  # fmt: skip

    def submit(self, job: Job) -> None:
        """Queues a job. Raises Busy, or LocalrunError when its id is taken; its adapter is given back then."""
        try:
            self._check_free(job.seq.request_id)
            if job.seq.adapter is not None:
                self.adapters.bring_in(job.seq.adapter)
            self.scheduler.add(job.seq)
        except BaseException:
            self.adapters.release(job.seq.adapter)
            raise
        self._jobs[job.seq.request_id] = job
        if self.keeper is not None and isinstance(job, Generation) and job.keeps:
            self.keeper.begin(job.seq)

    def submit_batch(self, batch: Batch) -> None:
        """Queues the texts of a request. Raises as `submit`."""
        self._check_free(batch.request_id)
        if batch.done:
            self._emit(batch.result())
            return
        self._feed(batch, accepted=False)
        self._batches[batch.request_id] = batch

    def submit_search(self, search: BeamSearch) -> None:
        """Queues a beam search. Raises as `submit`; BadRequest when not all of its beams can run at a time."""
        most = self.scheduler.max_running
        if search.n > most:
            raise BadRequest(f"num_beams: {search.n} beams cannot run at a time, this model has room for {most}", param="num_beams")
        self.submit(search.beams[0])
        self._searches[search.request_id] = search

    def _take_turns(self, taken: list[Slice]) -> None:
        """Lets beam searches go on all of whose beams have had their pass."""
        jobs = [self._job(s.seq) for s in taken if s.seq.request_id in self._jobs]
        for search in {job.search.request_id: job.search for job in jobs if isinstance(job, Beam)}.values():
            if not search.ready:
                continue
            now = self._clock()
            turn = search.turn(now)
            copies = [fork_of(beam.seq, search.new_name()) for beam, _, _ in turn.forks]
            for (beam, _, _), copy in zip(turn.forks, copies, strict=True):
                self.scheduler.fork(beam.seq, copy)
            for beam in turn.dropped:
                self._remove(beam)
            for beam in search.follow(turn, copies):
                self._jobs[beam.seq.request_id] = beam
                self._reported.add(beam.seq.request_id)
            if not search.beams:
                self._end_search(search)
                for event in search.result(now):
                    self._emit(event)

    def _end_search(self, search: BeamSearch) -> None:
        del self._searches[search.request_id]
        for beam in search.beams:
            self._remove(beam)
        self.adapters.release(search.adapter)

    def _feed(self, batch: Batch, *, accepted: bool) -> None:
        for job in batch.next_jobs(self._clock()):
            self.scheduler.add(job.seq, accepted=accepted)
            self._jobs[job.seq.request_id] = job
            accepted = True

    def _check_free(self, request_id: str) -> None:
        if request_id in self._jobs or request_id in self._batches or request_id in self._searches:
            raise LocalrunError(f"request id {request_id!r} is in use")

    def cancel(self, request_id: str) -> None:
        """Ends a job now; an id that is unknown or has ended is fine."""
        if request_id in self._batches:
            batch = self._batches[request_id]
            self._remove_batch(batch)
            self._emit(batch.cancelled())
        elif request_id in self._searches:
            search = self._searches[request_id]
            event = search.cancelled(self._clock())
            self._end_search(search)
            self._emit(event)
        elif request_id in self._jobs:
            job = self._jobs[request_id]
            self._remove(job)
            self._emit(job.cancelled(self._clock()))

    def withdraw(self, job: Job, error: LocalrunError | None) -> None:
        """Ends a job that was never submitted: with an error, or cancelled."""
        self.adapters.release(job.seq.adapter)
        if error is None:
            self._emit(job.cancelled(self._clock()))
        else:
            self._emit(Failed(request_id=job.seq.request_id, code=error.code, message=str(error), param=error.param))

    def fail(self, request_id: str, error: LocalrunError) -> None:
        """Ends a job with an error, and the batch that it belongs to; one that has ended already is fine."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if isinstance(job, Preparation):
            self._remove(job)  # it is read when it is needed
            return
        if isinstance(job, Beam):
            request_id = job.search.request_id
            self._end_search(job.search)
        elif isinstance(job, Pooled):
            request_id = job.batch.request_id
            self._remove_batch(job.batch)
        else:
            self._remove(job)
        self._emit(Failed(request_id=request_id, code=error.code, message=str(error), param=error.param))

    def step(self) -> None:
        """One forward pass and what it brings. Does nothing without work."""
        plan = self._schedule()
        pooling = Plan([s for s in plan.slices if s.seq.pools])
        reading = Plan([s for s in plan.slices if not s.seq.pools])
        if pooling.slices:
            self._pool(pooling)
        if reading.slices:
            spans = self._prepare(reading)
            logits = self._forward(reading, spans)
            if logits is not None:
                self._commit(self._sample(reading, logits))
        elif not plan.slices and self._jobs and not plan.preempted and not any(seq.held for seq in self.scheduler.sequences):
            self._give_up()

    def check(self) -> None:
        """Raises AssertionError where blocks, tables and tree contradict each other."""
        shadows = [] if self.keeper is None else self.keeper.shadows
        self.cache.check([*self.scheduler.sequences, *shadows])
        if self.drafter is not None:
            self.drafter.check()

    def _schedule(self) -> Plan:
        now = self._clock()
        for seq in self.scheduler.sequences:
            if seq.deadline is not None and seq.deadline <= now:
                late = DeadlineExceeded(f"the request was not done within its deadline of {seq.deadline - seq.arrival:g} s")
                self.fail(seq.request_id, late)
        if self.keeper is not None and self.keeper.is_restoring:
            self.keeper.restore(self.scheduler.target_s / 4 if self.scheduler.running else self.scheduler.target_s)
        self._draft()
        self._prepare_shifts(now)
        plan = self.scheduler.plan(now)
        for seq in [seq for seq in self.scheduler.waiting if isinstance(self._job(seq), Preparation)]:
            self._remove(self._job(seq))  # it had to give way
        self._preemptions += len(plan.preempted)
        for s in plan.slices:
            job = self._job(s.seq)
            if s.seq.request_id not in self._reported:
                self._reported.add(s.seq.request_id)
                self._explain_near_miss(job)
                for event in job.started():
                    self._emit(event)
        return plan

    def _explain_near_miss(self, job: Job) -> None:
        """Says where a long prompt left the tree, when the tree knew much that came very close."""
        seq = job.seq
        missed = len(seq.tokens) - seq.n_cached
        if isinstance(job, Preparation) or not seq.may_reuse or seq.pools or missed < _WORTH_EXPLAINING:
            return
        miss = self.cache.tree.near_miss(seq.keys, seq.kind)
        if miss is None or miss.beyond < _WORTH_EXPLAINING:
            return
        wanted = seq.tokens[miss.position : miss.position + len(miss.cached)]
        job.near_miss = (
            f"{miss.position} tokens agree with a cached prompt, then this one says {self._say(wanted)} where that one says "
            f"{self._say([max(token, 0) for token in miss.cached])}; {missed} tokens are read again"
        )
        self._near_misses.append(job.near_miss)
        log.info("request %s: %s", seq.request_id, job.near_miss)

    def _prepare_shifts(self, now: float) -> None:
        """Has read ahead what will stay of contexts that fill up."""
        for seq in [seq for seq in self.scheduler.running if seq.is_decoding]:
            job = self._job(seq)
            if not isinstance(job, Generation) or not job.prepares or preparation_id(seq.request_id) in self._jobs:
                continue
            ahead = next_preparation(job, now)
            if ahead is None:
                continue
            if self.scheduler.waiting or not self.scheduler.has_room(ahead.seq):  # others need the room more
                job.n_prepared = 0
                continue
            self.scheduler.add(ahead.seq, accepted=True)
            self._jobs[ahead.seq.request_id] = ahead

    def _draft(self) -> None:
        """Lets every sequence that is about to decode propose what may follow, as long as that makes the pass better for all. Recurrent
        state cannot be taken back where a guess was wrong, so models that have it get no guesses.
        """
        if self.model.info.state_bytes:
            return
        decoding = [seq for seq in self.scheduler.running if seq.is_decoding]
        rows, attended = len(decoding), sum(seq.computed for seq in decoding)
        if not self.cost.knows(rows):
            return
        most_s = self.scheduler.time_for_drafts(decoding)
        for seq in decoding:
            room = min(seq.limit - len(seq.tokens) - 1, self.model.info.max_batch - rows)
            seq.draft = self._job(seq).draft(self._cost_of_more(rows, attended, seq.computed, most_s), len(decoding) - 1, room)
            rows += len(seq.draft)
            attended += len(seq.draft) * seq.computed
        if self.drafter is not None and not self.drafter.failed:
            self._ask_the_draft_model(self.drafter, decoding, rows, attended, most_s)

    def _ask_the_draft_model(self, drafter: Drafter, decoding: list[Sequence], rows: int, attended: int, most_s: float) -> None:
        """Guesses for those whose own past suggests nothing."""
        wishes = []
        guess_s = drafter.seconds(len(decoding)) / max(1, len(decoding))
        for seq in decoding:
            room = min(seq.limit - len(seq.tokens) - 1, self.model.info.max_batch - rows)
            cost = self._cost_of_more(rows, attended, seq.computed, most_s)
            most = 0 if seq.draft else self._job(seq).wish(cost, guess_s, len(decoding) - 1, room)
            if most:
                wishes.append(Wish(seq, self._job(seq), most))
                rows += most
        if not wishes:
            return
        began = self._clock()
        guesses = drafter.propose(wishes, self.scheduler.target_s / 4)
        spent_s = (self._clock() - began) / len(wishes)
        for wish, guessed in zip(wishes, guesses, strict=True):
            wish.seq.draft = guessed
            if guessed:
                cost = self._cost_of_more(rows - wish.most, attended, wish.seq.computed, inf)
                self._job(wish.seq).guessed(len(guessed), cost, spent_s)

    def _cost_of_more(self, rows: int, attended: int, per_row: int, most_s: float) -> Callable[[int], float]:
        """Seconds of the pass with k more rows; more than most_s is as good as never."""

        def cost(k: int) -> float:
            seconds = self.cost.predict(rows + k, attended + k * per_row, rows + k)
            return seconds if seconds <= most_s or not k else inf

        return cost

    def _prepare(self, plan: Plan) -> list[Span]:
        return [
            Span(
                tokens=np.array([*s.seq.tokens[s.start : s.start + s.count], *s.draft], np.int32),
                start=s.start,
                block_table=np.array(s.seq.blocks[: self.cache.pool.blocks_for(s.start + s.rows)], np.int32),
                outputs=np.array(self._job(s.seq).outputs(s.start, s.count, len(s.draft)), np.int32),
                adapter=s.seq.adapter.number if s.seq.adapter is not None else 0,
                adapter_scale=s.seq.adapter_scale,
                encoded=s.seq.encoded,
                state=s.seq.slot,
                images=_images_in(s),
                snapshots=tuple((position - s.start, slot) for position, slot in s.seq.saves.items()),
            )
            for s in plan.slices
        ]

    def _forward(self, plan: Plan, spans: list[Span]) -> list[Floats] | None:
        """The logits of each slice's outputs; None when the pass failed, and with it every job in it."""
        logits = self._pass(plan, spans, self.model.forward)
        if logits is None:
            return None
        return _split(logits, [len(span.outputs) for span in spans])

    def _pass(self, plan: Plan, spans: list[Span], run: Callable[[list[Span]], Floats]) -> Floats | None:
        """What the model gives; None when it failed, and with it every job in the pass."""
        began = self._clock()
        try:
            rows = run(spans)
        except Exception as error:
            failure = as_localrun_error(error, f"a forward pass of {plan.rows} rows")
            for s in plan.slices:
                s.seq.may_reuse = False  # nothing of what it computed is to be trusted
            for s in plan.slices:
                self.fail(s.seq.request_id, failure)
            return None
        seconds = self._clock() - began
        self.cost.observe(plan.rows, plan.attended, plan.outputs, seconds)
        self._passes += 1
        self._rows += plan.rows
        self._busy_s += seconds
        return rows

    def _pool(self, plan: Plan) -> None:
        """A pass over texts whose vectors are wanted; what it brings is kept until a request has all of its own."""
        vectors = self._pass(plan, self._prepare(plan), self.model.embed)
        if vectors is None:
            return
        for s, vector in zip(plan.slices, vectors, strict=True):
            s.seq.computed = s.start + s.count
            self.cache.publish(s.seq)
            job = self._job(s.seq)
            assert isinstance(job, Pooled)
            if not s.seq.pending:
                job.take_vector(vector)
                self._remove(job)
                self._go_on(job.batch)

    def _go_on(self, batch: Batch) -> None:
        if batch.done:
            del self._batches[batch.request_id]
            self._emit(batch.result())
        else:
            self._feed(batch, accepted=True)

    def _sample(self, plan: Plan, logits: list[Floats]) -> list[Slice]:
        """Lets every job decide on its rows. Those that cannot fail alone."""
        taken = []
        counts = [len(rows) for rows in logits]
        chooses = any(n and not s.seq.wants_all_rows for s, n in zip(plan.slices, counts, strict=True))
        all_peaks: Iterable[list[RowPeaks] | None] = _split(list(self.model.peaks()), counts) if chooses else repeat(None, len(counts))
        for s, rows, peaks in zip(plan.slices, logits, all_peaks, strict=True):
            if s.seq.request_id not in self._jobs:
                continue
            s.seq.computed = s.start + s.count
            s.seq.draft = []
            try:
                job = self._job(s.seq)
                s.seq.computed += job.take(rows, s.draft, peaks)
                if s.seq.computed >= len(s.seq.tokens) and not job.done and not isinstance(job, Beam):
                    self.cache.rewind(s.seq, len(s.seq.tokens) - 1)
            except Exception as error:
                self.fail(s.seq.request_id, as_localrun_error(error, f"request {s.seq.request_id}"))
            else:
                taken.append(s)
        return taken

    def _commit(self, taken: list[Slice]) -> None:
        now = self._clock()
        for s in taken:
            job = self._jobs.get(s.seq.request_id)
            if job is None:  # it ended with another: what was read ahead for it, a search's other beams
                continue
            self.cache.publish(s.seq)
            if self.keeper is not None:
                self.keeper.save(s.seq)
            events = job.report(now)
            if job.done:
                self._remove(job)
            elif job.is_full:
                self.cache.drop(s.seq)
                s.seq.shift()
                job.shifted()
            for event in events:
                self._emit(event)
        self._take_turns(taken)

    def _give_up(self) -> None:
        """A scheduler that finds nothing to do would turn in circles for ever: that is a defect, and nobody shall wait for it."""
        log.error("nothing can be scheduled: %s", [(s.request_id, s.phase, s.computed, len(s.tokens)) for s in self.scheduler.sequences])
        for request_id in list(self._jobs):
            self.fail(request_id, LocalrunError("internal error in the runner: nothing can be scheduled"))

    def _remove_batch(self, batch: Batch) -> None:
        for job in batch.live.values():
            self._remove(job)
        del self._batches[batch.request_id]

    def _job(self, seq: Sequence) -> Job:
        return self._jobs[seq.request_id]

    def _remove(self, job: Job) -> None:
        self.scheduler.finish(job.seq)
        if isinstance(job, Generation) and (ahead := self._jobs.get(preparation_id(job.seq.request_id))) is not None:
            self._remove(ahead)
        if not isinstance(job, Preparation | Beam):
            self.adapters.release(job.seq.adapter)
        if self.keeper is not None:
            self.keeper.end(job.seq)
        if self.drafter is not None:
            self.drafter.forget(job.seq.request_id)
        del self._jobs[job.seq.request_id]
        self._reported.discard(job.seq.request_id)


def _split(rows: T, counts: list[int]) -> list[T]:
    """The first counts[0] rows, the next counts[1], ..."""
    ends = list(accumulate(counts))
    return [rows[end - n : end] for end, n in zip(ends, counts, strict=True)]


def _images_in(s: Slice) -> tuple[tuple[int, Floats], ...]:
    """The rows of images among a slice's tokens, and the index of the first of them."""
    end = s.start + s.count
    found = []
    for image in s.seq.images:
        if image.start < end and image.end > s.start:
            assert image.rows is not None
            found.append((max(image.start, s.start) - s.start, image.rows[max(s.start - image.start, 0) : end - image.start]))
    return tuple(found)
