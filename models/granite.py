"""Granite 3 (IBM 2024), dense: LLaMA's layer with four factors of its own: of the embeddings, of what layers add, of scores and of
logits.
"""

from __future__ import annotations

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
    """Granite's factors; of the logits, the divisor."""

    embedding: float
    residual: float
    attention: float
    logits: float

    @classmethod
    def read(cls, keys: Keys, p: Decoder) -> Scales:
        """Each is 1, and the scores' 1 / sqrt(dim), where the file is silent."""
        return cls(
            embedding=keys.float("embedding_scale", 1.0, above=0),
            residual=keys.float("residual_scale", 1.0, above=0),
            attention=keys.float("attention.scale", p.query_scale, above=0),
            logits=keys.float("logit_scale", 1.0, above=0),
        )


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Scales]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    p.check(gguf, p.tensors())
    return p, read_rope(keys, p), Scales.read(keys, p)


def record(params: tuple[Decoder, Rope, Scales], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, scales = params
    x = r.embed(w.matrix("token_embd.weight"), scale=scales.embedding)
    layers(r, w, p, x, [Attention(scale=scales.attention)] * p.n_layers, gated(r, w, p), residual_scale=scales.residual)
    output(r, w, p, x, scale=1.0 / scales.logits)
    return [with_factors(rope, w)]
