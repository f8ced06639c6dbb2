"""Baichuan (Yang et al. 2023): LLaMA's layer; the 13B files (40 layers) have ALiBi instead of rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

LAYERS_OF_7B, LAYERS_OF_13B = 32, 40
"""No key says which it is. The reference gives files of other sizes no positions at all."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = Attention(rotated=p.n_layers == LAYERS_OF_7B, max_alibi_bias=8.0 if p.n_layers == LAYERS_OF_13B else 0.0)
    layers(r, w, p, x, [how] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return [with_factors(rope, w)]
