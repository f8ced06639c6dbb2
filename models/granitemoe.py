"""Granite 3 with experts (IBM 2024): Granite's factors (granite.py); weights by softmax of the chosen; a shared expert where the file
has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.granite import Scales
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts, Scales]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = with_shared(Experts.read(keys, p), keys.int("expert_shared_feed_forward_length", 0))
    p.check(gguf, e.all_tensors(p, p.tensors()), e.all_optional(p))
    return p, read_rope(keys, p), e, Scales.read(keys, p)


def record(params: tuple[Decoder, Rope, Experts, Scales], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e, scales = params
    x = r.embed(w.matrix("token_embd.weight"), scale=scales.embedding)
    how = Attention(scale=scales.attention)
    layers(r, w, p, x, [how] * p.n_layers, experts(r, w, p, e), residual_scale=scales.residual)
    output(r, w, p, x, scale=1.0 / scales.logits)
    return [with_factors(rope, w)]
