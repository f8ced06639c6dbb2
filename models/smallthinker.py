"""SmallThinker (Song et al. 2025): a router that reads the layer's input before attention, experts gated by ReLU.

The first of four layers sees everything, without positions; the others see a sliding window and rotate halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, attention_block, linear, normed, output, read_rope, with_factors
from localrun.models.experts import Experts, choose, chosen_ffn
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 4
"""The first of so many layers is global, and without positions if there are more layers than these."""
WINDOW = 4096
"""Of all files that have a window; the reference does not look at its size either."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts, int]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = Experts.read(keys, p, gating="sigmoid", activation="relu")
    p.check(gguf, e.all_tensors(p, p.tensors()))
    return p, read_rope(keys, p), e, WINDOW if keys.int("attention.sliding_window", 0) else 0


def record(params: tuple[Decoder, Rope, Experts, int], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e, window = params
    x = r.embed(w.matrix("token_embd.weight"))
    for i in range(p.n_layers):
        r.layer(i, x)
        blk = f"blk.{i}"
        routing = choose(r, w, blk, r.quantized(x, "x"), e)
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        how = Attention(halves=True, window=window if i % PATTERN else 0, rotated=i % PATTERN != 0 or not window or p.n_layers == PATTERN)
        linear(r, w, f"{blk}.attn_output", attention_block(r, w, p, blk, h, how), add_to=x)
        h = normed(r, w, p, x, f"{blk}.ffn_norm")
        r.combine(chosen_ffn(r, w, blk, h, routing, e.activation), routing, x, "combine", add=True)
    output(r, w, p, x)
    return [with_factors(rope, w)]
