"""The decoders of the converted families in NumPy, over tensors as Hugging Face lays them out: what the converted file must compute.

Written from the papers and from transformers' description of its layout: halves of a head are rotated against each other (rotate_half),
matrices are (out, in), Gemma's norms are 1 + weight. float64 throughout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def rms(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    out: Doubles = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return out


def softmax(x: Doubles) -> Doubles:
    e = np.exp(x - x.max(-1, keepdims=True))
    out: Doubles = e / e.sum(-1, keepdims=True)
    return out


def act(name: str, x: Doubles) -> Doubles:
    if name == "silu":
        silu: Doubles = x / (1 + np.exp(-x))
        return silu
    gelu: Doubles = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return gelu


def frequencies(config: dict[str, Any], n_rot: int, base: float, scaling: dict[str, Any], n_ctx: int) -> tuple[Doubles, float]:
    """Of each rotated pair, and the factor of cosines and sines."""
    freq: Doubles = base ** -(np.arange(0, n_rot, 2) / n_rot)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return freq / scaling["factor"], 1.0
    if kind == "llama3":
        old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        length = 2 * math.pi / freq
        smooth = (old / length - low) / (high - low)
        middle = (1 - smooth) * freq / factor + smooth * freq
        return np.where(length < old / high, freq, np.where(length > old / low, freq / factor, middle)), 1.0
    if kind == "longrope":
        old = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / old
        factors = np.array(scaling["long_factor" if n_ctx > old else "short_factor"], np.float64)
        return freq / factors, math.sqrt(1 + math.log(scale) / math.log(old))
    assert kind == "default"
    return freq, 1.0


def rotate(x: Doubles, freq: Doubles, magnitude: float) -> Doubles:
    """x: (T, heads, dim); the first 2 * len(freq) values of a head are rotated, i against i + len(freq)."""
    angle = np.arange(len(x))[:, None] * freq  # (T, n / 2)
    cos, sin = (magnitude * f(angle)[:, None, :] for f in (np.cos, np.sin))
    n = len(freq)
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def logits(config: dict[str, Any], tensors: dict[str, Any], tokens: list[int], n_ctx: int = 256) -> Doubles:
    """(T, vocab) for a checkpoint of the families that are converted; which one, the configuration's model_type says."""
    t = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
    family = config["model_type"]
    gemma = family.startswith("gemma")
    heads, kv, eps, width = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_size"))
    dim = config.get("head_dim", width // heads)
    n_rot = int(dim * config.get("partial_rotary_factor", 1.0))
    scaling = config.get("rope_scaling") or {}
    over = frequencies(config, n_rot, config["rope_theta"], scaling, n_ctx)
    local = frequencies(config, n_rot, config["rope_local_base_freq"], {}, n_ctx) if family == "gemma3" else over
    pattern = {"gemma2": 2, "gemma3": 6}.get(family, 1)
    scale = config.get("query_pre_attn_scalar", dim) ** -0.5

    def norm(x: Doubles, name: str) -> Doubles:
        return rms(x, t[name] + (1.0 if gemma else 0.0), eps)

    n = len(tokens)
    ago = np.arange(n)[:, None] - np.arange(n)
    x = t["model.embed_tokens.weight"][tokens] * (math.sqrt(width) if gemma else 1.0)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, f"{p}input_layernorm.weight")
        if f"{p}self_attn.qkv_proj.weight" in t:
            q, k, v = np.split(h @ t[f"{p}self_attn.qkv_proj.weight"].T, [heads * dim, (heads + kv) * dim], -1)
        else:
            q, k, v = (h @ t[f"{p}self_attn.{c}_proj.weight"].T + t.get(f"{p}self_attn.{c}_proj.bias", 0.0) for c in "qkv")
        q, k, v = q.reshape(n, heads, dim), k.reshape(n, kv, dim), v.reshape(n, kv, dim)
        if f"{p}self_attn.q_norm.weight" in t:
            q, k = norm(q, f"{p}self_attn.q_norm.weight"), norm(k, f"{p}self_attn.k_norm.weight")
        whole = (i + 1) % pattern == 0
        q, k = (rotate(y, *(over if whole else local)) for y in (q, k))
        k, v = (np.repeat(y, heads // kv, 1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        if config.get("attn_logit_softcapping"):
            scores = config["attn_logit_softcapping"] * np.tanh(scores / config["attn_logit_softcapping"])
        seen = (ago >= 0) & (whole | (ago < config.get("sliding_window", n + 1)))
        a = np.einsum("hqk,khd->qhd", softmax(np.where(seen, scores, -np.inf)), v).reshape(n, heads * dim)
        a = a @ t[f"{p}self_attn.o_proj.weight"].T
        four = f"{p}pre_feedforward_layernorm.weight" in t
        x = x + (norm(a, f"{p}post_attention_layernorm.weight") if four else a)
        h = norm(x, f"{p}{'pre_feedforward' if four else 'post_attention'}_layernorm.weight")
        if f"{p}mlp.gate_up_proj.weight" in t:
            gate, up = np.split(h @ t[f"{p}mlp.gate_up_proj.weight"].T, 2, -1)
        else:
            gate, up = h @ t[f"{p}mlp.gate_proj.weight"].T, h @ t[f"{p}mlp.up_proj.weight"].T
        f = (act(config.get("hidden_activation", config["hidden_act"]), gate) * up) @ t[f"{p}mlp.down_proj.weight"].T
        x = x + (norm(f, f"{p}post_feedforward_layernorm.weight") if four else f)
    out: Doubles = norm(x, "model.norm.weight") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T
    if config.get("final_logit_softcapping"):
        out = config["final_logit_softcapping"] * np.tanh(out / config["final_logit_softcapping"])
    return out


def layer_norm(x: Doubles, weight: Doubles, bias: Doubles, eps: float) -> Doubles:
    centred = x - x.mean(-1, keepdims=True)
    out: Doubles = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias
    return out


def bert_states(config: dict[str, Any], tensors: dict[str, Any], tokens: list[int]) -> Doubles:
    """BERT's last hidden states (Devlin et al. 2019), (T, width), over BertModel's tensors, all tokens of type 0. GELU is the paper's:
    x times the normal distribution's function."""
    t = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
    heads, eps, n = config["num_attention_heads"], config["layer_norm_eps"], len(tokens)

    def linear(x: Doubles, name: str) -> Doubles:
        out: Doubles = x @ t[f"{name}.weight"].T + t[f"{name}.bias"]
        return out

    def norm(x: Doubles, name: str) -> Doubles:
        return layer_norm(x, t[f"{name}.LayerNorm.weight"], t[f"{name}.LayerNorm.bias"], eps)

    tables = (f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type"))
    word, position, kind = (t[name] for name in tables)
    x = norm(word[tokens] + position[:n] + kind[0], "embeddings")
    erf = np.vectorize(math.erf)
    for i in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{i}"
        q, k, v = (linear(x, f"{p}.attention.self.{part}").reshape(n, heads, -1) for part in ("query", "key", "value"))
        scores = softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]))
        a = np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1)
        x = norm(linear(a, f"{p}.attention.output.dense") + x, f"{p}.attention.output")
        h = linear(x, f"{p}.intermediate.dense")
        x = norm(linear(h * 0.5 * (1 + erf(h / math.sqrt(2))), f"{p}.output.dense") + x, f"{p}.output")
    return x
