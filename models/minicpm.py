"""MiniCPM (Hu et al. 2024): LLaMA's layer with factors of the embeddings, of what layers add and of the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


@dataclass(frozen=True)
class Scales:
    """Factors; of the logits, the divisor. The defaults are those of the first files, which carry none."""

    embedding: float
    residual: float
    logits: float


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Scales]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    return p, read_rope(keys, p), Scales(
        embedding=keys.float("embedding_scale", 12.0, above=0),
        residual=keys.float("residual_scale", 1.4 / math.sqrt(p.n_layers), above=0),
        logits=keys.float("logit_scale", p.width / 256.0, above=0),
    )


def record(params: tuple[Decoder, Rope, Scales], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, scales = params
    x = r.embed(w.matrix("token_embd.weight"), scale=scales.embedding)
    layers(r, w, p, x, [Attention()] * p.n_layers, gated(r, w, p), residual_scale=scales.residual)
    output(r, w, p, x, scale=1.0 / scales.logits)
    return [with_factors(rope, w)]
