"""Refact (Small Magellanic Cloud AI 2023): LLaMA's layer with ALiBi instead of rotation and one key-value head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> Decoder:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    return p


def record(params: Decoder, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(rotated=False, max_alibi_bias=8.0)] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return []
