"""SmolLM3 (Hugging Face 2025): LLaMA's layer; every fourth layer has no positions (NoPE, Yang et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

STEP = 4
"""Every n-th layer has no rotation."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = [Attention(rotated=(i + 1) % STEP != 0) for i in range(p.n_layers)]
    layers(r, w, p, x, how, gated(r, w, p))
    output(r, w, p, x)
    return [with_factors(rope, w)]
