"""Gemma 2 (Gemma Team 2024): Gemma with norms before and after each half of a layer, soft caps on scores and logits.

Layers take turns between a sliding window and everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

LAYERS_OF_27B = 46
"""The one size whose queries are scaled by width / heads instead of the head's own size."""


@dataclass(frozen=True)
class Gemma2:
    decoder: Decoder
    rope: Rope
    window: int
    query_scale: float
    score_cap: float
    logit_cap: float


def read(keys: Keys, gguf: GGUFFile) -> Gemma2:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors({"post_attention_norm.weight": (p.width,), "post_ffw_norm.weight": (p.width,)}))
    return Gemma2(
        decoder=p,
        rope=read_rope(keys, p),
        window=keys.int("attention.sliding_window", 4096, minimum=1),
        query_scale=1.0 / math.sqrt(p.width // p.n_heads if p.n_layers == LAYERS_OF_27B else p.dim),
        score_cap=keys.float("attn_logit_softcapping", 50.0, above=0),
        logit_cap=keys.float("final_logit_softcapping", 30.0, above=0),
    )


def record(params: Gemma2, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params.decoder
    x = r.embed(w.matrix("token_embd.weight"), scale=math.sqrt(p.width))
    everything = Attention(halves=True, scale=params.query_scale, soft_cap=params.score_cap)
    how = [everything if i % 2 else replace(everything, window=params.window) for i in range(p.n_layers)]
    layers(r, w, p, x, how, gated(r, w, p, "gelu_tanh"), post_norm=True)
    output(r, w, p, x, soft_cap=params.logit_cap)
    return [with_factors(params.rope, w)]
