"""What decoder families share: hyper-parameters under their common keys, the table of their tensors, and the two halves of a layer.

A family's file reads top to bottom with these; what it has of its own stands there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.validate import check_hyperparameters, check_model, check_tokenizer_keys, vocabulary_size

if TYPE_CHECKING:  # recording belongs into a runner; reading hyper-parameters must not cost its imports
    from localrun.models.plan import Activation, Recorder, Row
    from localrun.models.weights import Weights

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Decoder:
    """Hyper-parameters of a decoder: key names as in the GGUF specification."""

    n_layers: int
    width: int
    n_heads: int
    n_kv: int
    dim: int
    """Values of a query or key head."""
    dim_v: int
    ffn: int
    eps: float
    n_vocab: int
    context: int
    n_rot: int
    tied: bool
    """Whether the output matrix is the embedding."""

    @classmethod
    def read(cls, keys: Keys, gguf: GGUFFile, *, eps_key: str = "attention.layer_norm_rms_epsilon") -> Decoder:
        """From the file's keys, checked. Raises ModelFileError."""
        check_hyperparameters(keys)
        check_tokenizer_keys(gguf)
        for key in ("expert_count", "attention.sliding_window_pattern_type"):
            if keys.int(key, 0):
                keys.refuse(key, "mixtures of experts are not supported yet")
        width = keys.int("embedding_length", minimum=1)
        n_heads = keys.int("attention.head_count", minimum=1)
        dim = keys.int("attention.key_length", width // n_heads, minimum=1)
        return cls(
            n_layers=keys.int("block_count", minimum=1),
            width=width,
            n_heads=n_heads,
            n_kv=keys.int("attention.head_count_kv", n_heads, minimum=1),
            dim=dim,
            dim_v=keys.int("attention.value_length", width // n_heads, minimum=1),
            ffn=keys.int("feed_forward_length", minimum=1),
            eps=keys.float(eps_key, above=0),
            n_vocab=vocabulary_size(gguf),
            context=keys.int("context_length", minimum=1),
            n_rot=keys.int("rope.dimension_count", dim),
            tied="output.weight" not in gguf.tensors,
        )

    def tensors(self, layer: Mapping[str, tuple[int, ...]] | None = None) -> Shapes:
        """The tensors every decoder of this kind has: shape (ne0 first) by name. `layer` adds to each layer's."""
        shapes: Shapes = {"token_embd.weight": (self.width, self.n_vocab), "output_norm.weight": (self.width,)}
        each: Shapes = {
            "attn_norm.weight": (self.width,),
            "attn_q.weight": (self.width, self.n_heads * self.dim),
            "attn_k.weight": (self.width, self.n_kv * self.dim),
            "attn_v.weight": (self.width, self.n_kv * self.dim_v),
            "attn_output.weight": (self.n_heads * self.dim_v, self.width),
            "ffn_norm.weight": (self.width,),
            "ffn_gate.weight": (self.width, self.ffn),
            "ffn_up.weight": (self.width, self.ffn),
            "ffn_down.weight": (self.ffn, self.width),
            **(layer or {}),
        }
        return shapes | {f"blk.{i}.{name}": shape for i in range(self.n_layers) for name, shape in each.items()}

    def attention_biases(self) -> Shapes:
        """Biases of Q, K and V of one layer."""
        return {"attn_q.bias": (self.n_heads * self.dim,), "attn_k.bias": (self.n_kv * self.dim,), "attn_v.bias": (self.n_kv * self.dim_v,)}

    def per_layer(self, shapes: Shapes) -> Shapes:
        """The same names in every layer."""
        return {f"blk.{i}.{name}": shape for i in range(self.n_layers) for name, shape in shapes.items()}

    def check(self, gguf: GGUFFile, expected: Shapes, optional: Shapes | None = None) -> None:
        """Holds the file against the tables; output.weight and rope_freqs.weight may be there. Raises ModelFileError."""
        shared: Shapes = {"output.weight": (self.width, self.n_vocab), "rope_freqs.weight": (self.n_rot // 2,)}
        check_model(gguf, expected, shared | (optional or {}))

    @property
    def query_scale(self) -> float:
        """1 / sqrt(dim)."""
        return 1.0 / math.sqrt(self.dim)


def read_rope(keys: Keys, p: Decoder, *, base: float = 10000.0) -> Rope:
    """The rotation that the common rope.* keys describe; rope_freqs are added when recording. Raises ModelFileError."""
    kind = keys.str("rope.scaling.type", "none", choices=("none", "linear", "yarn"))
    factor = keys.float("rope.scaling.factor", 1.0, above=0) or 1.0
    if kind == "none" and not keys.has("rope.scaling.type"):
        # An older key for the same thing, from before rope.scaling.*.
        factor = keys.float("rope.scale_linear", 1.0, above=0)
        kind = "linear"
    return Rope(
        n_rot=p.n_rot,
        base=keys.float("rope.freq_base", base, above=0),
        scale=1.0 if kind == "none" else 1.0 / factor,
        yarn_ext_factor=keys.float("rope.scaling.yarn_ext_factor", 1.0) if kind == "yarn" else 0.0,
        yarn_original_context=keys.int("rope.scaling.original_context_length", p.context),
        yarn_beta_fast=keys.float("rope.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=keys.float("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=keys.float("rope.scaling.attn_factor", 1.0),
    )


def with_factors(rope: Rope, w: Weights) -> Rope:
    """The rotation with the file's per-frequency factors, if it has them."""
    if not w.has("rope_freqs.weight"):
        return rope
    from dataclasses import replace

    return replace(rope, factors=tuple(float(v) for v in w.values("rope_freqs.weight")))


def attention_block(
    r: Recorder, w: Weights, p: Decoder, blk: str, h: Activation, *, halves: bool, scale: float, table: int = 0, window: int = 0, soft_cap: float = 0.0,
    qk_norm: bool = False,
) -> Activation:
    """Q, K, V, rotation, cache, attention of one layer: h (T, width) -> (T, n_heads * dim_v), before attn_output."""
    q = r.matmul(w.matrix(f"{blk}.attn_q.weight"), h, "q", bias=w.maybe(f"{blk}.attn_q.bias"))
    k = r.matmul(w.matrix(f"{blk}.attn_k.weight"), h, "k", bias=w.maybe(f"{blk}.attn_k.bias"), beside=True)
    v = r.matmul(w.matrix(f"{blk}.attn_v.weight"), h, "v", bias=w.maybe(f"{blk}.attn_v.bias"), beside=True)
    layer = r.rope_kv(
        q, k, v, n_heads=p.n_heads, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, n_rot=p.n_rot, table=table, halves=halves, scale=scale,
        q_norm=w.vector(f"{blk}.attn_q_norm.weight") if qk_norm else None, k_norm=w.vector(f"{blk}.attn_k_norm.weight") if qk_norm else None, eps=p.eps,
    )
    out = r.attention(q, layer, n_heads=p.n_heads, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, window=window, soft_cap=soft_cap)
    return r.quantized(out, "attended")


def gated_ffn(r: Recorder, w: Weights, blk: str, h: Activation, activation: Literal["silu", "gelu_tanh"]) -> Activation:
    """act(gate h) * (up h): (T, width) -> (T, ffn), before ffn_down (Shazeer 2020)."""
    gate = r.matmul(w.matrix(f"{blk}.ffn_gate.weight"), h, "gate", bias=w.maybe(f"{blk}.ffn_gate.bias"))
    up = r.matmul(w.matrix(f"{blk}.ffn_up.weight"), h, "up", bias=w.maybe(f"{blk}.ffn_up.bias"), beside=True)
    return r.gated(gate, up, activation, "gated")


def output(r: Recorder, w: Weights, p: Decoder, x: Row) -> None:
    """Final norm and logits of the rows that are asked for."""
    h = r.norm(x, w.vector("output_norm.weight"), p.eps, "output_norm", outputs_only=True)
    r.logits(w.matrix("token_embd.weight" if p.tied else "output.weight"), h)


def standard_layers(r: Recorder, w: Weights, p: Decoder, x: Row, *, halves: bool) -> None:
    """Pre-norm layers as in LLaMA (Touvron et al. 2023): x += attention(norm x); x += ffn(norm x)."""
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        h = r.norm(x, w.vector(f"{blk}.attn_norm.weight"), p.eps, "attn_norm")
        a = attention_block(r, w, p, blk, h, halves=halves, scale=p.query_scale)
        r.matmul(w.matrix(f"{blk}.attn_output.weight"), a, "attn_output", bias=w.maybe(f"{blk}.attn_output.bias"), add_to=x)
        h = r.norm(x, w.vector(f"{blk}.ffn_norm.weight"), p.eps, "ffn_norm")
        g = gated_ffn(r, w, blk, h, "silu")
        r.matmul(w.matrix(f"{blk}.ffn_down.weight"), g, "ffn_down", bias=w.maybe(f"{blk}.ffn_down.bias"), add_to=x)
