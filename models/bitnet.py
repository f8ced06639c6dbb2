"""BitNet b1.58 (Ma et al. 2024): LLaMA's layer with a further norm before each of its output matrices, rotation of halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, attend, linear, normed, output, query_key_value, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors({"attn_sub_norm.weight": (p.n_heads * p.dim_v,), "ffn_sub_norm.weight": (p.ffn,)}))
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    for i in range(p.n_layers):
        r.layer(i, x)
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        a = attend(r, w, p, blk, *query_key_value(r, w, p, blk, h), Attention(halves=True))
        linear(r, w, f"{blk}.attn_output", normed(r, w, p, a, f"{blk}.attn_sub_norm"), add_to=x)
        h = normed(r, w, p, x, f"{blk}.ffn_norm")
        gate, up = linear(r, w, f"{blk}.ffn_gate", h), linear(r, w, f"{blk}.ffn_up", h, beside=True)
        r.gated(gate, up, "silu", "gated")
        linear(r, w, f"{blk}.ffn_down", normed(r, w, p, gate, f"{blk}.ffn_sub_norm"), add_to=x)
    output(r, w, p, x)
    return [with_factors(rope, w)]
