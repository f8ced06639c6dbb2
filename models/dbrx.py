"""DBRX (Databricks 2024): layer norms without biases, Q, K and V in one matrix and held in bounds, rotation of halves; weights by
softmax.
"""

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


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts, float]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer", experts=True)
    e = Experts.read(keys, p)
    p.check(gguf, e.all_tensors(p, p.tensors({"attn_output_norm.weight": (p.width,)}, without=("ffn_norm",), fused=True)))
    return p, read_rope(keys, p), e, keys.float("attention.clamp_kqv", above=0)


def record(params: tuple[Decoder, Rope, Experts, float], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e, clamp = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = Attention(halves=True, clamp=clamp)
    layers(r, w, p, x, [how] * p.n_layers, experts(r, w, p, e), ffn_norm="attn_output_norm")
    output(r, w, p, x)
    return [with_factors(rope, w)]
