"""Gemma 3, text part (Gemma Team 2025).

Gemma 2 with norms on query and key heads instead of soft caps. Five of six layers see a sliding window and rotate with base 10,000; the
sixth sees everything and rotates with the file's base and scaling. Rows of an image see each other; an image has fewer than the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, gated, layers, output, read_rope
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 6
"""Every sixth layer is global."""
LAYERS_OF_27B = 62
"""The one size whose queries are scaled by width / heads instead of the head's own size."""
GLOBAL, LOCAL = 0, 1
"""Angle tables."""


@dataclass(frozen=True)
class Gemma3:
    decoder: Decoder
    window: int
    query_scale: float
    global_rope: Rope
    local_rope: Rope


def read(keys: Keys, gguf: GGUFFile) -> Gemma3:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        keys.refuse(key, "soft-capping is no part of Gemma 3 as supported")
    norms: Shapes = {"post_attention_norm.weight": (p.width,), "post_ffw_norm.weight": (p.width,)}
    p.check(gguf, p.tensors(norms | {"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)}))
    return Gemma3(
        decoder=p,
        window=keys.int("attention.sliding_window", minimum=1),
        query_scale=1.0 / math.sqrt(p.width // p.n_heads if p.n_layers == LAYERS_OF_27B else p.dim),
        global_rope=read_rope(keys, p, base=1_000_000.0),
        local_rope=Rope(p.n_rot, keys.float("rope.freq_base_swa", 10_000.0, above=0)),
    )


def record(params: Gemma3, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params.decoder
    x = r.embed(w.matrix("token_embd.weight"), scale=math.sqrt(p.width))
    r.place_images(x)
    everything = Attention(halves=True, scale=params.query_scale, qk_norm="head", table=GLOBAL)
    local = replace(everything, window=params.window, table=LOCAL)
    how = [everything if i % PATTERN == PATTERN - 1 else local for i in range(p.n_layers)]
    layers(r, w, p, x, how, gated(r, w, p, "gelu_tanh"), post_norm=True)
    output(r, w, p, x)
    return [params.global_rope, params.local_rope]
