"""LLaMA 4 (Meta 2025), text part: experts in every n-th layer, weighted before they compute, and a shared one.

Every fourth layer has no positions; its queries grow with the position. In the others, query and key heads are normed behind the rotation
of pairs. Those see only their own chunk of CHUNK positions; contexts beyond the first are not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope, Temperature

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 4
CHUNK = 8192
EXPERTS_WITHOUT_NORM = 128
"""Maverick, with that many experts, does not norm query and key heads."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = replace(Experts.read(keys, p, gating="sigmoid", normalised=False), step=keys.int("interleave_moe_layer_step", 1, minimum=1))
    e = with_shared(e, e.ffn)
    p.check(gguf, e.all_tensors(p, p.tensors()))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope | Temperature]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    local = Attention(qk_norm="" if e.n == EXPERTS_WITHOUT_NORM else "head after")
    how = [Attention(rotated=False, temperature_table=1) if i % PATTERN == PATTERN - 1 else local for i in range(p.n_layers)]
    r.limit_positions(CHUNK)
    layers(r, w, p, x, how, experts(r, w, p, e, weighted_input=True))
    output(r, w, p, x)
    return [with_factors(rope, w), Temperature(0.1, CHUNK, 1)]
