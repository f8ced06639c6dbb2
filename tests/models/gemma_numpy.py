"""Gemma 3's text model in NumPy, written from the report (Gemma Team 2025), with rows of images among its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms(x: Array, weight: Array, eps: float) -> Array:
    result: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return result


def rotated(x: Array, base: float) -> Array:
    """(T, heads, dim): pairs half a head apart (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def logits(w: Mapping[str, Array], keys: Mapping[str, Any], tokens: Sequence[int], images: Sequence[tuple[int, Array]]) -> Array:
    """(T, vocabulary). images: index of the first of the tokens they stand for, and their rows."""
    of = {name.removeprefix("gemma3.attention."): value for name, value in keys.items()}
    eps, heads, n_kv = of["layer_norm_rms_epsilon"], of["head_count"], of["head_count_kv"]
    dim, window, n = of["key_length"], of["sliding_window"], len(tokens)
    table = w["token_embd.weight"]
    x = table[list(tokens)] * np.sqrt(table.shape[1])
    position = np.arange(n)
    causal = position[None, :] <= position[:, None]
    near = position[None, :] > position[:, None] - window
    together = np.zeros((n, n), bool)
    for first, rows in images:
        x[first : first + len(rows)] = rows
        together[first : first + len(rows), first : first + len(rows)] = True
    for i in range(keys["gemma3.block_count"]):
        everything = i % 6 == 5
        base = keys["gemma3.rope.freq_base"] if everything else 10000.0
        blk = f"blk.{i}."
        h = rms(x, w[f"{blk}attn_norm.weight"], eps)
        q = rms((h @ w[f"{blk}attn_q.weight"].T).reshape(n, heads, dim), w[f"{blk}attn_q_norm.weight"], eps)
        k = rms((h @ w[f"{blk}attn_k.weight"].T).reshape(n, n_kv, dim), w[f"{blk}attn_k_norm.weight"], eps)
        v = (h @ w[f"{blk}attn_v.weight"].T).reshape(n, n_kv, dim)
        q, k = rotated(q, base), rotated(k, base)
        k, v = np.repeat(k, heads // n_kv, axis=1), np.repeat(v, heads // n_kv, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        seen = (causal if everything else causal & near) | together
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        a = np.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * dim) @ w[f"{blk}attn_output.weight"].T
        x = x + rms(a, w[f"{blk}post_attention_norm.weight"], eps)
        h = rms(x, w[f"{blk}ffn_norm.weight"], eps)
        gate, up = h @ w[f"{blk}ffn_gate.weight"].T, h @ w[f"{blk}ffn_up.weight"].T
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        x = x + rms((gate * up) @ w[f"{blk}ffn_down.weight"].T, w[f"{blk}post_ffw_norm.weight"], eps)
    result: Array = rms(x, w["output_norm.weight"], eps) @ table.T
    return result
