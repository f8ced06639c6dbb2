"""GLM-4-0414 (Zhipu AI 2025): norms before and after each half of a layer, biases on Q, K and V, gate and up in one matrix, partial
rotation of pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    layer: Shapes = {"post_attention_norm.weight": (p.width,), "post_ffw_norm.weight": (p.width,), "ffn_up.weight": (p.width, 2 * p.ffn)}
    p.check(gguf, p.tensors(layer, gated=False))
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention()] * p.n_layers, gated(r, w, p), post_norm=True)
    output(r, w, p, x)
    return [with_factors(rope, w)]
