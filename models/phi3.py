"""Phi-3 and Phi-4-mini (Abdin et al. 2024): LLaMA's layer with Q, K and V in one matrix, gate and up in one, rotation of halves.

LongRoPE (Ding et al. 2024): one set of frequency factors for contexts up to the original length, another beyond. `attention.sliding_window`
is ignored on purpose, as in llama.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    factors: Shapes = {"rope_factors_long.weight": (p.n_rot // 2,), "rope_factors_short.weight": (p.n_rot // 2,)}
    p.check(gguf, p.tensors({"ffn_up.weight": (p.width, 2 * p.ffn)}, fused=True, gated=False), factors)
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention(halves=True)] * p.n_layers, gated(r, w, p))
    output(r, w, p, x)
    which = "long" if (r.n_ctx or p.context) > rope.yarn_original_context else "short"
    return [with_factors(rope, w, f"rope_factors_{which}.weight")]
