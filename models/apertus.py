"""Apertus (Swiss AI 2025): LLaMA's layer with norms on query and key heads, rotation of halves, and xIELU without a gate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, layers, linear, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights


def softplus(x: float) -> float:
    """ln(1 + e^x): how the file's curvatures are kept positive."""
    return math.log1p(math.exp(x))


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, list[tuple[float, float, float, float]]]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    norms: Shapes = {"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)}
    biases: Shapes = {"attn_q_norm.bias": (p.dim,), "attn_k_norm.bias": (p.dim,)}
    p.check(gguf, p.tensors(norms, gated=False), p.per_layer(biases))
    rising, falling, betas, eps = (keys.floats(f"xielu.{name}", length=p.n_layers) for name in ("alpha_p", "alpha_n", "beta", "eps"))
    curves = [(softplus(p), b + softplus(n), b, e) for p, n, b, e in zip(rising, falling, betas, eps)]
    return p, read_rope(keys, p), curves


def record(params: tuple[Decoder, Rope, list[tuple[float, float, float, float]]], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, curves = params
    x = r.embed(w.matrix("token_embd.weight"))

    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        g = r.xielu(linear(r, w, f"{blk}.ffn_up", h), *curves[i], "xielu")
        return linear(r, w, f"{blk}.ffn_down", g, add_to=add_to)

    layers(r, w, p, x, [Attention(halves=True, qk_norm="head")] * p.n_layers, ffn)
    output(r, w, p, x)
    return [with_factors(rope, w)]
