"""LLaMA's layers seeing both ways: embedding models such as Llama-Embed-Nemotron (NVIDIA 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, layers, read_rope, with_factors
from localrun.models.encoder import normed_output, read_encoder
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.validate import check_model

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = read_encoder(keys, gguf, norm="rms", poolings=("", "mean", "cls", "last"))
    check_model(gguf, p.tensors(), p.per_layer(p.biases()) | {"rope_freqs.weight": (p.n_rot // 2,)})
    return p, read_rope(keys, p)


def record(params: tuple[Decoder, Rope], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope = params
    r.see_both_ways()
    x = r.embed(w.matrix("token_embd.weight"))
    layers(r, w, p, x, [Attention()] * p.n_layers, gated(r, w, p))
    normed_output(r, w, p, x)
    return [with_factors(rope, w)]
