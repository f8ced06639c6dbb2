"""T5 against the reference's logits: encoder, cross attention, relative positions; and its encoder against NumPy from the paper."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.models.gguf import open_gguf
from localrun.models.model import Model, Span
from localrun.models.relative import buckets, distance_table
from tests.conformance.test_arch import (
    ANSWERED,
    MOST_EXTRA_NOISE,
    Floats,
    Ints,
    assert_close,
    assert_same_choice,
    load,
    noise,
    path_of,
    reference_of,
)

TABLE = np.array([3, 9, 0, 7, 5], np.int32)
OTHER = np.array([8, 2, 14, 11, 12], np.int32)
NO_ROWS = np.zeros(0, np.int32)


def encoder_states(name: str, tokens: Ints, *, causal: bool) -> NDArray[np.float64]:
    """Last hidden states (n, width) of a T5 encoder with gated feed-forward, in float64."""
    with open_gguf(path_of(name, "f32")) as gguf:

        def weight(tensor: str) -> NDArray[np.float64]:
            values: Floats = np.frombuffer(gguf.data(tensor), np.float32)
            return values.reshape(gguf.tensors[tensor].shape[::-1]).astype(np.float64)

        def normed(x: NDArray[np.float64], tensor: str) -> NDArray[np.float64]:
            scale: NDArray[np.float64] = np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
            scaled: NDArray[np.float64] = x / scale * weight(f"{tensor}.weight")
            return scaled

        def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
            bent: NDArray[np.float64] = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            return bent

        n, n_heads, n_buckets = len(tokens), 4, 16
        distances = np.arange(n)[None, :] - np.arange(n)[:, None]
        bias = weight("enc.blk.0.attn_rel_b.weight")[buckets(distances, n_buckets, both=True)].transpose(2, 0, 1)
        x = weight("token_embd.weight")[tokens]
        for i in range(2):
            blk = f"enc.blk.{i}"
            h = normed(x, f"{blk}.attn_norm")
            q, k, v = ((h @ weight(f"{blk}.attn_{c}.weight").T).reshape(n, n_heads, -1).transpose(1, 0, 2) for c in "qkv")
            scores = q @ k.transpose(0, 2, 1) + bias
            if causal:
                scores = np.where(distances > 0, -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            x = x + (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ weight(f"{blk}.attn_o.weight").T
            h = normed(x, f"{blk}.ffn_norm")
            gate, up = (h @ weight(f"{blk}.ffn_{part}.weight").T for part in ("gate", "up"))
            x = x + (gelu(gate) * up) @ weight(f"{blk}.ffn_down.weight").T
        return normed(x, "enc.output_norm")


def test_the_encoders_reference_was_made_under_a_causal_mask() -> None:
    """So it proves our NumPy, which then proves the model with the mask that T5 has: none."""
    ref = reference_of("t5encoder", "f32")
    assert_close(encoder_states("t5encoder", ref.tokens, causal=True).astype(np.float32), ref.get("embd"))


def test_the_whole_models_encoder_sees_both_ways() -> None:
    ref = reference_of("t5", "f32")
    assert_close(encoder_states("t5", ref.tokens, causal=False).astype(np.float32), ref.get("enc"))


def answer(model: Model, prompt: Ints, tokens: Ints, chunks: list[int], table: Ints = TABLE) -> Floats:
    """Logits after each of the decoder's tokens."""
    n = len(prompt)
    model.forward([Span(prompt, 0, table[: -(-n // 16)], NO_ROWS, encoded=n)])
    rows, at = [], 0
    for count in chunks:
        span = Span(tokens[at : at + count], n + at, table[: -(-(n + at + count) // 16)], np.arange(count, dtype=np.int32), encoded=n)
        rows.append(model.forward([span]).copy())
        at += count
    return np.concatenate(rows)


@functools.cache
def answers(name: str, variant: str) -> dict[str, Floats]:
    """Whole, in the reference's chunks, one token at a time; each time the prompt is read anew."""
    ref = reference_of(name, variant)
    tokens = ref.arrays["dec_tokens"]
    model = load(name, variant)
    try:
        cuts = {"whole": [len(tokens)], "chunked": [int(n) for n in ref.arrays["inc_chunks"]], "one at a time": [1] * len(tokens)}
        return {cut: answer(model, ref.tokens, tokens, chunks) for cut, chunks in cuts.items()}
    finally:
        model.close()


def test_f32_logits() -> None:
    ref, got = reference_of("t5", "f32"), answers("t5", "f32")
    assert_close(got["whole"], ref.get("logits"))
    assert_same_choice(got["whole"], ref.get("logits"))
    assert_close(got["chunked"][ref.arrays["inc_positions"]], ref.get("inc_logits"))


def test_quantized_logits() -> None:
    ref, got = reference_of("t5", "q8_0"), answers("t5", "q8_0")
    truth = np.concatenate([ref.get("deq_logits_tail8"), ref.get("deq_inc_logits")])
    theirs = np.concatenate([ref.get("logits_tail8"), ref.get("inc_logits")])
    ours = np.concatenate([got["whole"][-8:], got["chunked"][ref.arrays["inc_positions"]]])
    assert noise(ours, truth) <= MOST_EXTRA_NOISE * noise(theirs, truth)


@pytest.mark.parametrize(("name", "variant"), ANSWERED)
@pytest.mark.parametrize("cut", ["chunked", "one at a time"])
def test_cutting_the_answer_changes_no_bit(name: str, variant: str, cut: str) -> None:
    got = answers(name, variant)
    assert np.array_equal(got["whole"].view(np.uint32), got[cut].view(np.uint32))


@pytest.mark.parametrize(("name", "variant"), ANSWERED)
def test_neighbours_in_a_batch_change_no_bit(name: str, variant: str) -> None:
    """One sequence's prompt is read in the pass in which another's answer goes on."""
    ref = reference_of(name, variant)
    prompt, tokens = ref.tokens, ref.arrays["dec_tokens"]
    n, every = len(prompt), np.arange(24, dtype=np.int32)
    other, m = prompt[::-1][:37].copy(), 37
    model = load(name, variant, max_batch=128)
    try:
        model.forward([Span(other, 0, OTHER[:3], NO_ROWS, encoded=m)])
        both = [Span(prompt, 0, TABLE[:3], NO_ROWS, encoded=n), Span(tokens[:5], m, OTHER[:3], every[:1], encoded=m)]
        model.forward(both)
        first = model.forward([
            Span(tokens[5:9], m + 5, OTHER[:3], NO_ROWS, encoded=m), Span(tokens[:9], n, TABLE[:4], every[:9], encoded=n)
        ]).copy()  # fmt: skip
        second = model.forward([
            Span(tokens[9:], n + 9, TABLE, every[:15], encoded=n), Span(tokens[9:10], m + 9, OTHER[:3], every[:1], encoded=m)
        ]).copy()  # fmt: skip
    finally:
        model.close()
    got = np.concatenate([first, second[:15]])
    assert np.array_equal(got.view(np.uint32), answers(name, variant)["whole"].view(np.uint32))


def test_an_encoders_input_comes_whole() -> None:
    model = load("t5", "f32")
    tokens = reference_of("t5", "f32").tokens
    try:
        for span in (
            Span(tokens[:20], 0, TABLE, NO_ROWS, encoded=48),
            Span(tokens[20:], 20, TABLE, NO_ROWS, encoded=48),
            Span(tokens, 0, TABLE, NO_ROWS, encoded=40),
            Span(tokens, 0, TABLE, np.zeros(1, np.int32), encoded=48),
        ):
            with pytest.raises(ValueError, match="whole and alone"):
                model.forward([span])
        with pytest.raises(ValueError, match="no vectors"):
            model.embed([Span(tokens, 0, TABLE, NO_ROWS, encoded=48)])
    finally:
        model.close()


def test_buckets() -> None:
    """Of the paper's 32: eight near distances each way have one each, and every further doubling of the distance two."""
    both = buckets(np.array([0, -1, -7, -8, -11, -12, -16, -64, -127, -128, -5000, 1, 8, 5000]), 32, both=True)
    assert both.tolist() == [0, 1, 7, 8, 8, 9, 10, 14, 15, 15, 15, 17, 24, 31]
    behind = buckets(np.array([3, 0, -1, -15, -16, -31, -32, -127, -128, -900]), 32, both=False)
    assert behind.tolist() == [0, 0, 1, 15, 16, 21, 21, 31, 31, 31]


def test_a_table_of_distances_has_each_heads_values_side_by_side() -> None:
    values = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    table = distance_table(values, 40, both=True)
    assert table.shape[0] == 3
    assert table.shape[1] % 16 == 0
    for distance in (-40, -3, 0, 1, 39):
        want = values[buckets(np.array([distance]), 32, both=True)[0]]
        assert table[:, 40 + distance].tolist() == want.tolist()
