"""Qwen3.5 with experts (Qwen Team 2026), text part: Qwen3.5's layers (qwen35.py); weights by softmax, divided by their sum; a shared
expert with its own gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models import deltanet
from localrun.models.blocks import Decoder, output, read_rope, with_factors
from localrun.models.deltanet import DeltaNet
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import mixed_layers
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

Params = tuple[Decoder, Rope, DeltaNet, Experts]


def read(keys: Keys, gguf: GGUFFile) -> Params:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    return read_as(keys, gguf, joint=False)


def read_as(keys: Keys, gguf: GGUFFile, *, joint: bool) -> Params:
    """The same; joint: see DeltaNet."""
    p = deltanet.without_further_layers(keys, Decoder.read(keys, gguf, experts=True))
    d = DeltaNet.read(keys, p, joint=joint)
    e = with_shared(Experts.read(keys, p), keys.int("expert_shared_feed_forward_length", p.ffn, minimum=1))
    gate = p.per_layer({"ffn_gate_inp_shexp.weight": (p.width,)})
    deltanet.check(gguf, p, e.all_tensors(p, d.tensors(p)) | gate, e.all_optional(p))
    return p, read_rope(keys, p), d, e


def record(params: Params, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, d, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    mixed_layers(r, w, p, x, deltanet.mixers(r, w, p, d), experts(r, w, p, e), ffn_norm="post_attention_norm")
    output(r, w, p, x)
    return [with_factors(rope, w)]
