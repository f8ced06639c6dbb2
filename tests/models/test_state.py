"""Recurrent state in its slots: snapshots on the way, copies, what a wrong call is answered with. On tiny models of the reference data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localrun.kernels_cpu.sizes import layer_block_bytes
from localrun.models.gguf import open_gguf
from localrun.models.load import load_model
from localrun.models.model import LoadOptions, Model, Span
from localrun.store.facts import facts_of

TOKENS = np.array([(7 * i + 3) % 250 for i in range(40)], np.int32)
TABLE = np.arange(4, dtype=np.int32)
NONE = np.zeros(0, np.int32)
LAST = np.zeros(1, np.int32)


KINDS = ["mamba", "mamba2", "falcon-h1", "lfm2", "qwen35", "qwen3next", "nemotron_h", "granitehybrid", "jamba", "rwkv6", "rwkv7"]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, shared: Path) -> Iterator[Model]:
    options = LoadOptions(n_threads=2, max_batch=64, kv_type="f32", cache_dir=os.environ["LOCALRUN_CACHE"])
    model = load_model(shared / "arch" / request.param / "f32.gguf", options)
    model.allocate_kv(8)
    model.allocate_state(6)
    yield model
    model.close()


def after(model: Model, slot: int, n: int) -> np.ndarray:
    """Logits after token n, of a sequence whose slot is after n tokens; the slot is then one token on."""
    return model.forward([Span(TOKENS[n : n + 1], n, TABLE, LAST, state=slot)]).copy()


def test_the_header_alone_says_how_large_a_slot_is(model: Model, shared: Path) -> None:
    for path in sorted((shared / "arch").glob("*/f32.gguf")):
        with open_gguf(path) as gguf:
            facts = facts_of(gguf)
            if facts.architecture == model.info.architecture:
                assert facts.state_bytes == model.info.state_bytes
                kv = sum(n * layer_block_bytes(n_kv, dim, dim_v, "f32") for n, n_kv, dim, dim_v in facts.kv)
                assert kv == model.info.kv_bytes_per_block


def test_snapshots_are_the_states_on_the_way(model: Model) -> None:
    expected = {}
    for n in (1, 5, 16, 39):
        model.forward([Span(TOKENS[:n], 0, TABLE, NONE, state=0)])
        expected[n] = after(model, 0, n)
    model.forward([Span(TOKENS[:39], 0, TABLE, NONE, state=1, snapshots=((1, 2), (5, 4), (16, 3), (39, 5)))])
    for n, slot in {1: 2, 5: 4, 16: 3, 39: 5}.items():
        assert np.array_equal(after(model, slot, n), expected[n])
    assert np.array_equal(after(model, 1, 39), expected[39])


def test_a_slot_is_copied_whole_and_starts_from_nothing(model: Model) -> None:
    model.forward([Span(TOKENS[:20], 0, TABLE, NONE, state=0)])
    model.copy_state(0, 3)
    first, second = after(model, 0, 20), after(model, 3, 20)
    assert np.array_equal(first, second)
    model.forward([Span(TOKENS[:20], 0, TABLE, NONE, state=3)])  # what the slot held is of no matter
    assert np.array_equal(after(model, 3, 20), first)
    assert not np.array_equal(after(model, 3, 20), first), "a state that has gone on says something else"


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([Span(TOKENS[:4], 0, TABLE, NONE)], "slots"),
        ([Span(TOKENS[:4], 0, TABLE, NONE, state=6)], "slots"),
        ([Span(TOKENS[:4], 0, TABLE, NONE, state=1), Span(TOKENS[:4], 0, TABLE + 4, NONE, state=1)], "slots"),
        ([Span(TOKENS[:4], 0, TABLE, NONE, state=1, snapshots=((2, 1),))], "slots"),
        ([Span(TOKENS[:4], 0, TABLE, NONE, state=1, snapshots=((5, 2),))], "after 5 of 4 tokens"),
        ([Span(TOKENS[:4], 0, TABLE, NONE, state=1, snapshots=((0, 2),))], "after 0 of 4 tokens"),
        ([Span(TOKENS[:4], 0, TABLE, NONE, state=1, snapshots=((3, 2), (2, 3)))], "after 2 of 4 tokens"),
    ],
)
def test_a_wrong_slot_or_place_is_refused(model: Model, spans: list[Span], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.forward(spans)
