"""Arctic (Snowflake 2024): LLaMA's layer with a dense feed-forward part; beside the whole layer, experts that read its input."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, attention_block, gated, linear, normed, output, read_rope, with_factors
from localrun.models.experts import Experts, experts
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = Experts.read(keys, p)
    p.check(gguf, replace(p, ffn=p.width).tensors({"ffn_norm_exps.weight": (p.width,)}) | p.per_layer(e.tensors(p)))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    dense = gated(r, w, replace(p, ffn=p.width))
    for i in range(p.n_layers):
        r.layer(i, x)
        blk = f"blk.{i}"
        experts_input = normed(r, w, p, x, f"{blk}.ffn_norm_exps", buffer="normed2")
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        linear(r, w, f"{blk}.attn_output", attention_block(r, w, p, blk, h, Attention()), add_to=x)
        dense(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), x)
        experts(r, w, p, e)(i, blk, experts_input, x)
    output(r, w, p, x)
    return [with_factors(rope, w)]
