"""DeepSeek-MoE (Dai et al. 2024): LLaMA's attention; dense first layers, then experts with shared ones; weights by softmax, not divided
by their sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, read_rope, with_factors
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
    e = Experts.read(keys, p, normalised=False)
    e = with_shared(e, e.ffn * keys.int("expert_shared_count", 0))
    p.check(gguf, e.all_tensors(p, p.tensors()), e.all_optional(p))
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention()] * p.n_layers, experts(r, w, p, e))
    output(r, w, p, x)
    return [with_factors(rope, w)]
