"""Nomic Embed (Nussbaum et al. 2024): BERT's layer with rotation of halves instead of learned positions and feed-forward gated by SiLU; the
second version (2025) has GELU without a gate instead, and experts in every other layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Ffn, gated, plain, read_rope
from localrun.models.encoder import bert, bert_tensors, check_bert, read_encoder
from localrun.models.experts import Experts, choose
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.validate import check_model

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts | None]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    sparse = keys.architecture == "nomic-bert-moe"
    p = read_encoder(keys, gguf, experts=sparse)
    if not sparse:
        check_bert(keys, gguf, p, gated=True)
        return p, read_rope(keys, p), None
    e = replace(Experts.read(keys, p, normalised=False), first=1, step=keys.int("moe_every_n_layers", minimum=2, maximum=2))
    expected, optional = bert_tensors(keys, gguf, p)
    for i in range(p.n_layers):
        if e.in_layer(i):
            for name in ("ffn_up.weight", "ffn_down.weight"):
                del expected[f"blk.{i}.{name}"]
            expected |= p.per_layer(e.tensors(p, gated=False), [i])
    check_model(gguf, expected, optional)
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts | None], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    bert(r, w, p, Attention(halves=True), lambda r, w, p: _experts(r, w, e) if e else gated(r, w, p))
    return [rope]


def _experts(r: Recorder, w: Weights, e: Experts) -> Ffn:
    """down(gelu(up h)), in the layers with experts the sum over the chosen ones by their weights."""
    dense = plain(r, w, "gelu_tanh")

    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        if add_to is None or not e.in_layer(i):
            return dense(i, blk, h, add_to)
        routing = choose(r, w, blk, h, e)
        up = r.expert_matmul(w.stack(f"{blk}.ffn_up_exps.weight"), r.gather(h, routing), routing, "up_exps")
        y = r.expert_matmul(w.stack(f"{blk}.ffn_down_exps.weight"), r.activated(up, "gelu_tanh", "gelu_exps"), routing, "down_exps")
        r.combine(y, routing, add_to, "combine", add=True)
        return add_to

    return ffn
