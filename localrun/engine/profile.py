"""Where the time of the engine's steps goes: `python -m localrun.engine.bench FILE --profile`.

A real engine answers made-up prompts, several at once, with a model whose passes are timed (models/profile.py); the engine's own phases
are timed around that. Everything but the pipe is as in a runner: tokenizer, sampler with the usual options and a repeat penalty, text of
each token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from localrun.engine.intake import Intake
from localrun.engine.parts import Parts
from localrun.engine.scheduler import Plan, Slice
from localrun.engine.selection import Floats
from localrun.engine.step import Engine
from localrun.messages import Failed, FromRunner, Generate, Sampling
from localrun.models.gguf import open_gguf
from localrun.models.load import RecordedModel
from localrun.models.model import BLOCK_TOKENS, Span
from localrun.models.profile import Share
from localrun.text.template import chat_template_for
from localrun.text.tokenizer import load_tokenizer

T = TypeVar("T")
PROMPT = 32
"""Tokens of each prompt."""
SEED = 1


@dataclass(frozen=True)
class Part:
    """What one part of the steps took, in seconds a step."""

    name: str
    seconds: float


class TimedEngine(Engine):
    """Knows how long its phases took, in `spent`."""

    spent: dict[str, float]

    def clear(self) -> None:
        """Begins to count."""
        self.spent = dict.fromkeys(("schedule", "prepare", "forward", "sample", "commit"), 0.0)

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.spent[name] += time.perf_counter() - began

    def _schedule(self) -> Plan:
        return self._timed("schedule", super()._schedule)

    def _prepare(self, plan: Plan) -> list[Span]:
        return self._timed("prepare", lambda: super(TimedEngine, self)._prepare(plan))

    def _forward(self, plan: Plan, spans: list[Span]) -> list[Floats] | None:
        return self._timed("forward", lambda: super(TimedEngine, self)._forward(plan, spans))

    def _sample(self, plan: Plan, logits: list[Floats]) -> list[Slice]:
        return self._timed("sample", lambda: super(TimedEngine, self)._sample(plan, logits))

    def _commit(self, taken: list[Slice]) -> None:
        self._timed("commit", lambda: super(TimedEngine, self)._commit(taken))


def profile(model: RecordedModel, path: str, n_steps: int, parallel: int) -> list[Part]:
    """What each part of a decoding step takes, with `parallel` answers at once, over n_steps steps; whole steps last.

    model: with LoadOptions.timed, its KV pool not yet allocated. Raises ValueError for a model that writes nothing or keeps a state.
    """
    if model.profile is None or not model.info.causal or model.info.state_bytes:
        raise ValueError("--profile is for models that write and keep no recurrent state")
    failed: list[str] = []

    def heard(event: FromRunner) -> None:
        if isinstance(event, Failed):
            failed.append(event.message)

    tokens = PROMPT + n_steps + 8
    n_blocks = parallel * (-(-tokens // BLOCK_TOKENS) + 1)
    model.allocate_kv(n_blocks)
    with open_gguf(path) as gguf:
        parts = Parts(model, load_tokenizer(gguf), chat_template_for(gguf, None))
    engine = TimedEngine(model, n_blocks, heard)
    engine.clear()
    intake = Intake(parts, n_blocks * BLOCK_TOKENS, engine.adapters)
    ids = np.random.default_rng(SEED).integers(0, model.info.n_vocab, (parallel, PROMPT))
    for i, prompt in enumerate(ids.tolist()):
        sampling = Sampling(ignore_eos=True, seed=SEED, repeat_penalty=1.1)
        asked = Generate(request_id=str(i), prompt_tokens=prompt, sampling=sampling, max_tokens=n_steps + 4, draft_num_predict=0)
        engine.submit(intake.generation(asked))
    while any(seq.pending > 1 for seq in engine.scheduler.sequences):
        engine.step()
    engine.step()
    model.profile.clear()
    engine.clear()
    began = time.perf_counter()
    for _ in range(n_steps):
        engine.step()
    whole = time.perf_counter() - began
    if failed:
        raise ValueError(failed[0])
    return _parts(engine, model.profile.shares(), whole, n_steps)


def _parts(engine: TimedEngine, shares: list[Share], whole: float, n_steps: int) -> list[Part]:
    """Kernels by kind first, most time first; then waiting, the engine's phases, all that is neither kernels nor waiting, and the whole."""
    kernels = [Part(share.name, share.working_s / n_steps) for share in shares if share.calls]
    waiting = sum(share.waiting_s for share in shares) / n_steps
    spent = {name: seconds / n_steps for name, seconds in engine.spent.items()}
    around = spent.pop("forward") - waiting - sum(part.seconds for part in kernels)
    outside = whole / n_steps - waiting - sum(part.seconds for part in kernels)
    rest = outside - sum(spent.values()) - around
    return [
        *kernels, Part("waiting for other threads", waiting), Part("Python around the pass", around),
        *(Part(name, seconds) for name, seconds in spent.items()), Part("rest of the step", rest),
        Part("all but kernels and waiting", outside), Part("whole step", whole / n_steps),
    ]  # fmt: skip
