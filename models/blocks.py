"""What decoder families share: hyper-parameters under their common keys, the table of their tensors, and the parts of a layer.

A family's file reads top to bottom with these; what it has of its own stands there. Biases are added wherever the file has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.pooling import read_pooling
from localrun.models.ranking import score
from localrun.models.rope import Rope
from localrun.models.validate import check_hyperparameters, check_model, check_tokenizer_keys, vocabulary_size

if TYPE_CHECKING:  # recording belongs into a runner; reading hyper-parameters must not cost its imports
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, DistanceBias, Row
    from localrun.models.weights import Vector, Weight, Weights

Shapes = dict[str, tuple[int, ...]]
Gate = Literal["silu", "gelu_tanh", "relu"]
Ffn = Callable[[int, str, "Activation", "Row | None"], "Row"]
"""(layer, its prefix, input, row to add to or None) -> where the output is: a layer's feed-forward part."""


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
    norm: Literal["rms", "layer"] = "rms"

    @classmethod
    def read(
        cls, keys: Keys, gguf: GGUFFile, *, norm: Literal["rms", "layer"] = "rms", experts: bool = False, fewest_heads: int = 1,
        causal: bool = True, poolings: Collection[str] = ("", "mean", "cls", "last"),
    ) -> Decoder:
        """From the file's keys, checked; without `experts` a file that has some is refused. fewest_heads: 0 where a layer may have no
        attention; poolings: those that are known. Raises ModelFileError.
        """
        check_hyperparameters(keys, fewest_heads=fewest_heads)
        check_tokenizer_keys(gguf)
        if not experts:
            keys.refuse("expert_count", f"but mixtures of experts are no part of {keys.architecture} as supported")
        if not causal == keys.bool("attention.causal", causal):
            raise keys.error("attention.causal", f"is {str(not causal).lower()}, which is no part of {keys.architecture} as supported")
        read_pooling(keys, poolings)
        width = keys.int("embedding_length", minimum=1)
        n_layers = keys.int("block_count", minimum=1)
        n_heads = max(keys.per_layer("attention.head_count", n_layers, minimum=0))
        dim = keys.int("attention.key_length", width // max(n_heads, 1), minimum=1)
        return cls(
            n_layers=n_layers,
            width=width,
            n_heads=n_heads,
            n_kv=max(keys.per_layer("attention.head_count_kv", n_layers, n_heads)),
            dim=dim,
            dim_v=keys.int("attention.value_length", width // max(n_heads, 1), minimum=1),
            ffn=max(keys.per_layer("feed_forward_length", n_layers)),
            eps=keys.float("attention.layer_norm_rms_epsilon" if norm == "rms" else "attention.layer_norm_epsilon", above=0),
            n_vocab=vocabulary_size(gguf),
            context=keys.int("context_length", minimum=1),
            n_rot=keys.int("rope.dimension_count", dim),
            tied="output.weight" not in gguf.tensors,
            norm=norm,
        )

    def tensors(
        self, layer: Mapping[str, tuple[int, ...]] | None = None, *, without: Collection[str] = (), fused: bool = False, gated: bool = True
    ) -> Shapes:
        """The tensors every decoder of this kind has: shape (ne0 first) by name.

        layer: more of each layer's; without: names (of a layer's part or a whole) that this family lacks; fused: Q, K and V in one tensor;
        gated: the feed-forward part has a gate.
        """
        shapes: Shapes = {"token_embd.weight": (self.width, self.n_vocab), "output_norm.weight": (self.width,)}
        each: Shapes = {
            "attn_norm.weight": (self.width,),
            **self.attention_tensors(fused=fused),
            "ffn_norm.weight": (self.width,),
            **({"ffn_gate.weight": (self.width, self.ffn)} if gated else {}),
            "ffn_up.weight": (self.width, self.ffn),
            "ffn_down.weight": (self.ffn, self.width),
            **(layer or {}),
        }
        every = shapes | self.per_layer({name: shape for name, shape in each.items() if name.rsplit(".", 1)[0] not in without})
        return {name: shape for name, shape in every.items() if name.rsplit(".", 1)[0] not in without}

    def attention_tensors(self, *, fused: bool = False) -> Shapes:
        """Matrices of one layer's attention."""
        q, k, v = self.n_heads * self.dim, self.n_kv * self.dim, self.n_kv * self.dim_v
        out: Shapes = {"attn_output.weight": (self.n_heads * self.dim_v, self.width)}
        if fused:
            return {"attn_qkv.weight": (self.width, q + k + v)} | out
        return {"attn_q.weight": (self.width, q), "attn_k.weight": (self.width, k), "attn_v.weight": (self.width, v)} | out

    def attention_biases(self) -> Shapes:
        """Biases of Q, K and V of one layer."""
        return {"attn_q.bias": (self.n_heads * self.dim,), "attn_k.bias": (self.n_kv * self.dim,), "attn_v.bias": (self.n_kv * self.dim_v,)}

    def biases(self) -> Shapes:
        """Biases that a layer's matrices and norms may have."""
        width, q, k, v = self.width, self.n_heads * self.dim, self.n_kv * self.dim, self.n_kv * self.dim_v
        norms: Shapes = {"attn_norm.bias": (width,), "ffn_norm.bias": (width,)} if self.norm == "layer" else {}
        return norms | self.attention_biases() | {
            "attn_qkv.bias": (q + k + v,), "attn_output.bias": (width,),
            "ffn_gate.bias": (self.ffn,), "ffn_up.bias": (self.ffn,), "ffn_down.bias": (width,),
        }  # fmt: skip

    def per_layer(self, shapes: Mapping[str, tuple[int, ...]], layers: Sequence[int] | None = None) -> Shapes:
        """The same names in every layer (or in those)."""
        return {f"blk.{i}.{name}": shape for i in (range(self.n_layers) if layers is None else layers) for name, shape in shapes.items()}

    def further(self, gguf: GGUFFile) -> Shapes:
        """Tensors of layers behind the last one that is used, whatever their shapes."""
        n_all = Keys(gguf).int("block_count")
        prefixes = tuple(f"blk.{i}." for i in range(self.n_layers, n_all))
        return {name: info.shape for name, info in gguf.tensors.items() if prefixes and name.startswith(prefixes)}

    def check(self, gguf: GGUFFile, expected: Shapes, optional: Shapes | None = None) -> None:
        """Holds the file against the tables; output matrix, biases and rope_freqs may be there. Raises ModelFileError."""
        shared: Shapes = {"output.weight": (self.width, self.n_vocab)}
        if self.n_rot:
            shared["rope_freqs.weight"] = (self.n_rot // 2,)
        if self.norm == "layer":
            shared["output_norm.bias"] = (self.width,)
        present = {name: shape for name, shape in self.per_layer(self.biases()).items() if f"{name[:-5]}.weight" in expected}
        check_model(gguf, expected, shared | present | (optional or {}))

    @property
    def query_scale(self) -> float:
        """1 / sqrt(dim)."""
        return 1.0 / math.sqrt(self.dim)


# ---- rotation -----------------------------------------------------------------------------------------------------------------


def read_rope(keys: Keys, p: Decoder, *, base: float = 10000.0) -> Rope:
    """The rotation that the common rope.* keys describe; rope_freqs are added when recording. Raises ModelFileError."""
    kind = keys.str("rope.scaling.type", "none", choices=("none", "linear", "yarn", "longrope"))
    factor = keys.float("rope.scaling.factor", 1.0, above=0) or 1.0
    if kind == "none" and not keys.has("rope.scaling.type"):
        # An older key for the same thing, from before rope.scaling.*.
        factor = keys.float("rope.scale_linear", 1.0, above=0)
        kind = "linear"
    return Rope(
        n_rot=p.n_rot,
        base=keys.float("rope.freq_base", base, above=0),
        scale=1.0 / factor if kind in ("linear", "yarn") else 1.0,
        yarn_ext_factor=keys.float("rope.scaling.yarn_ext_factor", 1.0) if kind == "yarn" else 0.0,
        yarn_original_context=keys.int("rope.scaling.original_context_length", p.context),
        yarn_beta_fast=keys.float("rope.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=keys.float("rope.scaling.yarn_beta_slow", 1.0),
        yarn_log_multiplier=keys.float("rope.scaling.yarn_log_multiplier", 0.0),
        magnitude=keys.float("rope.scaling.attn_factor", 1.0),
    )


def with_factors(rope: Rope, w: Weights, name: str = "rope_freqs.weight") -> Rope:
    """The rotation with the file's per-frequency factors, if it has them."""
    return replace(rope, factors=tuple(float(v) for v in w.values(name))) if w.has(name) else rope


def alibi_slopes(n_heads: int, max_bias: float) -> list[float]:
    """By how much each head's scores fall from position to position (Press et al. 2022): two geometric series, for head counts that are
    no power of 2.
    """
    power = 1 << (n_heads.bit_length() - 1)
    return [
        2.0 ** (-max_bias * (h + 1) / power) if h < power else 2.0 ** (-max_bias * (2 * (h - power) + 1) / (2 * power))
        for h in range(n_heads)
    ]


# ---- parts of a layer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """How a layer attends."""

    halves: bool = False
    """Rotated pairs lie half a head apart (GPT-NeoX) instead of side by side (RoFormer)."""
    scale: float | None = None
    """Of the queries; None: 1 / sqrt(dim)."""
    table: int = 0
    """Which of the angle tables that `record` returns."""
    rotated: bool = True
    window: int = 0
    """Positions that are seen, 0: all."""
    soft_cap: float = 0.0
    qk_norm: Literal["", "head", "row", "head after"] = ""
    """RMS norm of queries and keys: of each head or of the whole row, before the rotation; or of each head, after it, by weights if
    there are any.
    """
    clamp: float = 0.0
    """Bound of Q, K and V."""
    max_alibi_bias: float = 0.0
    distances: DistanceBias | None = None
    """T5's relative positions."""
    temperature_table: int = 0
    """Number of the table by whose factors queries grow with the position (rope.Temperature); 0: none."""


def linear(r: Recorder, w: Weights, name: str, x: Activation, *, add_to: Row | None = None, beside: bool = False) -> Row:
    """W x (+ bias)."""
    out = name.rsplit(".", 1)[-1]
    return r.matmul(w.matrix(f"{name}.weight"), x, out, bias=w.maybe(f"{name}.bias"), add_to=add_to, beside=beside)


def normed(
    r: Recorder, w: Weights, p: Decoder, x: Row, name: str, *, buffer: str = "normed", outputs_only: bool = False, beside: bool = False
) -> Activation:
    """The decoder's kind of norm, with whatever weight and bias the file has."""
    weight, bias = w.maybe(f"{name}.weight"), w.maybe(f"{name}.bias")
    out = name.rsplit(".", 1)[-1]
    return r.norm(x, weight, p.eps, out, kind=p.norm, bias=bias, buffer=buffer, outputs_only=outputs_only, beside=beside)


def query_key_value(r: Recorder, w: Weights, p: Decoder, blk: str, h: Activation) -> tuple[Row, Row, Row]:
    """Q (T, n_heads * dim), K (T, n_kv * dim), V (T, n_kv * dim_v), from one tensor or three."""
    sizes = (p.n_heads * p.dim, p.n_kv * p.dim, p.n_kv * p.dim_v)
    fused = w.has(f"{blk}.attn_qkv.weight")
    rows, first = [], 0
    for letter, n in zip("qkv", sizes):
        weight: Weight
        bias: Vector | None
        if fused:
            weight, bias = w.matrix(f"{blk}.attn_qkv.weight", first, n), w.maybe(f"{blk}.attn_qkv.bias", first, n)
        else:
            weight, bias = w.matrix(f"{blk}.attn_{letter}.weight"), w.maybe(f"{blk}.attn_{letter}.bias")
        rows.append(r.matmul(weight, h, letter, bias=bias, beside=letter != "q"))
        first += n
    return rows[0], rows[1], rows[2]


def attend(r: Recorder, w: Weights, p: Decoder, blk: str, q: Row, k: Row, v: Row, how: Attention) -> Row:
    """Norms, rotation, cache and attention of one layer: (T, n_heads * dim_v)."""
    if how.clamp:
        for row in (q, k, v):
            r.clamp(row, how.clamp, "clamp")
    q_norm = k_norm = None
    if how.qk_norm == "head":
        q_norm, k_norm = w.vector(f"{blk}.attn_q_norm.weight"), w.vector(f"{blk}.attn_k_norm.weight")
    elif how.qk_norm == "row":
        r.norm_heads(q, 1, w.vector(f"{blk}.attn_q_norm.weight"), p.eps, "q_norm")
        r.norm_heads(k, 1, w.vector(f"{blk}.attn_k_norm.weight"), p.eps, "k_norm", beside=True)
    elif how.qk_norm == "head after":
        for row, n, name in ((q, p.n_heads, "q_norm"), (k, p.n_kv, "k_norm")):
            r.rotate(row, n, p.n_rot, how.table, "rotate", halves=how.halves)
            r.norm_heads(row, n, w.maybe(f"{blk}.attn_{name}.weight"), p.eps, name)
    if how.temperature_table:
        r.scale_by_position(q, how.temperature_table, "temperature")
    layer = r.rope_kv(
        q,
        k,
        v,
        n_heads=p.n_heads,
        n_kv=p.n_kv,
        dim=p.dim,
        dim_v=p.dim_v,
        n_rot=p.n_rot if how.rotated and how.qk_norm != "head after" else 0,
        table=how.table,
        halves=how.halves,
        scale=p.query_scale if how.scale is None else how.scale,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=p.eps,
    )
    slopes = w.numbers(alibi_slopes(p.n_heads, how.max_alibi_bias)) if how.max_alibi_bias else None
    return r.attention(
        q, layer, n_heads=p.n_heads, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, window=how.window, soft_cap=how.soft_cap,
        sinks=w.maybe(f"{blk}.attn_sinks.weight"), slopes=slopes, distances=how.distances,
    )


def attention_block(r: Recorder, w: Weights, p: Decoder, blk: str, h: Activation, how: Attention) -> Activation:
    """Q, K, V and attention: h (T, width) -> (T, n_heads * dim_v), ready for attn_output."""
    return r.quantized(attend(r, w, p, blk, *query_key_value(r, w, p, blk, h), how), "attended")


def gated_ffn(r: Recorder, w: Weights, p: Decoder, blk: str, h: Activation, activation: Gate) -> Activation:
    """act(gate h) * (up h): (T, width) -> (T, ffn), before ffn_down (Shazeer 2020). Without a gate of its own ffn_up holds both, the
    gate first.
    """
    if w.has(f"{blk}.ffn_gate.weight"):
        gate = linear(r, w, f"{blk}.ffn_gate", h)
        up = linear(r, w, f"{blk}.ffn_up", h, beside=True)
    else:
        gate = r.matmul(w.matrix(f"{blk}.ffn_up.weight", 0, p.ffn), h, "ffn_gate")
        up = r.matmul(w.matrix(f"{blk}.ffn_up.weight", p.ffn, p.ffn), h, "ffn_up", beside=True)
    return r.gated(gate, up, activation, "gated")


def gated(r: Recorder, w: Weights, p: Decoder, activation: Gate = "silu") -> Ffn:
    """Feed-forward with a gate."""

    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        return linear(r, w, f"{blk}.ffn_down", gated_ffn(r, w, p, blk, h, activation), add_to=add_to)

    return ffn


def plain(r: Recorder, w: Weights, activation: Literal["gelu_tanh", "relu", "relu_squared"]) -> Ffn:
    """down(act(up h))."""

    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        g = r.activated(linear(r, w, f"{blk}.ffn_up", h), activation, activation)
        return linear(r, w, f"{blk}.ffn_down", g, add_to=add_to)

    return ffn


# ---- layers -------------------------------------------------------------------------------------------------------------------


def layers(
    r: Recorder,
    w: Weights,
    p: Decoder,
    x: Row,
    how: Sequence[Attention],
    ffn: Ffn,
    *,
    residual_scale: float = 1.0,
    ffn_norm: str = "ffn_norm",
    pre_norm: bool = True,
    post_norm: bool = False,
) -> None:
    """x += attention(norm x); x += ffn(norm x): pre-norm layers as in LLaMA (Touvron et al. 2023).

    residual_scale: factor of what is added; post_norm: what is added is normed too, by post_attention_norm and post_ffw_norm; pre_norm:
    whether norms come before.
    """
    whole = residual_scale == 1.0 and not post_norm
    for i in range(p.n_layers):
        r.layer(i, x)
        blk = f"blk.{i}"
        h = normed(r, w, p, x, f"{blk}.attn_norm") if pre_norm else r.quantized(x, "x")
        a = attention_block(r, w, p, blk, h, how[i])
        y = linear(r, w, f"{blk}.attn_output", a, add_to=x if whole else None)
        if post_norm:
            r.norm_add(y, w.vector(f"{blk}.post_attention_norm.weight"), p.eps, x, "post_attention_norm")
        elif not whole:
            r.add(y, x, "residual", scale=residual_scale)
        h = normed(r, w, p, x, f"{blk}.{ffn_norm}") if pre_norm else r.quantized(x, "x")
        y = ffn(i, blk, h, x if whole else None)
        if post_norm:
            r.norm_add(y, w.vector(f"{blk}.post_ffw_norm.weight"), p.eps, x, "post_ffw_norm")
        elif not whole:
            r.add(y, x, "residual", scale=residual_scale)


def parallel_layers(
    r: Recorder, w: Weights, p: Decoder, x: Row, how: Sequence[Attention], ffn: Ffn, *, second_norm: str = "", second_is_ffns: bool = True
) -> None:
    """x += attention(norm x) + ffn(norm x), of the same x (Wang and Komatsuzaki 2021).

    second_norm: norm of one of the two, where the layer has it; the other reads attn_norm's.
    """
    for i in range(p.n_layers):
        r.layer(i, x)
        blk = f"blk.{i}"
        first = second = normed(r, w, p, x, f"{blk}.attn_norm")
        if second_norm and w.has(f"{blk}.{second_norm}.weight"):
            second = normed(r, w, p, x, f"{blk}.{second_norm}", buffer="normed2", beside=True)
        if not second_is_ffns:
            first, second = second, first
        a = attention_block(r, w, p, blk, first, how[i])
        linear(r, w, f"{blk}.attn_output", a, add_to=x)
        ffn(i, blk, second, x)


def output(r: Recorder, w: Weights, p: Decoder, x: Row, *, scale: float = 1.0, soft_cap: float = 0.0, norm: str = "output_norm") -> None:
    """Final norm and logits of the rows that are asked for; scale: factor of the logits; norm: name of its tensors."""
    r.layer(p.n_layers, x)
    weight, bias = w.maybe(f"{norm}.weight"), w.maybe(f"{norm}.bias")
    if scale != 1.0:
        # Scaling what the matrix reads is the same, and costs nothing.
        weight = w.scaled(f"{norm}.weight", scale)
        bias = w.scaled(f"{norm}.bias", scale) if bias else None
    h = r.norm(x, weight, p.eps, "output_norm", kind=p.norm, bias=bias, outputs_only=True)
    r.hidden(r.row("normed", x.width), by_output=True, scale=scale)
    score(r, w, h)
    r.logits(w.matrix("token_embd.weight" if p.tied else "output.weight"), h, w.maybe("output.bias"))
    if soft_cap:
        r.soft_cap(p.n_vocab, soft_cap)
