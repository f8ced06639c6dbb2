"""Gemma (Gemma Team 2024): embeddings scaled by sqrt(width), GELU-gated feed-forward, rotation of halves, output tied to the embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"), scale=math.sqrt(p.width))
    layers(r, w, p, x, [Attention(halves=True)] * p.n_layers, gated(r, w, p, "gelu_tanh"))
    output(r, w, p, x)
    return [with_factors(rope, w)]
