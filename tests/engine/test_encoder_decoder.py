"""Encoder-decoders in the engine: the prompt is read whole, the answer begins with the decoder's own token, and what is said depends on
neither neighbours nor a pool that is too small."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.errors import ContextOverflow, Unsupported
from localrun.messages import Evaluate, Generate
from tests.engine.harness import Harness
from tests.fakes import BOS, EOS, FakeModel

START = BOS
LONG = "translate all of this, which is more than a pass that is shared would take at once: " * 2


def harness(n_blocks: int = 64, **options: Any) -> Harness:
    return Harness(FakeModel(decoder_start=START, max_batch=400, n_ctx_train=336, **options), n_blocks=n_blocks)


def alone(prompt: str, n: int) -> list[int]:
    h = harness()
    outcome = h.ask(prompt, max_tokens=n)
    h.run()
    return outcome.answer


def test_the_decoders_first_token_follows_the_prompt() -> None:
    h = harness()
    outcome = h.ask("hello", max_tokens=5)
    h.run()
    tokens = h.parts.tokenizer.encode("hello")
    assert outcome.tokens[: len(tokens) + 1] == [*tokens, START]
    assert outcome.started is not None
    assert outcome.started.prompt_tokens == len(tokens) + 1
    assert len(outcome.answer) == 5


def test_a_text_is_closed_for_the_encoder_and_tokens_are_taken_as_they_are() -> None:
    h = harness()
    h.parts.tokenizer.around = lambda: ([BOS], [EOS])  # type: ignore[method-assign]
    tokens = h.parts.tokenizer.encode("hello")
    job = h.intake.generation(Generate(request_id="a", prompt="hello", raw=True))
    assert job.seq.tokens == [*tokens, EOS, START]
    assert job.seq.encoded == job.seq.whole == len(tokens) + 1
    assert h.intake.generation(Generate(request_id="b", prompt_tokens=tokens)).seq.tokens == [*tokens, START]


def test_a_long_prompt_comes_whole_beside_streams() -> None:
    """The fake refuses an encoder's input in parts."""
    h = harness()
    streams = [h.ask(f"stream {i}", max_tokens=30) for i in range(5)]
    h.step()
    late = h.ask(LONG, max_tokens=6)
    h.run()
    assert late.answer == alone(LONG, 6)
    assert [stream.answer for stream in streams] == [alone(f"stream {i}", 30) for i in range(5)]


def test_nothing_is_taken_from_another_prompt() -> None:
    h = harness()
    for _ in range(2):
        outcome = h.ask(LONG, max_tokens=3)
        h.run()
        assert outcome.finished is not None
        assert outcome.finished.cached_tokens == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(min_value=1, max_value=90), min_size=1, max_size=6), st.integers(min_value=9, max_value=24))
def test_small_pools(lengths: list[int], n_blocks: int) -> None:
    h = harness(n_blocks)
    outcomes = [h.ask(LONG[:n], max_tokens=20) for n in lengths]
    h.run()
    for n, outcome in zip(lengths, outcomes, strict=True):
        assert outcome.answer == alone(LONG[:n], 20)


def test_what_an_encoder_decoder_cannot_do_is_refused() -> None:
    h = harness()
    with pytest.raises(Unsupported, match="overflow"):
        h.intake.generation(Generate(request_id="a", prompt="x", overflow="shift"))
    with pytest.raises(Unsupported, match="likelihoods"):
        h.intake.evaluation(Evaluate(request_id="b", text="x"))
    with pytest.raises(ContextOverflow):
        h.intake.generation(Generate(request_id="c", prompt_tokens=[65] * 335))
    job = h.intake.generation(Generate(request_id="d", prompt_tokens=[65] * 334))
    assert len(job.seq.tokens) == 335
