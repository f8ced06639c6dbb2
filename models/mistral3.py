"""Mistral 3 (Mistral AI 2025), text part: LLaMA's layer; queries grow with the position (attention temperature)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope, Temperature

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Temperature | None]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    rope = read_rope(keys, p)
    scale = keys.float("attention.temperature_scale", 0.0)
    return p, rope, Temperature(scale, rope.yarn_original_context) if scale else None


def record(params: tuple[Decoder, Rope, Temperature | None], r: Recorder, w: Weights) -> list[Rope | Temperature]:
    """The forward pass."""
    p, rope, temperature = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(temperature_table=1 if temperature else 0)] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return [with_factors(rope, w), *([temperature] if temperature else [])]
