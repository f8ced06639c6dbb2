"""Phi-3.5-MoE (Abdin et al. 2024): norms and matrices with biases, rotation of halves with LongRoPE as in phi3.py; weights by softmax.

Norms are RMS norms, as the reference computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, layers, output, read_rope, with_factors
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
    factors: Shapes = {"rope_factors_long.weight": (p.n_rot // 2,), "rope_factors_short.weight": (p.n_rot // 2,)}
    biases = p.per_layer({"attn_norm.bias": (p.width,), "ffn_norm.bias": (p.width,)}) | {"output_norm.bias": (p.width,)}
    p.check(gguf, e.all_tensors(p, p.tensors()), e.all_optional(p) | factors | biases | {"output.bias": (p.n_vocab,)})
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True)] * p.n_layers, experts(r, w, p, e))
    output(r, w, p, x)
    which = "long" if (r.n_ctx or p.context) > rope.yarn_original_context else "short"
    return [with_factors(rope, w, f"rope_factors_{which}.weight")]
