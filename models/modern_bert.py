"""ModernBERT (Warner et al. 2024): layer norms before each half of a layer, no biases, Q, K and V in one matrix, gate and up in one (GELU).

Every third layer, from the first on, sees everything; the others see a window, half of it on either side, and rotate with a base of their
own. The first layer reads the normed embedding as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, attention_block, gated_ffn, linear, normed, read_rope
from localrun.models.encoder import normed_in_place, normed_output, read_encoder
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.validate import check_model

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights

PATTERN = 3
GLOBAL, LOCAL = 0, 1
"""Angle tables."""


@dataclass(frozen=True)
class ModernBert:
    decoder: Decoder
    window: int
    pattern: int
    global_rope: Rope
    local_rope: Rope


def read(keys: Keys, gguf: GGUFFile) -> ModernBert:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = read_encoder(keys, gguf, poolings=("", "mean", "cls", "last"))
    expected = p.tensors(fused=True, gated=False) | {"token_embd_norm.weight": (p.width,)}
    expected |= p.per_layer({"ffn_up.weight": (p.width, 2 * p.ffn)})
    first = {"blk.0.attn_norm.weight": expected.pop("blk.0.attn_norm.weight")}
    check_model(gguf, expected, first)
    return ModernBert(
        decoder=p,
        window=keys.int("attention.sliding_window", minimum=1),
        pattern=keys.int("attention.sliding_window_pattern", PATTERN, minimum=1),
        global_rope=read_rope(keys, p, base=160_000.0),
        local_rope=Rope(p.n_rot, keys.float("rope.freq_base_swa", 10_000.0, above=0)),
    )


def record(params: ModernBert, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params.decoder
    r.see_both_ways()
    x = r.embed(w.matrix("token_embd.weight"))
    h = normed_in_place(r, w, p, x, "token_embd_norm")
    everything, local = Attention(halves=True, table=GLOBAL), Attention(halves=True, table=LOCAL, window=params.window)
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        if w.has(f"{blk}.attn_norm.weight"):
            h = normed(r, w, p, x, f"{blk}.attn_norm")
        a = attention_block(r, w, p, blk, h, local if i % params.pattern else everything)
        linear(r, w, f"{blk}.attn_output", a, add_to=x)
        h = normed(r, w, p, x, f"{blk}.ffn_norm")
        linear(r, w, f"{blk}.ffn_down", gated_ffn(r, w, p, blk, h, "gelu_tanh"), add_to=x)
    normed_output(r, w, p, x)
    return [params.global_rope, params.local_rope]
