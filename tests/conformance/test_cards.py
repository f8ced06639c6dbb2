"""Whole models with layers on an emulated card: whatever is on it, the logits are the CPU's, to the bit.

The card runs the very source that a real one runs (kernels_gpu/cuda), its threads in drawn orders; the rest of the pass is the CPU's.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_gpu.emulator import Emulator
from localrun.models.load import load_model
from localrun.models.model import LoadOptions, Span
from tests.conformance.test_arch import RUN, path_of, reference_of
from tests.kernels_gpu.running import needs_compiler

pytestmark = needs_compiler
CPU_ONLY = {
    "deepseek2", "deepseek2-lite", "deepseek3", "falcon-h1", "gemma3n", "gemma4", "gemma4-moe", "granitehybrid", "jamba", "lfm2", "lfm2moe",
    "mamba", "mamba2", "minicpm3", "nemotron_h",
}  # fmt: skip
"""Models whose layers no card computes; the line about it says so."""
KINDS = (
    "apertus", "arctic", "bitnet", "cohere2", "command-r-qknorm", "deci", "deepseek", "falcon", "gemma2", "gemma3", "gpt-oss", "gpt2",
    "llama", "llama4", "minicpm", "mixtral", "mpt", "nemotron", "olmo2-swa", "openelm", "phi2", "qwen2moe", "qwen3", "smallthinker",
    "stablelm", "deepseek2", "gemma4", "mamba",
)  # fmt: skip
CASES = [next(case for case in RUN if case[0] == name) for name in KINDS]
"""One file of every way to build a layer; the other architectures are made of the same parts."""
TYPES = [case for case in RUN if case[0] in ("llama-k", "llama-tq", "llama-16", "qwen3moe-k")]
SPLITS = [("llama", "q4_0"), ("gemma2", "q8_0"), ("mixtral", "q4_0"), ("phi3", "q4_0")]


def load(name: str, variant: str, layers: int, devices: int = 1, **options: Any) -> Any:
    cache = os.environ["LOCALRUN_CACHE"]
    cards = [Emulator(Path(cache), seed=3 + i, name=f"card {i}", memory=options.pop("memory", 1 << 30)) for i in range(devices)]
    asked = {"n_threads": 2, "max_batch": 64, "n_ctx": 256, "kv_type": "f32", "cache_dir": cache, **options}
    return load_model(path_of(name, variant), LoadOptions(gpu_layers=layers, devices=cards, **asked))


def logits(model: Any, tokens: NDArray[np.int32], cut: tuple[int, ...]) -> NDArray[np.float32]:
    """Logits after every token, fed in such pieces and the rest at once, from blocks in no order."""
    model.allocate_kv(16)
    if model.info.state_bytes:
        model.allocate_state(1)
    table = np.array([3, 9, 0, 7, 5], np.int32)
    rows, start = [], 0
    for n in (*cut, len(tokens) - sum(cut)):
        state = 0 if model.info.state_bytes else -1
        span = Span(tokens[start : start + n], start, table, np.arange(n, dtype=np.int32), state=state)
        rows.append(model.forward([span]).copy())
        start += n
    return np.concatenate(rows)


def answer(name: str, variant: str, layers: int, cut: tuple[int, ...] = (20, 1, 3), **options: Any) -> tuple[Any, NDArray[np.float32]]:
    model = load(name, variant, layers, **options)
    try:
        return model.info, logits(model, reference_of(name, variant).tokens, cut)
    finally:
        model.close()


@pytest.mark.parametrize(("name", "variant"), sorted({*CASES, *TYPES}))
def test_layers_on_a_card_change_no_bit(name: str, variant: str) -> None:
    info, got = answer(name, variant, 1 << 20)
    if name in CPU_ONLY:
        assert info.gpu_layers == 0 and "no card kernel" in info.gpu_note
        return
    assert info.gpu_layers == info.n_layers > 0 and info.gpu_bytes > 0 and not info.gpu_note
    _, expected = answer(name, variant, 0)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("name", "variant"), SPLITS)
@pytest.mark.parametrize(("layers", "devices"), [(1, 1), (2, 2), (99, 2)])
def test_splits_over_cards_and_the_cpu(name: str, variant: str, layers: int, devices: int) -> None:
    info, got = answer(name, variant, layers, devices=devices, kv_type="f16")
    assert info.gpu_layers == min(layers, info.n_layers)
    _, expected = answer(name, variant, 0, kv_type="f16")
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_a_card_that_is_too_small_gets_fewer_layers_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """What was asked for is tried; each failed allocation gives back all of it, and fewer layers follow."""
    found = []
    with caplog.at_level(logging.WARNING):
        for memory in range(200 << 10, 2 << 20, 50 << 10):
            model = load("llama", "q4_0", 99, memory=memory)
            found.append((model.info.gpu_layers, model.info.gpu_note))
            model.close()
    layers = [n for n, _ in found]
    assert layers == sorted(layers) and {0, 1, 2} == set(layers)
    assert all("did not fit" in note for n, note in found if n < 2)
    assert any("do not fit on the card" in record.message for record in caplog.records)


def test_a_card_without_memory_leaves_all_to_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        info, got = answer("llama", "q4_0", -1, memory=1 << 16)
    assert info.gpu_layers == 0 and info.gpu_bytes == 0 and info.gpu_note == "no layer fits in the card's free memory"
    assert any(info.gpu_note in record.message for record in caplog.records)
    assert np.array_equal(got, answer("llama", "q4_0", 0)[1])


def test_blocks_are_copied_on_cards_and_host() -> None:
    """A sequence goes on from copies of its blocks as from the blocks themselves, with a layer on either side."""
    tokens = reference_of("llama", "q4_0").tokens
    model = load("llama", "q4_0", 1, kv_type="f16")
    try:
        model.allocate_kv(16)
        none = np.zeros(0, np.int32)
        model.forward([Span(tokens[:30], 0, np.array([3, 9], np.int32), none)])
        for source, target in ((3, 12), (9, 1)):
            model.copy_block(source, target)
        one = np.zeros(1, np.int32)
        got = model.forward([Span(tokens[30:31], 30, np.array([12, 1], np.int32), one)]).copy()
        assert np.array_equal(got, model.forward([Span(tokens[30:31], 30, np.array([3, 9], np.int32), one)]))
        other = model.forward([Span(tokens[30:31], 30, np.array([2, 4], np.int32), one)])
        assert not np.array_equal(got, other)
    finally:
        model.close()


def test_neighbours_in_a_batch_change_no_bit() -> None:
    """More sequences than a kernel takes at once, of which each gets what it gets alone."""
    tokens = reference_of("llama", "q4_0").tokens
    model = load("llama", "q4_0", 99, kv_type="f16")
    try:
        model.allocate_kv(16)
        spans = [Span(tokens[i : i + 3 + i % 2], 0, np.array([i], np.int32), np.array([2], np.int32)) for i in range(9)]
        together = model.forward(spans).copy()
        alone = np.concatenate([model.forward([span]).copy() for span in spans])
    finally:
        model.close()
    assert np.array_equal(together.view(np.uint32), alone.view(np.uint32))


def test_hidden_states_come_from_the_card() -> None:
    """Embedding reads the last norm's rows, wherever they were computed."""
    tokens = reference_of("llama", "q4_0").tokens
    vectors = []
    for layers in (0, 1, 99):
        model = load("llama", "q4_0", layers, kv_type="f16")
        try:
            model.allocate_kv(16)
            vectors.append(model.embed([Span(tokens[:20], 0, np.array([1, 2], np.int32), np.zeros(0, np.int32))]).copy())
        finally:
            model.close()
    assert np.array_equal(vectors[0], vectors[1]) and np.array_equal(vectors[0], vectors[2])
