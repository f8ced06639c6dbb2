"""DeepSeek-V2, V3 and R1, Kimi K2 (DeepSeek-AI 2024): multi-head latent attention, experts with shared ones.

Keys and values are kept as one compressed row a position for all heads: the latent (its norm), then the rotated part of the key. The matrix
that would expand a latent to a head's key is applied to that head's query instead, the one that would expand it to a value to what
attention gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, attend, linear, normed, output, read_rope, with_factors
from localrun.models.experts import Experts, experts, with_shared
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.weights import Weights


@dataclass(frozen=True)
class Mla:
    decoder: Decoder
    rope: Rope
    experts: Experts
    latent: int
    """Values of a compressed position (kv_lora_rank)."""
    nope: int
    """Values of a query head that are not rotated."""
    value: int
    """Values of a value head."""
    q_rank: int
    """Width that queries are compressed to; 0: they are not."""
    query_scale: float

    def tensors(self, p: Decoder, head: int) -> Shapes:
        """p: the decoder as the file describes it."""
        q = p.n_heads * head
        layer: Shapes = {
            "attn_kv_a_mqa.weight": (p.width, self.latent + p.n_rot),
            "attn_kv_a_norm.weight": (self.latent,),
            "attn_k_b.weight": (self.nope, self.latent, p.n_heads),
            "attn_v_b.weight": (self.latent, self.value, p.n_heads),
            "attn_output.weight": (p.n_heads * self.value, p.width),
        }
        if self.q_rank:
            layer |= {
                "attn_q_a.weight": (p.width, self.q_rank), "attn_q_a_norm.weight": (self.q_rank,), "attn_q_b.weight": (self.q_rank, q)
            }
            return self.experts.all_tensors(p, p.tensors(layer, without=("attn_q", "attn_k", "attn_v")))
        return self.experts.all_tensors(p, p.tensors(layer | {"attn_q.weight": (p.width, q)}, without=("attn_k", "attn_v")))


def read(keys: Keys, gguf: GGUFFile) -> Mla:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = Experts.read(keys, p, normalised=False)
    e = with_shared(e, e.ffn * keys.int("expert_shared_count", 0))
    latent, head = keys.int("attention.kv_lora_rank", minimum=1), keys.int("attention.key_length_mla", minimum=1)
    value = keys.int("attention.value_length_mla", minimum=1)
    q_rank = keys.int("attention.q_lora_rank", 0)
    rope = read_rope(keys, p)
    # Files hold a tenth of the multiplier, and with it the queries are scaled twice, as the rotation would have done.
    rope = replace(rope, yarn_log_multiplier=rope.yarn_log_multiplier / 0.1, log_multiplier_is_both=True)
    grown = 1.0 + 0.1 * rope.yarn_log_multiplier * math.log(1.0 / rope.scale)
    m = Mla(
        # What the cache and attention see: one key-value head.
        decoder=replace(p, n_kv=1, dim=latent + p.n_rot, dim_v=latent),
        rope=rope, experts=e, latent=latent, nope=head - p.n_rot, value=value, q_rank=q_rank, query_scale=grown * grown / math.sqrt(head),
    )
    p.check(gguf, m.tensors(p, head), e.all_optional(p))
    return m


def record(params: Mla, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, e, rope = params.decoder, params.experts, params.rope
    x = r.embed(w.matrix("token_embd.weight"))
    ffn = experts(r, w, p, e)
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm")
        if params.q_rank:
            q_a = linear(r, w, f"{blk}.attn_q_a", h)
            kv = linear(r, w, f"{blk}.attn_kv_a_mqa", h, beside=True)
            q = linear(r, w, f"{blk}.attn_q_b", normed(r, w, p, q_a, f"{blk}.attn_q_a_norm"))
        else:
            q = linear(r, w, f"{blk}.attn_q", h)
            kv = linear(r, w, f"{blk}.attn_kv_a_mqa", h, beside=True)
        latent = kv.columns(0, params.latent)
        r.norm_heads(latent, 1, w.vector(f"{blk}.attn_kv_a_norm.weight"), p.eps, "kv_a_norm")
        r.rotate(kv, 1, p.n_rot, 0, "rotate k", halves=False, first=params.latent)
        r.rotate(q, p.n_heads, p.n_rot, 0, "rotate q", halves=False, first=params.nope)
        absorbed = r.heads_matmul(
            w.stack(f"{blk}.attn_k_b.weight"), r.by_head(q, p.n_heads, params.nope, "q_nope"), "absorbed", room_after=p.n_rot
        )
        r.copy_part(q, absorbed, p.n_heads, "q_pe", n=p.n_rot, first=params.nope, to=params.latent)
        how = Attention(rotated=False, scale=params.query_scale)
        a = attend(r, w, p, blk, absorbed, kv, latent, how)
        values = r.heads_matmul(w.stack(f"{blk}.attn_v_b.weight"), r.by_head(a, p.n_heads, params.latent, "a_latent"), "values")
        linear(r, w, f"{blk}.attn_output", r.quantized(values, "values"), add_to=x)
        ffn(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), x)
    output(r, w, p, x)
    return [with_factors(rope, w)]
