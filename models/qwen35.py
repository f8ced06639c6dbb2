"""Qwen3.5 (Qwen Team 2026), dense, text part: gated delta nets, every fourth layer attention with a gate, rotation of halves of a part
of each head (deltanet.py).

Its rotation has sections for text, height and width; for text alone all three are the position. Layers that predict further tokens are left
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models import deltanet
from localrun.models.blocks import Decoder, Shapes, gated, output, read_rope, with_factors
from localrun.models.deltanet import DeltaNet
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import mixed_layers
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, DeltaNet]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = deltanet.without_further_layers(keys, Decoder.read(keys, gguf))
    d = DeltaNet.read(keys, p, joint=False)
    ffn: Shapes = {"ffn_gate.weight": (p.width, p.ffn), "ffn_up.weight": (p.width, p.ffn), "ffn_down.weight": (p.ffn, p.width)}
    deltanet.check(gguf, p, d.tensors(p) | p.per_layer(ffn))
    return p, read_rope(keys, p), d


def record(params: tuple[Decoder, Rope, DeltaNet], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, d = params
    x = r.embed(w.matrix("token_embd.weight"))
    mixed_layers(r, w, p, x, deltanet.mixers(r, w, p, d), gated(r, w, p), ffn_norm="post_attention_norm")
    output(r, w, p, x)
    return [with_factors(rope, w)]
