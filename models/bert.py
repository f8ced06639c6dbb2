"""BERT (Devlin et al. 2019), RoBERTa and what was trained like them: sentence encoders (MiniLM, BGE, E5) and cross-encoders that rank.

A norm behind each half of a layer and one on the embedding, learned positions, biases, GELU without a gate; tokens see both ways.
All tokens count as of the first type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, plain
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
    check_bert(keys, gguf, p, {"position_embd.weight": (p.width, p.context)})
    return p


def record(params: Decoder, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    bert(r, w, params, Attention(rotated=False), lambda r, w, p: plain(r, w, "gelu_tanh"))
    return []
