"""An engine on a fake model, stepped by hand, with every invariant checked after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localrun.engine.beams import BeamSearch
from localrun.engine.drafting import Drafter
from localrun.engine.intake import Intake
from localrun.engine.jobs import Job
from localrun.engine.parts import Parts
from localrun.engine.step import Engine
from localrun.engine.texts import TextIntake
from localrun.messages import (
    Embed,
    Embedded,
    Evaluated,
    Failed,
    Finished,
    FromRunner,
    Generate,
    Piece,
    Rank,
    Ranked,
    Sampling,
    Started,
    ToolCall,
)
from localrun.models.model import BLOCK_TOKENS
from tests.fakes import TEMPLATE, FakeClock, FakeModel, parts_of


@dataclass
class Outcome:
    """What one request brought."""

    started: Started | None = None
    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    finished: Finished | None = None
    vectors: Embedded | Ranked | None = None
    failed: Failed | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        assert self.finished is not None, self.failed
        return self.finished.context

    @property
    def answer(self) -> list[int]:
        assert self.finished is not None
        return self.tokens[self.finished.prompt_tokens :]

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.failed is not None or self.vectors is not None


class Harness:
    def __init__(
        self,
        model: FakeModel | None = None,
        n_blocks: int = 64,
        *,
        clock: FakeClock | None = None,
        template: str = TEMPLATE,
        n_slots: int = 8,
        draft: FakeModel | None = None,
        draft_blocks: int = 0,
        **options: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.model = model or FakeModel()
        self.model.allocate_kv(n_blocks)
        self.n_slots = n_slots if self.model.info.state_bytes else 0
        if self.n_slots:
            self.model.allocate_state(self.n_slots)
        self.parts: Parts = parts_of(self.model, template)
        if draft is not None:
            draft_blocks = draft_blocks or n_blocks
            draft.allocate_kv(draft_blocks)
            self.parts.draft = draft
            options["drafter"] = Drafter(draft, draft_blocks, self.model.info.n_vocab, self.clock)
        self.outcomes: dict[str, Outcome] = {}
        self.events: list[FromRunner] = []
        self.engine = Engine(self.model, n_blocks, self._emit, n_slots=self.n_slots, clock=self.clock, say=self._say, **options)
        self.intake = Intake(
            self.parts, n_blocks * BLOCK_TOKENS, self.engine.adapters, self.clock, keeps_sessions=self.engine.keeper is not None
        )
        self.texts = TextIntake(self.parts, n_blocks * BLOCK_TOKENS)
        self._n = 0

    def _say(self, ids: list[int]) -> str:
        return self.parts.tokenizer.decode(ids).decode("utf-8", "replace")

    def _emit(self, event: FromRunner) -> None:
        self.events.append(event)
        outcome = self.outcomes[event.request_id]  # type: ignore[union-attr]
        assert not outcome.ended, f"{event} after the end"
        match event:
            case Started():
                assert outcome.started is None
                outcome.started = event
            case Piece():
                outcome.text += event.text
                outcome.thinking += event.thinking
                outcome.tool_calls += event.tool_calls
                outcome.pieces.append(event)
            case Evaluated():
                outcome.evaluated.append(event)
            case Finished():
                outcome.finished = event
            case Embedded() | Ranked():
                outcome.vectors = event
            case Failed():
                outcome.failed = event
            case _:
                raise AssertionError(event)

    def add(self, request: Generate) -> Outcome:
        return self.add_job(self.intake.generation(request))

    def add_job(self, job: Job) -> Outcome:
        outcome = self.outcomes[job.seq.request_id] = Outcome()
        self.engine.submit(job)
        return outcome

    def pool(self, request: Embed | Rank) -> Outcome:
        """Queues texts whose vectors or scores are wanted."""
        batch = self.texts.embedding(request) if isinstance(request, Embed) else self.texts.ranking(request)
        outcome = self.outcomes[request.request_id] = Outcome()
        self.engine.submit_batch(batch)
        return outcome

    def add_search(self, search: BeamSearch) -> Outcome:
        outcome = self.outcomes[search.request_id] = Outcome()
        self.engine.submit_search(search)
        return outcome

    def ask(self, prompt: str | list[int], **fields: Any) -> Outcome:
        """Queues a raw prompt with a request id of its own; sampling options may be given by name."""
        self._n += 1
        options = {name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__}
        fields.setdefault("request_id", f"request {self._n}")
        text = {"prompt": prompt, "raw": True} if isinstance(prompt, str) else {"prompt_tokens": prompt}
        return self.add(Generate(**text, sampling=Sampling(**{"seed": 1, **options}), **fields))

    def step(self) -> None:
        self.engine.step()
        self.engine.check()

    def run(self, *, most_steps: int = 5000, between: Callable[[int], None] = lambda step: None) -> None:
        """Steps until nothing is left to do."""
        for step in range(most_steps):
            if not self.engine.has_work:
                break
            between(step)
            self.step()
        else:
            raise AssertionError(f"still at work after {most_steps} steps")
        assert all(outcome.ended for outcome in self.outcomes.values())
        assert self.engine.cache.pool.n_held == 0, "blocks were not given back"
        if (states := self.engine.cache.states) is not None:
            assert states.n_free + states.n_snapshots == states.n_slots, "slots were not given back"
        if self.engine.drafter is not None:
            assert self.engine.drafter.cache.pool.n_held == 0, "the draft model's blocks were not given back"
