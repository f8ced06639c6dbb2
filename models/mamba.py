"""Mamba (Gu and Dao 2023): layers of selective state spaces and nothing else; FalconMamba, whose B, C and time steps are normed, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Decoder, Shapes, linear, normed, output
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import StateSpace, mamba
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, StateSpace]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = replace(Decoder.read(keys, gguf, fewest_heads=0), n_rot=0)
    s = StateSpace.read(keys)
    whole: Shapes = {"token_embd.weight": (p.width, p.n_vocab), "output_norm.weight": (p.width,)}
    p.check(gguf, whole | p.per_layer({"attn_norm.weight": (p.width,), **s.mamba_tensors(p)}))
    return p, s


def record(params: tuple[Decoder, StateSpace], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, s = params
    x = r.embed(w.matrix("token_embd.weight"))
    for i in range(p.n_layers):
        h = normed(r, w, p, x, f"blk.{i}.attn_norm")
        linear(r, w, f"blk.{i}.ssm_out", mamba(r, w, p, s, f"blk.{i}", h), add_to=x)
    output(r, w, p, x)
    return []
