"""The scheduler alone, against simulated costs: no model, no text, a clock that is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from localrun.engine.cache import KVCache
from localrun.engine.cost import CostModel
from localrun.engine.scheduler import Plan, Scheduler
from localrun.engine.sequence import Sequence
from tests.fakes import FakeClock

Cost = Callable[[Plan], float]


@dataclass
class Simulated:
    """`n_tokens` to be made after a prompt of `n_prompt`."""

    seq: Sequence
    n_tokens: int
    token_times: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.token_times) == self.n_tokens

    @property
    def response_s(self) -> float:
        return self.token_times[-1] - self.seq.arrival

    @property
    def gaps(self) -> list[float]:
        """Between neighbouring tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class Simulation:
    """`cost(plan)` is how long a step takes. `static`: a new batch starts only when the last one is done to its last request."""

    def __init__(
        self,
        cost: Cost,
        *,
        n_blocks: int = 4096,
        max_rows: int = 512,
        max_running: int = 64,
        max_waiting: int = 512,
        target_s: float = 0.2,
        static: bool = False,
    ) -> None:
        self.clock = FakeClock(0.0)
        self.cache = KVCache(n_blocks, 16, lambda source, target: None)
        self.cost_model = CostModel(max_rows)
        self.scheduler = Scheduler(
            self.cache, self.cost_model, max_rows=max_rows, max_running=max_running, max_waiting=max_waiting, target_s=target_s
        )
        self.requests: list[Simulated] = []
        self.plans: list[Plan] = []
        self._cost = cost
        self._static = static
        self._held_back: list[Simulated] = []
        self._slots = max_running

    def add(self, n_tokens: int, n_prompt: int = 1, *, priority: int = 0, tokens: list[int] | None = None) -> Simulated:
        number = len(self.requests)
        tokens = tokens or [10_000 * (number + 1) + i for i in range(n_prompt)]  # no two prompts share a beginning
        request = Simulated(Sequence(f"{number}", tokens, 1 << 30, self.clock(), priority=priority), n_tokens)
        self.requests.append(request)
        self._held_back.append(request)
        return request

    def step(self) -> None:
        if not self._static:
            batch, self._held_back = self._held_back, []
        elif not self.scheduler.has_work:
            batch, self._held_back = self._held_back[: self._slots], self._held_back[self._slots :]
        else:
            batch = []
        for request in batch:
            self.scheduler.add(request.seq)
        plan = self.scheduler.plan(self.clock())
        self.plans.append(plan)
        seconds = self._cost(plan)
        self.clock.advance(seconds)
        self.cost_model.observe(plan.rows, plan.attended, plan.outputs, seconds)
        by_seq = {id(r.seq): r for r in self.requests}
        for s in plan.slices:
            request = by_seq[id(s.seq)]
            s.seq.computed = s.start + s.count
            if s.completes:
                s.seq.tokens.append(-len(request.token_times) - 1)
                request.token_times.append(self.clock())
            self.cache.publish(s.seq)
            if request.done:
                self.scheduler.finish(s.seq)
        self.cache.check(self.scheduler.sequences)

    def run(self) -> None:
        while not all(r.done for r in self.requests):
            self.step()

    @property
    def mean_response_s(self) -> float:
        return sum(r.response_s for r in self.requests) / len(self.requests)

    @property
    def tokens_per_s(self) -> float:
        return sum(r.n_tokens for r in self.requests) / self.clock()
