"""Command R and R+ (Cohere 2024): attention and gated feed-forward side by side behind one layer norm, logits times a factor.

R+ norms each query and key head, with weights for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import (
    Attention,
    Decoder,
    Shapes,
    attend,
    gated,
    linear,
    normed,
    output,
    query_key_value,
    read_rope,
    with_factors,
)
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, float]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    norms: Shapes = (
        {"attn_q_norm.weight": (p.dim, p.n_heads), "attn_k_norm.weight": (p.dim, p.n_kv)}
        if "blk.0.attn_q_norm.weight" in gguf.tensors
        else {}
    )
    p.check(gguf, p.tensors(norms, without=("ffn_norm",)))
    return p, read_rope(keys, p), keys.float("logit_scale", above=0)


def record(params: tuple[Decoder, Rope, float], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, scale = params
    x = r.embed(w.matrix("token_embd.weight"))
    for i in range(p.n_layers):
        r.layer(i, x)
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        q, k, v = query_key_value(r, w, p, blk, h)
        if w.has(f"{blk}.attn_q_norm.weight"):
            r.norm_heads(q, p.n_heads, w.vector(f"{blk}.attn_q_norm.weight"), p.eps, "q_norm", kind="layer")
            r.norm_heads(k, p.n_kv, w.vector(f"{blk}.attn_k_norm.weight"), p.eps, "k_norm", kind="layer", beside=True)
        a = r.quantized(attend(r, w, p, blk, q, k, v, Attention()), "attended")
        linear(r, w, f"{blk}.attn_output", a, add_to=x)
        gated(r, w, p)(i, blk, h, x)
    output(r, w, p, x, scale=scale)
    return [with_factors(rope, w)]
