"""Qwen3 (Yang et al. 2025), dense: LLaMA's layer with an RMS norm on each query and key head, and rotation of halves; its embedding and
ranking models (Zhang et al. 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.ranking import Head
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, poolings=("", "mean", "cls", "last", "rank"))
    head = Head.read(keys)
    norms = p.tensors({"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)})
    p.check(gguf, norms | head.tensors(p.width), head.optional(p.width))
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True, qk_norm="head")] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return [with_factors(rope, w)]
