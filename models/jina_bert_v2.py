"""Jina embeddings and rerankers, version 2 (Günther et al. 2023): BERT's layer with ALiBi both ways instead of learned positions, and a
feed-forward part gated by GELU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated
from localrun.models.encoder import bert, check_bert, read_encoder
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> Decoder:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = read_encoder(keys, gguf)
    check_bert(keys, gguf, p, gated="blk.0.ffn_gate.weight" in gguf.tensors)
    return p


def record(params: Decoder, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    bert(r, w, params, Attention(rotated=False, max_alibi_bias=8.0), lambda r, w, p: gated(r, w, p, "gelu_tanh"))
    return []
