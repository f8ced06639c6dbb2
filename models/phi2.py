"""Phi-1 to Phi-2 (Microsoft 2023): attention and GELU feed-forward side by side behind one layer norm, biases, partial rotation of
halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, output, parallel_layers, plain, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(
        gguf, p.tensors(without=("ffn_norm",), fused="blk.0.attn_qkv.weight" in gguf.tensors, gated=False), {"output.bias": (p.n_vocab,)}
    )
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    parallel_layers(r, w, p, x, [Attention(halves=True)] * p.n_layers, plain(r, w, "gelu_tanh"))
    output(r, w, p, x)
    return [with_factors(rope, w)]
