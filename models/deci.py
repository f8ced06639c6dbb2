"""Deci and Llama-Nemotron (Bercovich et al. 2024): LLaMA's layer with key-value heads and feed-forward width that differ by layer.

Layers without attention or without a feed-forward part are not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, attention_block, gated, linear, normed, output, read_rope, with_factors
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
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if 0 in keys.per_layer(name, n_layers):
            raise keys.error(name, "is 0 for some layer; layers without attention or feed-forward part are not supported")
    heads, kv, ffn = (keys.per_layer(name, n_layers) for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"))
    sizes = [replace(p, n_heads=heads[i], n_kv=kv[i], ffn=ffn[i]) for i in range(n_layers)]
    shapes = [size.tensors() for size in sizes]
    p.check(gguf, {name: shapes[int(name.split(".")[1]) if name.startswith("blk.") else 0][name] for name in shapes[0]})
    return sizes, read_rope(keys, p)


def record(params: tuple[list[Decoder], Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    sizes, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    for i, p in enumerate(sizes):
        r.layer(i, x)
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        linear(r, w, f"{blk}.attn_output", attention_block(r, w, p, blk, h, Attention()), add_to=x)
        gated(r, w, p)(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), x)
    output(r, w, sizes[0], x)
    return [with_factors(rope, w)]
