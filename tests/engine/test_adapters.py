"""Requests with adapters: none learns anything from another's, and what they hold comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.engine import adapters
from localrun.errors import BadRequest, Busy, ModelFileRejected
from localrun.models.model import MAX_ADAPTERS
from tests.engine.harness import Harness
from tests.fakes import FakeModel

PROMPT = [5 * i % 100 + 32 for i in range(40)]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three adapters."""
    paths = [tmp_path / f"{i}.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i + 1]))
    return [str(path) for path in paths]


def alone(number_of_blocks: int = 64, **fields: object) -> list[int]:
    harness = Harness(FakeModel(), number_of_blocks)
    outcome = harness.ask(PROMPT, max_tokens=20, **fields)
    harness.run()
    return outcome.answer


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    asked=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 0.5, 0.0]), st.integers(0, 12)), min_size=2, max_size=8),
    n_blocks=st.integers(6, 40),
)
def test_each_answer_is_the_one_it_gives_alone(asked: list[tuple[int, float, int]], n_blocks: int, files: list[str]) -> None:
    """One prompt, several adapters and scales, at once and one after another: the tree never gives one the K/V of another."""
    harness = Harness(FakeModel(max_batch=24), n_blocks)
    outcomes = []

    def act(step: int) -> None:
        for which, scale, at in asked:
            if at == step:
                chosen = files[which : which + 1]
                outcomes.append((chosen, scale, harness.ask(PROMPT, max_tokens=20, adapters=chosen, adapter_scale=scale)))

    for step in range(13):
        act(step)
        harness.step()
    harness.run()
    assert len(outcomes) == len(asked)
    for chosen, scale, outcome in outcomes:
        assert outcome.answer == alone(adapters=chosen, adapter_scale=scale)


def test_answers_differ_and_equal_adapters_share_their_prefix(files: list[str]) -> None:
    harness = Harness()
    first = harness.ask(PROMPT, max_tokens=8, adapters=files[:1])
    harness.run()
    again = harness.ask(PROMPT, max_tokens=8, adapters=files[:1])
    other = harness.ask(PROMPT, max_tokens=8, adapters=files[1:2])
    plain = harness.ask(PROMPT, max_tokens=8)
    harness.run()
    assert again.answer == first.answer
    assert len({tuple(one.answer) for one in (first, other, plain)}) == 3
    cached = [one.started.cached_tokens for one in (again, other, plain) if one.started is not None]
    assert cached == [len(PROMPT) - 1, 0, 0]


def test_idle_adapters_make_room_and_held_ones_do_not(tmp_path: Path) -> None:
    harness = Harness(n_blocks=MAX_ADAPTERS * 4 + 8, max_running=MAX_ADAPTERS + 1)
    paths = [tmp_path / f"{i}.gguf" for i in range(MAX_ADAPTERS + 1)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]))
    for path in paths[:-1]:
        harness.ask(PROMPT[:4], request_id=path.name, max_tokens=4, adapters=[str(path)])
    with pytest.raises(Busy, match=f"{MAX_ADAPTERS} adapters"):
        harness.ask(PROMPT[:4], max_tokens=4, adapters=[str(paths[-1])])
    assert len(harness.model.adapters) == MAX_ADAPTERS
    del harness.outcomes[f"request {harness._n}"]
    harness.run()
    late = harness.ask(PROMPT[:4], max_tokens=4, adapters=[str(paths[-1])])
    harness.run()
    assert late.finished is not None
    assert len(harness.model.adapters) == MAX_ADAPTERS


def test_what_nobody_holds_is_bounded(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled, failed and finished requests give their adapter back, and the least recently used go."""
    monkeypatch.setattr(adapters, "IDLE_BYTES", 8)
    harness = Harness()
    for i, path in enumerate(files):
        harness.ask(PROMPT, request_id=str(i), max_tokens=4, adapters=[path])
    harness.step()
    assert len(harness.model.adapters) == 3
    harness.engine.cancel("1")
    harness.run()
    assert len(harness.engine.adapters) == len(harness.model.adapters) == 1


def test_a_file_that_is_no_adapter_is_refused_without_its_path(tmp_path: Path, files: list[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"unfit")
    harness = Harness()
    with pytest.raises(ModelFileRejected, match=r"^adapter 2: tensor x\.lora_a: the model has no tensor x$"):
        harness.ask(PROMPT, adapters=[files[0], str(bad)])
    with pytest.raises(BadRequest, match="adapter_scale"):
        harness.ask(PROMPT, adapters=files[:1], adapter_scale=float("nan"))
    assert len(harness.engine.adapters) == 0
    assert not harness.engine.has_work
