"""OLMo 2 and 3 (OLMo et al. 2024): norms behind each half of a layer instead of before, RMS norm over all query and all key heads together.

With a sliding window (OLMo 3) three of four layers see that window and rotate without the scaling of long contexts.
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
GLOBAL, LOCAL = 0, 1
"""Angle tables."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, int]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    norms: Shapes = {
        "attn_q_norm.weight": (p.n_heads * p.dim,), "attn_k_norm.weight": (p.n_kv * p.dim,),
        "post_attention_norm.weight": (p.width,), "post_ffw_norm.weight": (p.width,),
    }
    p.check(gguf, p.tensors(norms, without=("attn_norm", "ffn_norm")))
    return p, read_rope(keys, p), keys.int("attention.sliding_window", 0)


def record(params: tuple[Decoder, Rope, int], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, window = params
    x = r.embed(w.matrix("token_embd.weight"))
    everything = Attention(halves=True, qk_norm="row", table=GLOBAL)
    local = replace(everything, window=window, table=LOCAL)
    how = [local if window and i % PATTERN != PATTERN - 1 else everything for i in range(p.n_layers)]
    layers(r, w, p, x, how, gated(r, w, p), pre_norm=False, post_norm=True)
    output(r, w, p, x)
    return [with_factors(rope, w), Rope(p.n_rot, rope.base)]
