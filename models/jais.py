"""Jais (Sengupta et al. 2023): ALiBi instead of rotation, layer norms, biases, Q, K and V in one matrix, SiLU-gated feed-forward, scores
scaled by 1 / dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, float]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(gguf, p.tensors(fused=True))
    return p, keys.float("attention.max_alibi_bias", 8.0, above=0)


def record(params: tuple[Decoder, float], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, bias = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = Attention(rotated=False, scale=1.0 / p.dim, max_alibi_bias=bias)
    layers(r, w, p, x, [how] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return []
