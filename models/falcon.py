"""Falcon (Almazrouei et al. 2023): attention and GELU feed-forward side by side, Q, K and V in one matrix, rotation of halves.

40B and later norm the input of attention by attn_norm_2 and that of the feed-forward part by attn_norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, output, parallel_layers, plain, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    norms: Shapes = {"attn_norm_2.weight": (p.width,), "attn_norm_2.bias": (p.width,)} if "blk.0.attn_norm_2.weight" in gguf.tensors else {}
    p.check(gguf, p.tensors(norms, without=("ffn_norm",), fused=True, gated=False))
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = [Attention(halves=True)] * p.n_layers
    parallel_layers(r, w, p, x, how, plain(r, w, "gelu_tanh"), second_norm="attn_norm_2", second_is_ffns=False)
    output(r, w, p, x)
    return [with_factors(rope, w)]
