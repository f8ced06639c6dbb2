"""OLMo (Groeneveld et al. 2024): layer norms without weights or biases, Q, K and V held in bounds, SiLU-gated feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, float]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(gguf, p.tensors(without=("attn_norm", "ffn_norm", "output_norm")))
    return p, read_rope(keys, p), keys.float("attention.clamp_kqv", 0.0)


def record(params: tuple[Decoder, Rope, float], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, clamp = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(clamp=clamp)] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return [with_factors(rope, w)]
