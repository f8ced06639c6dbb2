"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention; weights by softmax over all experts."""

from __future__ import annotations

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
    e = Experts.read(keys, p)
    p.check(gguf, e.all_tensors(p, p.tensors({"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)})), e.all_optional(p))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True, qk_norm="head")] * p.n_layers, experts(r, w, p, e))
    output(r, w, p, x)
    return [with_factors(rope, w)]
