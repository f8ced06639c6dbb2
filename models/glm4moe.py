"""GLM-4.5 to 4.7 (Zhipu AI 2025): biases on Q, K and V, partial rotation of halves, shared experts; weights by sigmoid.

Norms on query and key heads where the file has them. The layers that predict further tokens are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    p = replace(p, n_layers=p.n_layers - keys.int("nextn_predict_layers", 0, maximum=p.n_layers - 1))
    e = Experts.read(keys, p, gating="sigmoid")
    e = with_shared(e, e.ffn * keys.int("expert_shared_count", 0))
    qk_norm = "blk.0.attn_q_norm.weight" in gguf.tensors
    norms: Shapes = {"attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,)} if qk_norm else {}
    layer = norms | p.attention_biases() | {"post_attention_norm.weight": (p.width,)}
    p.check(gguf, e.all_tensors(p, p.tensors(layer, without=("ffn_norm",))), e.all_optional(p) | p.further(gguf))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = Attention(halves=True, qk_norm="head" if w.has("blk.0.attn_q_norm.weight") else "")
    layers(r, w, p, x, [how] * p.n_layers, experts(r, w, p, e), ffn_norm="post_attention_norm")
    output(r, w, p, x)
    return [with_factors(rope, w)]
