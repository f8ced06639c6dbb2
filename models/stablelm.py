"""StableLM (Stability AI 2023): layer norms, partial rotation of halves, gated feed-forward.

Side by side with attention in files without ffn_norm (12B), which norm query and key heads too, each head with its own weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, parallel_layers, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, bool]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    if "blk.0.attn_q_norm.weight" in gguf.tensors:
        raise keys.error("attention.head_count", "norms on query and key heads (StableLM 2 12B) are not supported")
    side_by_side = "blk.0.ffn_norm.weight" not in gguf.tensors
    p.check(gguf, p.tensors(without=("ffn_norm",) if side_by_side else ()))
    return p, read_rope(keys, p), side_by_side


def record(params: tuple[Decoder, Rope, bool], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, side_by_side = params
    x = r.embed(w.matrix("token_embd.weight"))
    order = parallel_layers if side_by_side else layers
    order(r, w, p, x, [Attention(halves=True)] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    return [with_factors(rope, w)]
