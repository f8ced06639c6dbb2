"""Granite 4 (IBM 2025): Mamba 2 in most layers, attention in a few, with rotation only if the file says so; Granite's factors
(granite.py); dense or with experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.granite import Scales
from localrun.models.params import Keys
from localrun.models.recurrent import StateSpace, attending, mixed_layers, scanning
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
Granite = tuple[Decoder, Rope, StateSpace, Experts | None, Scales, bool]


def read(keys: Keys, gguf: GGUFFile) -> Granite:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True, fewest_heads=0)
    s = StateSpace.read(keys, heads=True)
    e = None
    if keys.int("expert_count", 0):
        e = with_shared(Experts.read(keys, p), keys.int("expert_shared_feed_forward_length", 0))
    attends = [n > 0 for n in keys.per_layer("attention.head_count_kv", p.n_layers)]
    scans = [i for i in range(p.n_layers) if not attends[i]]
    shapes = p.tensors(without=ATTENTION)
    shapes |= p.per_layer(p.attention_tensors(), [i for i in range(p.n_layers) if attends[i]])
    shapes |= p.per_layer(s.mamba2_tensors(p) | s.mamba2_norm(), scans)
    optional = p.per_layer(s.mamba2_optional(), scans)
    p.check(gguf, shapes if e is None else e.all_tensors(p, shapes), optional)
    return p, read_rope(keys, p), s, e, Scales.read(keys, p), keys.bool("rope.scaling.finetuned", True)


def record(params: Granite, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, s, e, scales, rotated = params
    x = r.embed(w.matrix("token_embd.weight"), scale=scales.embedding)
    attend, scan = attending(r, w, p, Attention(scale=scales.attention, rotated=rotated)), scanning(r, w, p, s, heads=True)
    mixers = [attend if w.has(f"blk.{i}.attn_q.weight") else scan for i in range(p.n_layers)]
    ffn = gated(r, w, p) if e is None else experts(r, w, p, e)
    mixed_layers(r, w, p, x, mixers, ffn, residual_scale=scales.residual)
    output(r, w, p, x, scale=1.0 / scales.logits)
    return [with_factors(rope, w)]
