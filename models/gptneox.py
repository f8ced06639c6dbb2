"""GPT-NeoX and Pythia (Black et al. 2022): layer norms, biases, Q, K and V in one matrix, partial rotation of halves; both halves of a
layer side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, parallel_layers, plain, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, bool]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, norm="layer")
    p.check(gguf, p.tensors(fused=True, gated=False))
    return p, read_rope(keys, p), keys.bool("use_parallel_residual", True)


def record(params: tuple[Decoder, Rope, bool], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, side_by_side = params
    x = r.embed(w.matrix("token_embd.weight"))
    how = [Attention(halves=True)] * p.n_layers
    if side_by_side:
        parallel_layers(r, w, p, x, how, plain(r, w, "gelu_tanh"), second_norm="ffn_norm")
    else:
        layers(r, w, p, x, how, plain(r, w, "gelu_tanh"))
    output(r, w, p, x)
    return [with_factors(rope, w)]
