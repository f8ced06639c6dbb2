"""EmbeddingGemma (Schechter Vera et al. 2025): Gemma 3's layers, seeing both ways; a window lies half on either side."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, gated, layers, read_rope
from localrun.models.encoder import normed_output, read_encoder
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.validate import check_model

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 6
"""Every sixth layer is global."""
GLOBAL, LOCAL = 0, 1
"""Angle tables."""


@dataclass(frozen=True)
class GemmaEmbedding:
    decoder: Decoder
    window: int
    pattern: int
    global_rope: Rope
    local_rope: Rope


def read(keys: Keys, gguf: GGUFFile) -> GemmaEmbedding:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = read_encoder(keys, gguf, norm="rms", poolings=("", "mean", "cls", "last"))
    norms: Shapes = {"post_attention_norm.weight": (p.width,), "post_ffw_norm.weight": (p.width,)}
    check_model(gguf, p.tensors(norms | {"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)}))
    return GemmaEmbedding(
        decoder=p,
        window=keys.int("attention.sliding_window", minimum=1),
        pattern=keys.int("attention.sliding_window_pattern", PATTERN, minimum=1),
        global_rope=read_rope(keys, p, base=1_000_000.0),
        local_rope=Rope(p.n_rot, keys.float("rope.freq_base_swa", 10_000.0, above=0)),
    )


def record(params: GemmaEmbedding, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params.decoder
    r.see_both_ways()
    x = r.embed(w.matrix("token_embd.weight"), scale=math.sqrt(p.width))
    everything = Attention(halves=True, qk_norm="head", table=GLOBAL)
    local = replace(everything, window=params.window, table=LOCAL)
    how = [local if (i + 1) % params.pattern else everything for i in range(p.n_layers)]
    layers(r, w, p, x, how, gated(r, w, p, "gelu_tanh"), post_norm=True)
    normed_output(r, w, p, x)
    return [params.global_rope, params.local_rope]
