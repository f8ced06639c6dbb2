"""Layers of Qwen3-Next and Qwen3.5: gated delta nets (Yang et al. 2024) in most, attention with a gate on what it gives in every few."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Ffn, Shapes, attend, linear
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import short_conv

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

INTERVAL = 4
"""Every so many layers one attends, where the file does not say."""


@dataclass(frozen=True)
class DeltaNet:
    """Hyper-parameters under ssm.*; a head of keys and one of values are equally wide."""

    taps: int
    dim: int
    key_heads: int
    heads: int
    recurrent: tuple[bool, ...]
    """Which layers are delta nets."""
    joint: bool
    """b and a come from one matrix, a group's b before its a, and the heads of a group lie side by side (Qwen3-Next)."""

    @classmethod
    def read(cls, keys: Keys, p: Decoder, *, joint: bool) -> DeltaNet:
        """From the file's keys. Raises ModelFileError."""
        every = keys.int("full_attention_interval", INTERVAL, minimum=1)
        said = keys.bools("attention.recurrent_layers", None)
        if said is not None and len(said) < p.n_layers:
            raise keys.error("attention.recurrent_layers", f"has {len(said)} items for {p.n_layers} layers")
        d = cls(
            taps=keys.int("ssm.conv_kernel", minimum=2, maximum=16),
            dim=keys.int("ssm.state_size", minimum=1),
            key_heads=keys.int("ssm.group_count", minimum=1),
            heads=keys.int("ssm.time_step_rank", minimum=1),
            recurrent=tuple(said[: p.n_layers]) if said is not None else tuple((i + 1) % every != 0 for i in range(p.n_layers)),
            joint=joint,
        )
        if d.dim % 16:
            raise keys.error("ssm.state_size", f"is {d.dim}; only multiples of 16 are supported")
        if d.heads % d.key_heads:
            raise keys.error("ssm.group_count", f"is {d.key_heads}, which does not divide the {d.heads} heads")
        if keys.int("ssm.inner_size") != d.heads * d.dim:
            raise keys.error("ssm.inner_size", f"is {keys.int('ssm.inner_size')}, but {d.heads} heads have {d.dim} values each")
        return d

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.dim

    @property
    def mixed(self) -> int:
        """Width of queries, keys and values."""
        return 2 * self.key_heads * self.dim + self.values

    def tensors(self, p: Decoder) -> Shapes:
        """Of all layers, but for their feed-forward parts."""
        gates: Shapes = (
            {"ssm_ba.weight": (p.width, 2 * self.heads)}
            if self.joint
            else {"ssm_beta.weight": (p.width, self.heads), "ssm_alpha.weight": (p.width, self.heads)}
        )
        delta: Shapes = {
            "attn_qkv.weight": (p.width, self.mixed), "attn_gate.weight": (p.width, self.values),
            "ssm_conv1d.weight": (self.taps, self.mixed), "ssm_dt.bias": (self.heads,), "ssm_a": (self.heads,),
            "ssm_norm.weight": (self.dim,), "ssm_out.weight": (self.values, p.width), **gates,
        }  # fmt: skip
        attention: Shapes = {
            **p.attention_tensors(), "attn_q.weight": (p.width, 2 * p.n_heads * p.dim),
            "attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,),
        }  # fmt: skip
        every = range(p.n_layers)
        whole: Shapes = {"token_embd.weight": (p.width, p.n_vocab), "output_norm.weight": (p.width,)}
        return (
            whole
            | p.per_layer({"attn_norm.weight": (p.width,), "post_attention_norm.weight": (p.width,)})
            | p.per_layer(delta, [i for i in every if self.recurrent[i]])
            | p.per_layer(attention, [i for i in every if not self.recurrent[i]])
        )


def without_further_layers(keys: Keys, p: Decoder) -> Decoder:
    """The decoder without the layers that predict further tokens."""
    return replace(p, n_layers=p.n_layers - keys.int("nextn_predict_layers", 0, maximum=p.n_layers - 1))


def check(gguf: GGUFFile, p: Decoder, shapes: Shapes, optional: Shapes | None = None) -> None:
    """Holds the file against the table; tensors of layers that are not used may be there. Raises ModelFileError."""
    p.check(gguf, shapes, (optional or {}) | p.further(gguf))


def mixers(r: Recorder, w: Weights, p: Decoder, d: DeltaNet) -> list[Ffn]:
    """One for each layer."""
    delta, gate = delta_mixer(r, w, p, d), gated_attention(r, w, p)
    return [delta if recurrent else gate for recurrent in d.recurrent]


def delta_mixer(r: Recorder, w: Weights, p: Decoder, d: DeltaNet) -> Ffn:
    """The mixer of a layer that is a delta net."""
    from localrun.models.program import float_bits

    wide = next(n for n in (4, 2, 1) if d.dim % (16 * n) == 0)
    of_head, of_group, keys = d.dim // (16 * wide), d.heads // d.key_heads, d.key_heads * d.dim

    def gates(blk: str, h: Activation) -> tuple[int, int, int, int]:
        """Addresses and strides of b and a."""
        if d.joint:
            ba = r.matmul(w.matrix(f"{blk}.ssm_ba.weight"), h, "ssm_ba", beside=True)
            return ba.address, ba.stride, ba.address + 4 * of_group, ba.stride
        b = r.matmul(w.matrix(f"{blk}.ssm_beta.weight"), h, "ssm_beta", beside=True)
        a = r.matmul(w.matrix(f"{blk}.ssm_alpha.weight"), h, "ssm_alpha", beside=True)
        return b.address, b.stride, a.address, a.stride

    def mixer(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        qkv = r.matmul(w.matrix(f"{blk}.attn_qkv.weight"), h, "delta_qkv")
        z = r.matmul(w.matrix(f"{blk}.attn_gate.weight"), h, "delta_z", beside=True)
        b_and_a = gates(blk, h)
        x = short_conv(r, w, f"{blk}.ssm_conv1d", qkv, "delta_conv", activated=True)
        r.norm_heads(x.columns(0, 2 * keys), 2 * d.key_heads, None, p.eps, "qk_norm", kind="l2")
        y = r.row("delta_y", d.values)
        args = [
            x.address, x.address + 4 * keys, x.address + 8 * keys, x.stride, *b_and_a, (2 if d.joint else 1) * of_group,
            w.vector(f"{blk}.ssm_dt.bias").address, w.vector(f"{blk}.ssm_a").address, y.address, y.stride, d.dim, of_head, of_group,
            d.key_heads, int(d.joint), float_bits(1.0 / math.sqrt(d.dim)),
        ]  # fmt: skip
        r.over_spans("deltanet", "gated_delta", [wide], args, "delta", parts=d.heads * of_head, part_bytes=d.dim * wide * 64)
        r.norm_heads(y, d.heads, w.vector(f"{blk}.ssm_norm.weight"), p.eps, "delta_norm")
        return linear(r, w, f"{blk}.ssm_out", r.gated(z, y, "silu", "delta_gated"), add_to=add_to)

    return mixer


def gated_attention(r: Recorder, w: Weights, p: Decoder) -> Ffn:
    """The mixer of a layer that attends; what it gives goes through a gate that attn_q makes beside each query."""
    how = Attention(halves=True, qk_norm="head")

    def mixer(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        both = r.matmul(w.matrix(f"{blk}.attn_q.weight"), h, "q_and_gate", bias=w.maybe(f"{blk}.attn_q.bias"))
        k, v = linear(r, w, f"{blk}.attn_k", h, beside=True), linear(r, w, f"{blk}.attn_v", h, beside=True)
        q, gate = r.row("q", p.n_heads * p.dim), r.row("attn_gate", p.n_heads * p.dim)
        r.copy_part(both, q, p.n_heads, "q", n=p.dim, first=0, to=0)
        r.copy_part(both, gate, p.n_heads, "gate", n=p.dim, first=p.dim, to=0)
        a = attend(r, w, p, blk, q, k, v, how)
        return linear(r, w, f"{blk}.attn_output", r.gated(gate, a, "sigmoid", "attn_gated"), add_to=add_to)

    return mixer
