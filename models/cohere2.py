"""Command R7B and Command A (Cohere 2024): attention and gated feed-forward side by side behind one layer norm, logits times a factor.

Three of four layers see a sliding window and rotate; the fourth sees everything, without positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, output, parallel_layers, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 4
"""Every fourth layer is global."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, int, float]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(gguf, p.tensors(without=("ffn_norm",)))
    return p, read_rope(keys, p), keys.int("attention.sliding_window", minimum=1), keys.float("logit_scale", above=0)


def record(params: tuple[Decoder, Rope, int, float], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, window, scale = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = [Attention(rotated=False) if i % PATTERN == PATTERN - 1 else Attention(window=window) for i in range(p.n_layers)]
    parallel_layers(r, w, p, x, how, gated(r, w, p))
    output(r, w, p, x, scale=scale)
    return [with_factors(rope, w)]
