"""OpenELM (Mehta et al. 2024): heads and feed-forward width differ by layer; Q, K and V in one matrix, norms on query and key heads,
rotation of halves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, attention_block, gated, linear, normed, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[list[Decoder], Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    n_layers = p.n_layers
    heads = keys.per_layer("attention.head_count", n_layers, minimum=1)
    kv = keys.per_layer("attention.head_count_kv", n_layers, minimum=1)
    ffn = keys.per_layer("feed_forward_length", n_layers, minimum=1)
    sizes = [replace(p, n_heads=heads[i], n_kv=kv[i], ffn=ffn[i]) for i in range(n_layers)]
    norms: Shapes = {"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)}
    shapes = [size.tensors(norms, fused=True) for size in sizes]
    p.check(gguf, {name: shapes[int(name.split(".")[1]) if name.startswith("blk.") else 0][name] for name in shapes[0]})
    return sizes, read_rope(keys, p)


def record(params: tuple[list[Decoder], Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    sizes, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = Attention(halves=True, qk_norm="head")
    for i, p in enumerate(sizes):
        r.layer(i, x)
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        linear(r, w, f"{blk}.attn_output", attention_block(r, w, p, blk, h, how), add_to=x)
        gated(r, w, p)(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), x)
    output(r, w, sizes[0], x)
    return [with_factors(rope, w)]
