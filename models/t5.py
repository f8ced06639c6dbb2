"""T5, its encoder alone, and Flan-T5 (Raffel et al. 2020; Chung et al. 2022): RMS norms before each half of a layer, unscaled queries,
relative positions by buckets in place of rotation, feed-forward by ReLU or gated by GELU.

The encoder reads the input whole and both ways. What the decoder's cross attention needs of it is written into the sequence's blocks,
beside the decoder's own keys and values: a block holds 16 positions of either side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Ffn, Shapes, attend, gated, linear, normed, plain, query_key_value
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.validate import check_model

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import DistanceBias, Row
    from localrun.models.weights import Weights

CONTEXTS = 2
"""Input and answer may have a context's length each; distances have no bound, so how they share it does not matter."""


@dataclass(frozen=True)
class T5:
    encoder: Decoder
    decoder_layers: int
    """0: there is no decoder."""

    @property
    def reach(self) -> int:
        """Most positions of a sequence."""
        return self.encoder.context * (CONTEXTS if self.decoder_layers else 1)


def read(keys: Keys, gguf: GGUFFile) -> T5:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    alone = keys.architecture == "t5encoder"
    p = Decoder.read(keys, gguf, causal=not alone, poolings=("", "mean", "cls", "last") if alone else ("",))
    n_buckets = keys.int("attention.relative_buckets_count", minimum=4)
    n_decoder = 0 if alone else keys.int("decoder_block_count", p.n_layers, minimum=1)
    if not alone:
        keys.int("decoder_start_token_id", maximum=p.n_vocab - 1)
    bias: Shapes = {"attn_rel_b.weight": (p.n_heads, n_buckets)}
    layer = _layer(p, gated="enc.blk.0.ffn_gate.weight" in gguf.tensors)
    cross = {f"cross_{name}": shape for name, shape in layer.items() if name.startswith("attn_")}
    expected: Shapes = {"token_embd.weight": (p.width, p.n_vocab), "enc.output_norm.weight": (p.width,)}
    expected |= _each("enc", p.n_layers, layer) | _each("enc", 1, bias)
    optional = _each("enc", p.n_layers, bias)
    if n_decoder:
        expected |= _each("dec", n_decoder, layer | cross) | _each("dec", 1, bias) | {"dec.output_norm.weight": (p.width,)}
        # Some files have distances of the cross attention, too, which no T5 was trained to use.
        optional |= _each("dec", n_decoder, bias | {"cross_attn_rel_b.weight": (p.n_heads, n_buckets)})
        optional |= {"output.weight": (p.width, p.n_vocab)}
    check_model(gguf, expected, optional)
    return T5(p, n_decoder)


def _layer(p: Decoder, *, gated: bool) -> Shapes:
    shapes = p.attention_tensors()
    shapes["attn_o.weight"] = shapes.pop("attn_output.weight")
    gate: Shapes = {"ffn_gate.weight": (p.width, p.ffn)} if gated else {}
    norms: Shapes = {"attn_norm.weight": (p.width,), "ffn_norm.weight": (p.width,)}
    return norms | shapes | gate | {"ffn_up.weight": (p.width, p.ffn), "ffn_down.weight": (p.ffn, p.width)}


def _each(side: str, n: int, shapes: Shapes) -> Shapes:
    return {f"{side}.blk.{i}.{name}": shape for i in range(n) for name, shape in shapes.items()}


def record(params: T5, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass: the encoder's, then the decoder's."""
    p = params.encoder
    r.limit_positions(params.reach)
    r.see_both_ways()
    ffn = gated(r, w, p, "gelu_tanh") if w.has("enc.blk.0.ffn_gate.weight") else plain(r, w, "relu")
    x = r.embed(w.matrix("token_embd.weight"))
    for i in range(p.n_layers):
        _self_attention(r, w, params, "enc", i, x, both=True)
        _feed_forward(r, w, p, f"enc.blk.{i}", i, x, ffn)
    if not params.decoder_layers:
        normed(r, w, p, x, "enc.output_norm", outputs_only=True)
        r.hidden(r.row("normed", p.width), by_output=True)
        return []
    cross = _keep_for_decoder(r, w, params, x)
    x = r.embed(w.matrix("token_embd.weight"))
    for i in range(params.decoder_layers):
        blk = f"dec.blk.{i}"
        _self_attention(r, w, params, "dec", i, x, both=False)
        q = linear(r, w, f"{blk}.cross_attn_q", normed(r, w, p, x, f"{blk}.cross_attn_norm"))
        a = r.attention(q, cross[i], n_heads=p.n_heads, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, cross=True)
        linear(r, w, f"{blk}.cross_attn_o", r.quantized(a, "attended"), add_to=x)
        _feed_forward(r, w, p, blk, i, x, ffn)
    h = normed(r, w, p, x, "dec.output_norm", outputs_only=True)
    r.logits(w.matrix("output.weight" if w.has("output.weight") else "token_embd.weight"), h)
    return []


def _keep_for_decoder(r: Recorder, w: Weights, params: T5, x: Row) -> list[int]:
    """The end of the encoder: keys and values of each decoder layer's cross attention; where these lie in a pool block."""
    p = params.encoder
    h = normed(r, w, p, x, "enc.output_norm", buffer="encoded")
    r.see_behind_only()
    offsets = []
    for i in range(params.decoder_layers):
        k = linear(r, w, f"dec.blk.{i}.cross_attn_k", h)
        v = linear(r, w, f"dec.blk.{i}.cross_attn_v", h, beside=True)
        offsets.append(
            r.rope_kv(
                k, k, v, n_heads=0, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, n_rot=0, table=0, halves=False, scale=1.0
            )
        )
    r.decode_from_here()
    return offsets


def _self_attention(r: Recorder, w: Weights, params: T5, side: str, i: int, x: Row, *, both: bool) -> None:
    p, blk = params.encoder, f"{side}.blk.{i}"
    how = Attention(rotated=False, scale=1.0, distances=_distances(w, params, side, i, both=both))
    a = attend(r, w, p, blk, *query_key_value(r, w, p, blk, normed(r, w, p, x, f"{blk}.attn_norm")), how)
    linear(r, w, f"{blk}.attn_o", r.quantized(a, "attended"), add_to=x)


def _feed_forward(r: Recorder, w: Weights, p: Decoder, blk: str, i: int, x: Row, ffn: Ffn) -> None:
    ffn(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), x)


def _distances(w: Weights, params: T5, side: str, i: int, *, both: bool) -> DistanceBias:
    """The layer's own table of distances, or the first layer's."""
    from localrun.models.program import DistanceBias
    from localrun.models.relative import distance_table

    own = f"{side}.blk.{i}.attn_rel_b.weight"
    name = own if w.has(own) else f"{side}.blk.0.attn_rel_b.weight"
    table = distance_table(w.values(name).reshape(-1, params.encoder.n_heads), params.reach, both=both)
    return DistanceBias(w.constant(table.ravel()).address + 4 * params.reach, 4 * table.shape[1])
