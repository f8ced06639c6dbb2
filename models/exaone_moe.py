"""EXAONE with experts (LG AI Research 2025): norms on query and key heads; dense first layers, then experts with a shared one.

Three of four layers see a sliding window and rotate halves; the fourth sees everything, without positions. The layers that predict further
tokens are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 4
"""Every fourth layer is global."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts, int]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    p = replace(p, n_layers=p.n_layers - keys.int("nextn_predict_layers", 0, maximum=p.n_layers - 1))
    e = Experts.read(keys, p, gating="sigmoid")
    e = with_shared(e, keys.int("expert_shared_feed_forward_length", e.ffn * keys.int("expert_shared_count", 0)))
    norms: Shapes = {"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)}
    p.check(gguf, e.all_tensors(p, p.tensors(norms)), e.all_optional(p) | p.further(gguf))
    return p, read_rope(keys, p), e, keys.int("attention.sliding_window", minimum=1)


def record(params: tuple[Decoder, Rope, Experts, int], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e, window = params
    x = r.embed(w.matrix("token_embd.weight"))
    local = Attention(halves=True, qk_norm="head", window=window)
    everything = replace(local, rotated=False, window=0)
    how = [everything if i % PATTERN == PATTERN - 1 else local for i in range(p.n_layers)]
    layers(r, w, p, x, how, experts(r, w, p, e))
    output(r, w, p, x)
    return [with_factors(rope, w)]
