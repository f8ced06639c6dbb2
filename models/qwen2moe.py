"""Qwen1.5 and Qwen2 with experts (Yang et al. 2024): Qwen2's attention; weights by softmax, not divided by their sum; a shared expert
with its own gate.
"""

from __future__ import annotations

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
    e = Experts.read(keys, p, ffn=p.ffn // max(1, keys.int("expert_used_count", minimum=1)), normalised=False)
    e = with_shared(e, keys.int("expert_shared_feed_forward_length", p.ffn, minimum=1))
    gate = p.per_layer({"ffn_gate_inp_shexp.weight": (p.width,)})
    p.check(gguf, e.all_tensors(p, p.tensors(p.attention_biases())) | gate, e.all_optional(p))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True)] * p.n_layers, experts(r, w, p, e))
    output(r, w, p, x)
    return [with_factors(rope, w)]
