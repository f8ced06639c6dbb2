"""Arcee's AFM (2025): LLaMA's layer with a feed-forward part of squared ReLU without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, plain, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors(gated=False))
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention()] * p.n_layers, plain(r, w, "relu_squared"))
    output(r, w, p, x)
    return [with_factors(rope, w)]
