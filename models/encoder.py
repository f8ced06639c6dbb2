"""What encoder families share: how they are read, the table of BERT's tensors, and the parts of their layers.

An encoder is a blocks.Decoder whose tokens see each other both ways, and that ends in vectors (vectors.py) or a score (ranking.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from localrun.models.blocks import Attention, Decoder, Ffn, Shapes, attention_block, linear
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.ranking import Head, score
from localrun.models.validate import check_model

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

POOLINGS = ("", "mean", "cls", "last", "rank")


def read_encoder(
    keys: Keys, gguf: GGUFFile, *, norm: Literal["rms", "layer"] = "layer", experts: bool = False, poolings: Collection[str] = POOLINGS
) -> Decoder:
    """Hyper-parameters under the common keys. Raises ModelFileError."""
    return Decoder.read(keys, gguf, norm=norm, experts=experts, causal=False, poolings=poolings)


def bert_tensors(keys: Keys, gguf: GGUFFile, p: Decoder, *, gated: bool = False) -> tuple[Shapes, Shapes]:
    """What a file with BERT's layers must and may have, its head included. Q, K and V are one tensor where the file has it so."""
    width = (p.width,)
    fused = "blk.0.attn_qkv.weight" in gguf.tensors
    expected: Shapes = {"token_embd.weight": (p.width, p.n_vocab), "token_embd_norm.weight": width, "token_embd_norm.bias": width}
    expected |= p.per_layer(
        {
            **p.attention_tensors(fused=fused),
            "attn_output_norm.weight": width,
            "attn_output_norm.bias": width,
            **({"ffn_gate.weight": (p.width, p.ffn)} if gated else {}),
            "ffn_up.weight": (p.width, p.ffn),
            "ffn_down.weight": (p.ffn, p.width),
            "layer_output_norm.weight": width,
            "layer_output_norm.bias": width,
        }
    )
    biases = {name: shape for name, shape in p.biases().items() if f"blk.0.{name[:-5]}.weight" in expected}
    types = keys.int("tokenizer.ggml.token_type_count", 1, minimum=1)
    head = Head.read(keys)
    optional = p.per_layer(biases) | {"token_types.weight": (p.width, types)} | head.optional(p.width)
    return expected | head.tensors(p.width), optional


def check_bert(keys: Keys, gguf: GGUFFile, p: Decoder, more: Shapes | None = None, *, gated: bool = False) -> None:
    """Holds a file against the table, with `more` that it must have. Raises ModelFileError."""
    expected, optional = bert_tensors(keys, gguf, p, gated=gated)
    check_model(gguf, expected | (more or {}), optional)


def bert_embedding(r: Recorder, w: Weights, p: Decoder) -> tuple[Row, Activation]:
    """norm(token + type 0 + position), where the file has types and positions: the row, and as matmuls read it."""
    types = w.values("token_types.weight")[: p.width] if w.has("token_types.weight") else None
    positions = None
    if w.has("position_embd.weight"):
        table = w.values("position_embd.weight").reshape(-1, p.width)
        positions = w.constant((table if types is None else table + types).ravel())
    x = r.embed(w.matrix("token_embd.weight"), positions=positions)
    if positions is None and types is not None:
        r.add_constant(x, w.constant(np.ascontiguousarray(types)), "token_types")
    return x, normed_in_place(r, w, p, x, "token_embd_norm")


def normed_in_place(r: Recorder, w: Weights, p: Decoder, x: Row, name: str) -> Activation:
    """x = norm(x), and x as matmuls read it."""
    weight, bias = w.vector(f"{name}.weight"), w.maybe(f"{name}.bias")
    return r.norm(x, weight, p.eps, name.rsplit(".", 1)[-1], kind=p.norm, bias=bias, in_place=True)


def post_norm_layers(r: Recorder, w: Weights, p: Decoder, x: Row, h: Activation, how: Sequence[Attention], ffn: Ffn) -> None:
    """x = norm(x + attention(x)); x = norm(x + ffn(x)): post-norm layers as in BERT (Devlin et al. 2019). h: x as matmuls read it."""
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        linear(r, w, f"{blk}.attn_output", attention_block(r, w, p, blk, h, how[i]), add_to=x)
        h = normed_in_place(r, w, p, x, f"{blk}.attn_output_norm")
        ffn(i, blk, h, x)
        h = normed_in_place(r, w, p, x, f"{blk}.layer_output_norm")


def bert(r: Recorder, w: Weights, p: Decoder, how: Attention, ffn: Callable[[Recorder, Weights, Decoder], Ffn]) -> None:
    """A whole pass of BERT's kind."""
    r.see_both_ways()
    x, h = bert_embedding(r, w, p)
    post_norm_layers(r, w, p, x, h, [how] * p.n_layers, ffn(r, w, p))
    r.hidden(x, by_output=False)
    if w.has("cls.output.weight"):
        score(r, w, r.norm(x, None, 0.0, "cls_input", kind="none", outputs_only=True, buffer="cls_input"))


def normed_output(r: Recorder, w: Weights, p: Decoder, x: Row) -> None:
    """The final norm, of the rows that are asked for."""
    r.norm(x, w.vector("output_norm.weight"), p.eps, "output_norm", kind=p.norm, bias=w.maybe("output_norm.bias"), outputs_only=True)
    r.hidden(r.row("normed", x.width), by_output=True)
