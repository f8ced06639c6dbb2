"""MPT (MosaicML 2023): ALiBi instead of rotation, layer norms without biases, Q, K and V in one matrix and held in bounds, GELU without
a gate.
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


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Attention]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(gguf, p.tensors(fused=True, gated=False))
    return p, Attention(
        rotated=False, clamp=keys.float("attention.clamp_kqv", 0.0), max_alibi_bias=keys.float("attention.max_alibi_bias", 8.0, above=0)
    )


def record(params: tuple[Decoder, Attention], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, how = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [how] * p.n_layers, plain(r, w, "gelu_tanh"))
    output(r, w, p, x)
    return []
