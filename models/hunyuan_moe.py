"""Hunyuan-A13B (Tencent 2025): norms on query and key heads behind the rotation of halves; a shared expert; weights by softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = replace(Experts.read(keys, p), ffn=p.ffn)  # expert_feed_forward_length is not what files of this kind go by
    e = with_shared(e, keys.int("expert_shared_feed_forward_length", minimum=1))
    p.check(gguf, e.all_tensors(p, p.tensors({"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)})), e.all_optional(p))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True, qk_norm="head after")] * p.n_layers, experts(r, w, p, e))
    output(r, w, p, x)
    return [with_factors(rope, w)]
