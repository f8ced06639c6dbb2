"""Jamba (Lieber et al. 2024): Mamba layers with norms of B, C and time steps, attention without positions in a few layers, experts in
some, their weights not divided by their sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, gated, output
from localrun.models.experts import Experts, experts
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import StateSpace, attending, mixed_layers, scanning
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FFN = ("ffn_gate", "ffn_up", "ffn_down")


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, StateSpace, Experts]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = replace(Decoder.read(keys, gguf, experts=True, fewest_heads=0), n_rot=0)
    s = StateSpace.read(keys)
    e = Experts.read(keys, p, normalised=False)
    every = range(p.n_layers)
    attends = [n > 0 for n in keys.per_layer("attention.head_count_kv", p.n_layers)]
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in gguf.tensors for i in every]
    dense: Shapes = {"ffn_gate.weight": (p.width, p.ffn), "ffn_up.weight": (p.width, p.ffn), "ffn_down.weight": (p.ffn, p.width)}
    p.check(
        gguf,
        p.tensors(without=(*ATTENTION, *FFN))
        | p.per_layer(p.attention_tensors(), [i for i in every if attends[i]])
        | p.per_layer(s.mamba_tensors(p, normed=True), [i for i in every if not attends[i]])
        | p.per_layer(e.tensors(p), [i for i in every if sparse[i]])
        | p.per_layer(dense, [i for i in every if not sparse[i]]),
    )
    return p, s, e


def record(params: tuple[Decoder, StateSpace, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, s, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    attend, scan = attending(r, w, p, Attention(rotated=False)), scanning(r, w, p, s, heads=False)
    dense, sparse = gated(r, w, p), experts(r, w, p, e)

    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        return (sparse if w.has(f"{blk}.ffn_gate_inp.weight") else dense)(i, blk, h, add_to)

    mixed_layers(r, w, p, x, [attend if w.has(f"blk.{i}.attn_q.weight") else scan for i in range(p.n_layers)], ffn)
    output(r, w, p, x)
    return []
