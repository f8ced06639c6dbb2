"""Who computes what in the next step. Decides only: no numerics, no text, no clock of its own; everything it weighs is handed to it.

A step takes every running sequence's next token first, then chunks of prompts while the step's expected time stays within `target_s`, so
that a long prompt never stops other people's streams. Sequences are served in the order of arrival + priority * LEVEL_S: lower priority
numbers first, but whoever has waited long enough comes before any newcomer, so nobody starves. A full pool preempts the last in that order:
its blocks go to the tree, it waits, and computes again what the tree has lost meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localrun.engine.cache import KVCache
from localrun.engine.cost import CostModel
from localrun.engine.sequence import Phase, Sequence
from localrun.errors import Busy

LEVEL_S = 30.0
"""Seconds of waiting that one level of priority is worth."""
MIN_CHUNK = 16
"""A prompt advances by this much even when the running streams alone take the step's whole time."""
TILE = 16
"""Rows that matrix instructions take at a time."""
_LEEWAY = 0.05
"""By so much of its time a step may become longer for a full tile."""
ALIGN_FROM = 128
"""Chunks this large end where a block ends, so that another prompt with the same beginning can go on from there."""


@dataclass(frozen=True)
class Slice:
    """Tokens start..start+count-1 of a sequence, its draft following."""

    seq: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.count + len(self.draft)

    @property
    def attended(self) -> int:
        """(row, earlier position) pairs."""
        return self.rows * (self.start + (self.rows + 1) // 2)

    @property
    def outputs(self) -> int:
        """Rows whose logits will be wanted."""
        if self.seq.pools:
            return 0
        return self.rows if self.seq.wants_all_rows else 1 + len(self.draft) if self.completes else 0

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be chosen after this."""
        return self.start + self.count == len(self.seq.tokens)


@dataclass
class Plan:
    slices: list[Slice] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.slices)

    @property
    def attended(self) -> int:
        return sum(s.attended for s in self.slices)

    @property
    def outputs(self) -> int:
        return sum(s.outputs for s in self.slices)


class Scheduler:
    """`max_rows`: of one pass. `max_running`: sequences at a time (with recurrent state: as half of the slots allow; the rest is for
    snapshots). `max_waiting`: queued beyond those, before Busy is raised.
    """

    def __init__(
        self,
        cache: KVCache,
        cost: CostModel,
        *,
        max_rows: int,
        max_running: int = 64,
        max_waiting: int = 512,
        target_s: float = 0.25,
        alone_s: float = 1.0,
    ) -> None:
        self.cache = cache
        self.cost = cost
        self.max_rows = max_rows
        self.max_running = min(max_running, max_rows, max_rows if cache.states is None else max(1, cache.states.n_slots // 2))
        self.max_waiting = max_waiting
        self.target_s = target_s
        self.alone_s = alone_s
        """Time of a step in which nobody waits for a token: shorter means quicker to react to a newcomer or a cancellation."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        return self.running + self.waiting

    def add(self, seq: Sequence, *, accepted: bool = False) -> None:
        """Queues a sequence. Raises Busy when the queue is full, but for those that belong to a request that has been accepted."""
        if not accepted and len(self.waiting) >= self.max_waiting + max(0, self.max_running - len(self.running)):
            raise Busy
        seq.phase = Phase.WAITING
        self.waiting.append(seq)

    def fork(self, seq: Sequence, copy: Sequence) -> None:
        """Adds a copy of a sequence: it runs beside it with the same blocks, or, where no place is free, is read again later."""
        if seq.phase is Phase.RUNNING and len(self.running) < self.max_running and self.cache.fork(seq, copy):
            copy.phase = Phase.RUNNING
            self.running.append(copy)
        else:
            self.add(copy, accepted=True)

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, done or cancelled, and its blocks from it."""
        if seq.finished:
            return
        (self.running if seq.phase is Phase.RUNNING else self.waiting).remove(seq)
        seq.phase = Phase.FINISHED
        self.cache.drop(seq)

    def plan(self, now: float) -> Plan:
        """The next step. Blocks for it are allocated; sequences that had to give way are back in the queue and listed."""
        plan = Plan()
        self._make_way(plan)
        for seq in sorted((s for s in self.running if s.is_decoding), key=_order):
            if seq.phase is Phase.RUNNING:
                self._plan_token(plan, seq)
        seconds = self._time_for(plan)
        waiting = [s for s in self.waiting if not s.held]
        reading = sorted([s for s in self.running if s.pending and not s.is_decoding] + waiting, key=_order)
        open_to_more, searches = True, self._searches()
        for i, seq in enumerate(reading):
            if plan.rows >= self.max_rows:
                break
            if seq.phase is Phase.WAITING:
                if seq.search is not None and seq.search[0] not in searches:
                    # Beams that cannot all run would wait for each other for ever. Only later searches have to wait for that.
                    searches[seq.search[0]] = seq.search[1]
                    if sum(searches.values()) > self.max_running:
                        continue
                open_to_more = open_to_more and self._admit(plan, seq, now)
                if not open_to_more:  # nobody overtakes one who waits for room
                    continue
            if not self._plan_chunk(plan, seq, self._share(plan, seq, seconds, reading[i + 1 :])):
                break
        return plan

    def _time_for(self, plan: Plan) -> float:
        """How long the step may take."""
        if not plan.slices:
            return self.alone_s
        return self._time_beside(len(plan.slices), sum(s.start for s in plan.slices))

    def _time_beside(self, streams: int, attended: int) -> float:
        """The target, but where the streams' next tokens alone (no drafts) take most of it, prompts get as much time again: with a few rows
        a step they would cost the streams nearly as much, and never be read."""
        if not self.cost.knows(streams):
            return self.target_s
        return max(self.target_s, 2 * self.cost.predict(streams, attended, streams))

    def time_for_drafts(self, decoding: list[Sequence]) -> float:
        """How long a step may become by drafts of these sequences: half of its time where prompts are to be read, too."""
        time_s = self._time_beside(len(decoding), sum(seq.computed for seq in decoding))
        return time_s / 2 if len(decoding) < len(self.running) or self.waiting else time_s

    def _searches(self) -> dict[str, int]:
        """Beam searches that have begun: how many places each needs."""
        return dict(seq.search for seq in self.sequences if seq.search is not None and seq.scheduled_at is not None)

    def _make_way(self, plan: Plan) -> None:
        """The first in the queue, when there is no room for it, takes the place of the last that runs with a lower priority."""
        begun = self._searches()
        waiting = [s for s in self.waiting if not s.held and (s.search is None or s.search[0] in begun)]
        if not waiting or not self.running:
            return
        head, last = min(waiting, key=_order), max(self.running, key=_order)
        if last.priority > head.priority and _order(last) > _order(head) and not self.has_room(head):
            self._preempt(plan, last)

    def has_room(self, seq: Sequence) -> bool:
        """A place, and blocks for all it has to read, besides what those that run still have to read and one spare block each."""
        if not self.running:
            return True
        promised = sum(self.cache.missing(s, s.pending) + 1 for s in self.running)
        return len(self.running) < self.max_running and self.cache.missing(seq, seq.pending) + promised <= self.cache.pool.n_obtainable

    def _plan_token(self, plan: Plan, seq: Sequence) -> None:
        """The next token of a running sequence, its draft with it if there is room; others, or itself, give way where blocks lack."""
        draft = tuple(seq.draft[: max(0, self.max_rows - plan.rows - 1 - len(self.running))])
        if draft and not self.cache.grow(seq, 1 + len(draft)):
            draft = ()
        while not self.cache.grow(seq, 1):
            victim = self._victim(plan)
            self._preempt(plan, victim)
            if victim is seq:
                return
        self.cache.plan_snapshots(seq, seq.computed, 1)
        plan.slices.append(Slice(seq, seq.computed, 1, draft))

    def _victim(self, plan: Plan) -> Sequence:
        planned = {id(s.seq) for s in plan.slices}
        return max((s for s in self.running if id(s) not in planned), key=_order)

    def _preempt(self, plan: Plan, seq: Sequence) -> None:
        self.running.remove(seq)
        self.cache.drop(seq)
        seq.phase = Phase.WAITING
        seq.draft = []
        seq.n_preempted += 1
        self.waiting.append(seq)
        plan.preempted.append(seq)

    def _share(self, plan: Plan, seq: Sequence, seconds: float, later: list[Sequence]) -> float:
        """The time up to which this sequence may fill the step: half of what is left when a shorter prompt stands behind it, else all.

        So a short question waits neither for the end of a book that came before it, nor does the book stand still.
        """
        if not any(s.pending < seq.pending for s in later):
            return seconds
        taken = self.cost.predict(plan.rows, plan.attended, plan.outputs)
        return taken + max(0.0, seconds - taken) / 2

    def _admit(self, plan: Plan, seq: Sequence, now: float) -> bool:
        """Takes a waiting sequence in, if there is room for it."""
        if len(self.running) >= self.max_running or seq in plan.preempted or not self.cache.hold(seq):
            return False
        self.cache.adopt(seq)
        if not self.has_room(seq):
            self.cache.drop(seq)
            seq.n_cached = 0 if not seq.n_preempted else seq.n_cached
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.phase = Phase.RUNNING
        if seq.scheduled_at is None:
            seq.scheduled_at = now
        return True

    def _plan_chunk(self, plan: Plan, seq: Sequence, seconds: float) -> bool:
        """As many tokens of a prompt as the step's time allows. False: no more this step."""
        if not self.cache.hold(seq):  # it has lost its slot when its context was shifted
            return False
        self.cache.adopt(seq)
        if self._will_be_shared(plan, seq):
            return True
        # Sequences that are pooled come in a pass of their own.
        taken = sum(s.rows for s in plan.slices if s.seq.pools == seq.pools)
        whole = max(0, seq.whole - seq.computed)
        room = min(whole or seq.pending, self.max_rows - taken, seq.max_chunk)
        per_row = seq.computed + room // 2
        count = self._rows_within(plan, seconds, per_row, room)
        if count < min(room, MIN_CHUNK):
            if any(not s.completes or s.count > 1 for s in plan.slices):
                return False
            count = min(room, MIN_CHUNK)
            at_least = self.cost.predict(plan.rows + count, plan.attended + count * per_row, plan.outputs)
            count = max(count, self._rows_within(plan, at_least, per_row, room))  # more rows, where they come at no more cost
        elif count < room:
            count = self._whole_tiles(plan, seconds, per_row, count, room)
        if count < whole:
            if room < whole or any(not s.seq.is_decoding for s in plan.slices):
                return False
            count = whole
        if not whole and ALIGN_FROM <= count < seq.pending:
            count -= (seq.computed + count) % self.cache.pool.block_tokens
        count = seq.uncut(count, self.max_rows - taken)
        if not count:
            return False
        while not self.cache.grow(seq, count):
            victim = self._victim(plan)
            if victim is seq:
                return False
            self._preempt(plan, victim)
        self.cache.plan_snapshots(seq, seq.computed, count)
        plan.slices.append(Slice(seq, seq.computed, count))
        return True

    def _rows_within(self, plan: Plan, seconds: float, per_row: int, most: int) -> int:
        return self.cost.rows_within(seconds, plan.rows, plan.attended, plan.outputs, per_row, most)

    def _whole_tiles(self, plan: Plan, seconds: float, per_row: int, count: int, most: int) -> int:
        """A chunk with which the pass fills its last tile, or does not begin one: a tile of a few rows costs as much as a full one, which a
        straight line between sizes does not show."""
        begun = (plan.rows + count) % TILE
        if not begun or plan.rows + count < 2 * TILE:
            return count
        more = count + TILE - begun
        if more <= most and self.cost.predict(plan.rows + more, plan.attended + more * per_row, plan.outputs) <= seconds * (1 + _LEEWAY):
            return more
        return count - begun if count - begun >= MIN_CHUNK else count

    def _will_be_shared(self, plan: Plan, seq: Sequence) -> bool:
        """Whether this step computes, for another sequence, the block that this one needs next: then it waits a step and takes it from the
        tree."""
        if not seq.may_reuse:
            return False
        if self.cache.states is not None:  # what can be taken is a state, and that is only where a snapshot will be
            return any(
                seq.computed < position < len(seq.tokens) and s.seq.kind == seq.kind and s.seq.keys[:position] == seq.keys[:position]
                for s in plan.slices
                for position in s.seq.saves
            )
        end = seq.computed - seq.computed % self.cache.pool.block_tokens + self.cache.pool.block_tokens
        return end < len(seq.tokens) and any(
            s.seq.may_reuse
            and s.start <= seq.computed
            and s.start + s.count >= end
            and s.seq.kind == seq.kind
            and s.seq.keys[:end] == seq.keys[:end]
            for s in plan.slices
        )


def _order(seq: Sequence) -> float:
    return seq.arrival + LEVEL_S * seq.priority
