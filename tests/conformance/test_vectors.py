"""Vectors and scores of whole models against the reference's, alone and among others.

The tables and their words are test_arch.py's. A vector's bits must depend on nothing but its own text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from localrun.models.load import RecordedModel
from localrun.models.model import Model, Span
from localrun.models.vectors import pooled, rows_to_pool
from tests.conformance.test_arch import MAX_DIFFERENCE, MOST_EXTRA_NOISE, POOLED, Floats, load, noise, reference_of
from tests.conformance.test_t5 import encoder_states

NAMES = [(name, variant) for name, variant, _ in POOLED]
LEAST_COSINE = 0.998
"""Of quantized files with their own weights in F32; these models are 32 wide, so that a rounding weighs much more than in real ones."""
NO_ROWS = np.zeros(0, np.int32)


def vectors(model: Model, texts: list[np.ndarray[Any, Any]]) -> Floats:
    """All of them in one pass; the blocks lie in the pool in no order."""
    tables = np.random.default_rng(1).permutation(16).astype(np.int32)
    spans, at = [], 0
    for tokens in texts:
        n = -(-len(tokens) // 16)
        spans.append(Span(tokens, 0, tables[at : at + n], NO_ROWS))
        at += n
    return model.embed(spans).copy()


def expected(name: str, variant: str, array: str) -> Floats:
    """The reference's, by our count of values: the share of "yes" where it gives both labels'. That of T5's encoder was made under a causal
    mask, which T5 does not have (test_t5.py shows it); there NumPy is the reference.
    """
    if name == "t5encoder":
        states = encoder_states(name, reference_of(name, variant).tokens, causal=False)
        vector: Floats = {"pooled_cls": states[0], "pooled_last": states[-1]}.get(array, states.mean(axis=0)).astype(np.float32)
        return vector
    want = reference_of(name, variant).get(array)
    return want[:1] if array.endswith("pooled_default") and len(want) == 2 else want


@pytest.mark.parametrize(("name", "variant", "kind"), POOLED)
def test_what_the_file_asks_for(name: str, variant: str, kind: str) -> None:
    model = load(name, variant)
    try:
        got = vectors(model, [reference_of(name, variant).tokens])[0]
    finally:
        model.close()
    if kind == "exact vectors":
        want = expected(name, variant, "pooled_default")
        spread = want.std() if len(want) > 1 else 1.0
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= MAX_DIFFERENCE * spread
    else:
        truth, theirs = (expected(name, variant, array) for array in ("deq_pooled_default", "pooled_default"))
        assert noise(got, truth) <= max(MOST_EXTRA_NOISE * noise(theirs, truth), 1e-4)
        if len(truth) > 1:
            assert got @ truth / np.linalg.norm(got) / np.linalg.norm(truth) >= LEAST_COSINE


@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name, variant in NAMES if variant == "f32"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_every_way_of_pooling(name: str, variant: str, pooling: str) -> None:
    """Whatever the file asks for, the hidden states are all there."""
    model = load(name, variant)
    try:
        assert isinstance(model, RecordedModel)
        tokens = reference_of(name, variant).tokens
        wanted = [rows_to_pool(len(tokens), pooling, model.info.causal)]
        model._run([Span(tokens, 0, np.array([2, 7, 4], np.int32), NO_ROWS)], wanted, pooling=True)
        assert model._program.hidden is not None
        got = pooled(model._program.hidden, [len(tokens)], wanted)[0]
    finally:
        model.close()
    want = expected(name, variant, f"pooled_{pooling}")
    assert np.abs(got - want).max() <= MAX_DIFFERENCE * want.std()


@pytest.mark.parametrize(("name", "variant"), NAMES)
def test_neighbours_and_settings_change_no_bit(name: str, variant: str) -> None:
    tokens = reference_of(name, variant).tokens
    others = [tokens[::-1][:21].copy(), tokens[:1], tokens[5:38].copy()]
    alone = {}
    for options in ({}, {"n_threads": 1}, {"pack": False}):
        model = load(name, variant, max_batch=128, **options)
        try:
            alone[str(options)] = vectors(model, [tokens])
            among = vectors(model, [others[0], others[1], tokens, others[2]])
        finally:
            model.close()
        assert np.array_equal(alone["{}"].view(np.uint32), alone[str(options)].view(np.uint32))
        assert np.array_equal(alone["{}"][0].view(np.uint32), among[2].view(np.uint32))


@pytest.mark.parametrize(("name", "variant"), [("qwen3-embedding", "q8_0"), ("qwen3-reranker", "q8_0")])
def test_a_decoder_may_read_a_text_in_parts(name: str, variant: str) -> None:
    tokens = reference_of(name, variant).tokens
    model = load(name, variant)
    try:
        whole = vectors(model, [tokens])[0]
        table = np.array([5, 0, 3], np.int32)
        for start, end in ((0, 20), (20, 47), (47, 48)):
            part = model.embed([Span(tokens[start:end], start, table, NO_ROWS)])[0]
    finally:
        model.close()
    assert np.array_equal(whole.view(np.uint32), part.view(np.uint32))


def test_an_encoder_has_no_logits_and_takes_no_parts() -> None:
    model = load("bert", "f32")
    tokens, table = reference_of("bert", "f32").tokens, np.array([1, 0, 2], np.int32)
    try:
        with pytest.raises(ValueError, match="no logits"):
            model.forward([Span(tokens, 0, table, np.zeros(1, np.int32))])
        with pytest.raises(ValueError, match="whole"):
            model.embed([Span(tokens[20:], 20, table, NO_ROWS)])
        # Its room for rows is its context, however little was asked for; 128 positions are all it has learned.
        assert (model.info.max_batch, model.info.n_ctx_train) == (128, 128)
    finally:
        model.close()


def test_a_decoder_without_a_pooling_gives_its_last_tokens_state() -> None:
    """The same weights with and without the key."""
    tokens = reference_of("qwen3-embedding", "f32").tokens
    model = load("qwen3-embedding", "f32")
    try:
        want = vectors(model, [tokens])
        model.info = dataclasses.replace(model.info, pooling="")
        assert np.array_equal(vectors(model, [tokens]), want)
    finally:
        model.close()
