"""Falcon-H1 (TII 2025): every layer has both attention, with rotation of halves, and Mamba 2, side by side on the same norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, gated, normed, output, read_rope, with_factors
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import StateSpace, attending, scanning
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, StateSpace]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    s = StateSpace.read(keys, heads=True)
    # Converters write the name of the second norm without an end.
    each = p.per_layer({"ffn_norm": (p.width,), **s.mamba2_tensors(p)})
    p.check(gguf, p.tensors(without=("ffn_norm",)) | each, p.per_layer(s.mamba2_optional() | s.mamba2_norm()))
    return p, read_rope(keys, p), s


def record(params: tuple[Decoder, Rope, StateSpace], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, s = params
    x = r.embed(w.matrix("token_embd.weight"))
    attend, scan, ffn = attending(r, w, p, Attention(halves=True)), scanning(r, w, p, s, heads=True), gated(r, w, p)
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        attend(i, blk, h, x)
        scan(i, blk, h, x)
        ffn(i, blk, r.norm(x, w.vector(f"{blk}.ffn_norm"), p.eps, "ffn_norm"), x)
    output(r, w, p, x)
    return [with_factors(rope, w)]
