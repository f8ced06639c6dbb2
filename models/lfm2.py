"""LFM2 (Liquid AI 2025): most layers are short convolutions between two gates, the others attention with norms on heads and rotation of
halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Ffn, Shapes, gated, linear, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import attending, mixed_layers, multiply, short_conv
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def tensors(keys: Keys, p: Decoder) -> Shapes:
    """Of all layers, with dense feed-forward parts."""
    attends = [n > 0 for n in keys.per_layer("attention.head_count_kv", p.n_layers)]
    taps = keys.int("shortconv.l_cache", minimum=2, maximum=16)
    shapes = p.tensors(without=(*ATTENTION, "output_norm")) | {"token_embd_norm.weight": (p.width,)}
    shapes |= p.per_layer(
        {**p.attention_tensors(), "attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)},
        [i for i in range(p.n_layers) if attends[i]],
    )
    conv: Shapes = {
        "shortconv.conv.weight": (taps, p.width), "shortconv.in_proj.weight": (p.width, 3 * p.width),
        "shortconv.out_proj.weight": (p.width, p.width),
    }  # fmt: skip
    return shapes | p.per_layer(conv, [i for i in range(p.n_layers) if not attends[i]])


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, fewest_heads=0)
    p.check(gguf, tensors(keys, p))
    return p, read_rope(keys, p)


def convolving(r: Recorder, w: Weights, p: Decoder) -> Ffn:
    """The mixer of a layer that convolves: out(c * conv(b * x))."""

    def mixer(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        b, c, x = (
            r.matmul(w.matrix(f"{blk}.shortconv.in_proj.weight", k * p.width, p.width), h, f"conv_{name}", beside=k > 0)
            for k, name in enumerate("bcx")
        )
        y = short_conv(r, w, f"{blk}.shortconv.conv", multiply(r, b, x, "conv_bx"), "conv_y", activated=False)
        return linear(r, w, f"{blk}.shortconv.out_proj", r.quantized(multiply(r, c, y, "conv_cy"), "conv_cy"), add_to=add_to)

    return mixer


def mix(r: Recorder, w: Weights, p: Decoder, ffn: Ffn) -> None:
    """The forward pass with such a feed-forward part."""
    x = r.embed(w.matrix("token_embd.weight"))
    attend, convolve = attending(r, w, p, Attention(halves=True, qk_norm="head")), convolving(r, w, p)
    mixers = [attend if w.has(f"blk.{i}.attn_q.weight") else convolve for i in range(p.n_layers)]
    mixed_layers(r, w, p, x, mixers, ffn)
    output(r, w, p, x, norm="token_embd_norm")


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    mix(r, w, p, gated(r, w, p))
    return [with_factors(rope, w)]
