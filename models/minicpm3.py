"""MiniCPM3 (OpenBMB 2024): attention through compressed queries, keys and values, which are expanded before they are kept; MiniCPM's
factors.

LongRoPE as in phi3.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, attend, gated, linear, normed, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH = 12.0, 1.4, 256.0
"""No key holds them."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, int]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    q_rank, latent = keys.int("attention.q_lora_rank", minimum=1), keys.int("attention.kv_lora_rank", minimum=1)
    layer: Shapes = {
        "attn_q_a.weight": (p.width, q_rank), "attn_q_a_norm.weight": (q_rank,), "attn_q_b.weight": (q_rank, p.n_heads * p.dim),
        "attn_kv_a_mqa.weight": (p.width, latent + p.n_rot), "attn_kv_a_norm.weight": (latent,),
        "attn_kv_b.weight": (latent, p.n_heads * (p.dim - p.n_rot + p.dim_v)),
    }
    factors: Shapes = {"rope_factors_long.weight": (p.n_rot // 2,), "rope_factors_short.weight": (p.n_rot // 2,)}
    p.check(gguf, p.tensors(layer, without=("attn_q", "attn_k", "attn_v")), factors)
    return p, read_rope(keys, p), latent


def record(params: tuple[Decoder, Rope, int], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, latent = params
    x = r.embed(w.matrix("token_embd.weight"), scale=EMBEDDING_SCALE)
    residual = DEPTH_SCALE / math.sqrt(p.n_layers)
    nope = p.dim - p.n_rot
    ffn = gated(r, w, p)
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        q_a = linear(r, w, f"{blk}.attn_q_a", h)
        kv_a = linear(r, w, f"{blk}.attn_kv_a_mqa", h, beside=True)
        q = linear(r, w, f"{blk}.attn_q_b", normed(r, w, p, q_a, f"{blk}.attn_q_a_norm"))
        kv = linear(r, w, f"{blk}.attn_kv_b", normed(r, w, p, kv_a.columns(0, latent), f"{blk}.attn_kv_a_norm"))
        r.rotate(q, p.n_heads, p.n_rot, 0, "rotate q", halves=True, first=nope)
        r.rotate(kv_a, 1, p.n_rot, 0, "rotate k", halves=True, first=latent)
        k, v = r.row("k", p.n_heads * p.dim), r.row("v", p.n_heads * p.dim_v)
        r.copy_part(kv, k, p.n_heads, "k_nope", n=nope, first=0, to=0)
        r.copy_part(kv_a, k, p.n_heads, "k_pe", n=p.n_rot, first=latent, to=nope, same=True)
        r.copy_part(kv, v, p.n_heads, "v", n=p.dim_v, first=nope, to=0)
        a = attend(r, w, p, blk, q, k, v, Attention(rotated=False))
        r.add(linear(r, w, f"{blk}.attn_output", r.quantized(a, "attended")), x, "residual", scale=residual)
        y = ffn(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), None)
        r.add(y, x, "residual", scale=residual)
    output(r, w, p, x, scale=BASE_WIDTH / p.width)
    which = "long" if (r.n_ctx or p.context) > rope.yarn_original_context else "short"
    return [with_factors(rope, w, f"rope_factors_{which}.weight")]
