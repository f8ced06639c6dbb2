"""MiniMax-M2 (2025): RMS norm over all query and all key heads together, partial rotation of halves; weights by sigmoid."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, read_rope, with_factors
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
    e = replace(Experts.read(keys, p, gating="sigmoid"), ffn=p.ffn)  # as in hunyuan_moe.py
    p.check(
        gguf,
        e.all_tensors(p, p.tensors({"attn_q_norm.weight": (p.n_heads * p.dim,), "attn_k_norm.weight": (p.n_kv * p.dim,)})),
        e.all_optional(p),
    )
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True, qk_norm="row")] * p.n_layers, experts(r, w, p, e))
    output(r, w, p, x)
    return [with_factors(rope, w)]
