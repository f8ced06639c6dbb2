"""LLaMA 1 to 3, Mistral, Mixtral, SmolLM and everything else that says architecture "llama" (Touvron et al. 2023); InternLM2, XVERSE and
ERNIE 4.5 are the same.

RMS norm before each half of a layer, rotation of neighbouring pairs, grouped queries, SiLU-gated feed-forward; biases where the file has
them. With experts (Mixtral, Jiang et al. 2024) weights are by softmax.
`attention.sliding_window` is ignored on purpose: files that carry it were trained with full attention over the lengths they serve, and the
reference reads it the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, experts
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts | None]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = Experts.read(keys, p) if keys.int("expert_count", 0) else None
    p.check(gguf, e.all_tensors(p, p.tensors()) if e else p.tensors())
    return p, read_rope(keys, p), e


def record(params: tuple[Decoder, Rope, Experts | None], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e = params
    x = r.embed(w.matrix("token_embd.weight"))
    ffn = experts(r, w, p, e) if e else gated(r, w, p)
    layers(r, w, p, x, [Attention()] * p.n_layers, ffn)
    output(r, w, p, x)
    return [with_factors(rope, w)]
