"""Nemotron-H (NVIDIA 2025): every layer is one thing, Mamba 2, attention without positions, or a feed-forward part of squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, output, plain
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import StateSpace, attending, mixed_layers, scanning
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, StateSpace]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = replace(Decoder.read(keys, gguf, fewest_heads=0), n_rot=0)
    s = StateSpace.read(keys, heads=True)
    every = range(p.n_layers)
    widths, heads = keys.per_layer("feed_forward_length", p.n_layers), keys.per_layer("attention.head_count_kv", p.n_layers)
    whole: Shapes = {"token_embd.weight": (p.width, p.n_vocab), "output_norm.weight": (p.width,)}
    scans = [i for i in every if not widths[i] and not heads[i]]
    p.check(
        gguf,
        whole
        | p.per_layer({"attn_norm.weight": (p.width,)})
        | p.per_layer({"ffn_up.weight": (p.width, p.ffn), "ffn_down.weight": (p.ffn, p.width)}, [i for i in every if widths[i]])
        | p.per_layer(p.attention_tensors(), [i for i in every if not widths[i] and heads[i]])
        | p.per_layer(s.mamba2_tensors(p) | s.mamba2_norm(), scans),
        p.per_layer(s.mamba2_optional(), scans),
    )
    return p, s


def record(params: tuple[Decoder, StateSpace], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, s = params
    x = r.embed(w.matrix("token_embd.weight"))
    attend, scan = attending(r, w, p, Attention(rotated=False)), scanning(r, w, p, s, heads=True)
    ffn = plain(r, w, "relu_squared")
    kinds = {"attn_q.weight": attend, "ffn_up.weight": ffn}
    mixers = [next((mixer for name, mixer in kinds.items() if w.has(f"blk.{i}.{name}")), scan) for i in range(p.n_layers)]
    mixed_layers(r, w, p, x, mixers, None)
    output(r, w, p, x)
    return []
