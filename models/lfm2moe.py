"""LFM2 with experts (Liquid AI 2025): LFM2's layers (lfm2.py); experts by sigmoid behind a few dense layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Decoder, read_rope, with_factors
from localrun.models.experts import Experts, experts
from localrun.models.gguf import GGUFFile
from localrun.models.lfm2 import mix, tensors
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True, fewest_heads=0)
    e = Experts.read(keys, p, gating="sigmoid")
    p.check(gguf, e.all_tensors(p, tensors(keys, p)), e.all_optional(p))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    mix(r, w, p, experts(r, w, p, e))
    return [with_factors(rope, w)]
