"""BLOOM (Workshop et al. 2022): ALiBi instead of rotation, a norm on the embedding, layer norms, biases, Q, K and V in one matrix, GELU
without a gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, plain
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> Decoder:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(gguf, p.tensors(fused=True, gated=False) | {"token_embd_norm.weight": (p.width,), "token_embd_norm.bias": (p.width,)})
    return p


def record(params: Decoder, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params
    x = r.embed(w.matrix("token_embd.weight"))
    r.norm_heads(x, 1, w.vector("token_embd_norm.weight"), p.eps, "token_embd_norm", kind="layer", bias=w.vector("token_embd_norm.bias"))
    layers(r, w, p, x, [Attention(rotated=False, max_alibi_bias=8.0)] * p.n_layers, plain(r, w, "gelu_tanh"))
    output(r, w, p, x)
    return []
