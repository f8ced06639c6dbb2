"""EXAONE 4 (LG AI Research 2025): norms behind each half of a layer instead of before, norms on query and key heads, rotation of halves.

With a sliding window (32B) three of four layers see that window; the fourth sees everything, without positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 4
"""Every fourth layer is global."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, int]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    norms: Shapes = {
        "attn_q_norm.weight": (p.dim,),
        "attn_k_norm.weight": (p.dim,),
        "post_attention_norm.weight": (p.width,),
        "post_ffw_norm.weight": (p.width,),
    }
    p.check(gguf, p.tensors(norms, without=("attn_norm", "ffn_norm")))
    return p, read_rope(keys, p), keys.int("attention.sliding_window", 0)


def record(params: tuple[Decoder, Rope, int], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, window = params
    x = r.embed(w.matrix("token_embd.weight"))
    local = Attention(halves=True, qk_norm="head", window=window)
    everything = replace(local, rotated=not window, window=0)
    how = [everything if i % PATTERN == PATTERN - 1 else local for i in range(p.n_layers)]
    layers(r, w, p, x, how, gated(r, w, p), pre_norm=False, post_norm=True)
    output(r, w, p, x)
    return [with_factors(rope, w)]
