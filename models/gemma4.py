"""Gemma 4, text part (Google DeepMind 2026).

Gemma 3's layer with scores that are not scaled, norms of values, heads of another size in local layers, soft-capped logits and a factor of
each layer's output. Small models: the last layers use the keys and values of earlier ones, and each layer reads a small embedding of its
own. With experts they stand beside the dense feed-forward part, each behind norms of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Decoder, Shapes, gated, linear, normed, output, read_rope, with_factors
from localrun.models.experts import Experts
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

GLOBAL, LOCAL = 0, 1
"""Angle tables."""


@dataclass(frozen=True)
class Gemma4:
    decoder: Decoder
    """As in global layers."""
    layers: list[Decoder]
    """Each layer's own sizes."""
    local: list[bool]
    window: int
    own_kv: int
    """Layers from this one on use the keys and values of the last one before it that is of their kind."""
    per_layer: int
    """Values of a layer's own embedding; 0: there are none."""
    experts: Experts | None
    global_rope: Rope
    local_rope: Rope
    logit_cap: float

    def source(self, i: int) -> int:
        """The layer whose keys and values layer i uses."""
        if i < self.own_kv:
            return i
        return max(j for j in range(self.own_kv) if self.local[j] == self.local[i])


def read(keys: Keys, gguf: GGUFFile) -> Gemma4:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    n = p.n_layers
    local = keys.bools("attention.sliding_window_pattern", length=n)
    dim = keys.int("attention.key_length_swa", p.dim, minimum=1)
    n_kv, ffn = keys.per_layer("attention.head_count_kv", n, p.n_heads), keys.per_layer("feed_forward_length", n)
    local_rot = keys.int("rope.dimension_count_swa", dim)

    def size(i: int) -> Decoder:
        own = replace(p, n_kv=n_kv[i], ffn=ffn[i])
        return replace(own, dim=dim, dim_v=dim, n_rot=local_rot) if local[i] else own

    params = Gemma4(
        decoder=p,
        layers=[size(i) for i in range(n)],
        local=local,
        window=keys.int("attention.sliding_window", minimum=1),
        own_kv=n - keys.int("attention.shared_kv_layers", 0, maximum=n - 1),
        per_layer=keys.int("embedding_length_per_layer_input", 0),
        experts=Experts.read(keys, p, activation="gelu_tanh") if keys.int("expert_count", 0) else None,
        global_rope=read_rope(keys, p, base=1_000_000.0),
        local_rope=Rope(local_rot, keys.float("rope.freq_base_swa", 10_000.0, above=0)),
        logit_cap=keys.float("final_logit_softcapping", 0.0),
    )
    if {local[i] for i in range(params.own_kv)} < set(local):
        raise keys.error("attention.shared_kv_layers", "leaves some layers without others of their kind to share with")
    p.check(gguf, *_tensors(params, gguf))
    return params


def _tensors(params: Gemma4, gguf: GGUFFile) -> tuple[Shapes, Shapes]:
    """The tables of tensors that must be there, and of those that may."""
    p, e, each = params.decoder, params.experts, params.per_layer
    width = (p.width,)
    expected: Shapes = {"token_embd.weight": (p.width, p.n_vocab), "output_norm.weight": width}
    optional: Shapes = {}
    for i, size in enumerate(params.layers):
        layer: Shapes = {"attn_q_norm.weight": (size.dim,), "post_attention_norm.weight": width, "post_ffw_norm.weight": width}
        if each:
            layer |= {"inp_gate.weight": (p.width, each), "proj.weight": (each, p.width), "post_norm.weight": width}
        if e:
            layer |= {
                "ffn_gate_inp.weight": (p.width, e.n),
                "ffn_gate_inp.scale": width,
                "pre_ffw_norm_2.weight": width,
                "post_ffw_norm_1.weight": width,
                "post_ffw_norm_2.weight": width,
                "ffn_gate_up_exps.weight": (p.width, 2 * e.ffn, e.n),
                "ffn_down_exps.weight": (e.ffn, p.width, e.n),
            }
        mine = {name: shape for name, shape in size.tensors(layer).items() if name.startswith(f"blk.{i}.")}
        cached = {f"blk.{i}.attn_k.weight", f"blk.{i}.attn_v.weight"}
        norm: Shapes = {f"blk.{i}.attn_k_norm.weight": (size.dim,)}
        may = {name: shape for name, shape in mine.items() if name in cached}
        if i >= params.own_kv:
            # Some files keep what these layers would have had.
            optional |= may | norm
        elif f"blk.{i}.attn_v.weight" not in gguf.tensors:
            may.pop(f"blk.{i}.attn_v.weight")
            expected |= may | norm
        else:
            expected |= may | norm
        expected |= {name: shape for name, shape in mine.items() if name not in cached}
        optional[f"blk.{i}.layer_output_scale.weight"] = (1,)
    if each:
        expected |= {
            "per_layer_token_embd.weight": (each * p.n_layers, p.n_vocab), "per_layer_model_proj.weight": (p.width, each * p.n_layers),
            "per_layer_proj_norm.weight": (each,),
        }
    return expected, optional


def record(params: Gemma4, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params.decoder
    x = r.embed(w.matrix("token_embd.weight"), scale=math.sqrt(p.width))
    own = _own_embeddings(params, r, w, x) if params.per_layer else None
    kept: dict[int, int] = {}
    for i, size in enumerate(params.layers):
        blk = f"blk.{i}"
        a = _attention(params, r, w, i, normed(r, w, p, x, f"{blk}.attn_norm"), kept)
        y = linear(r, w, f"{blk}.attn_output", r.quantized(a, "attended"))
        r.norm_add(y, w.vector(f"{blk}.post_attention_norm.weight"), p.eps, x, "post_attention_norm")
        y = gated(r, w, size, "gelu_tanh")(i, blk, normed(r, w, p, x, f"{blk}.ffn_norm"), None)
        if params.experts:
            r.norm_heads(y, 1, w.vector(f"{blk}.post_ffw_norm_1.weight"), p.eps, "post_ffw_norm_1")
            r.add(_experts(params, params.experts, r, w, blk, x), y, "with experts")
        r.norm_add(y, w.vector(f"{blk}.post_ffw_norm.weight"), p.eps, x, "post_ffw_norm")
        if own:
            gate = linear(r, w, f"{blk}.inp_gate", r.quantized(x, "x"))
            mine = r.row("own", params.per_layer)
            r.copy_part(own, mine, 1, "own", n=params.per_layer, first=i * params.per_layer, to=0)
            y = linear(r, w, f"{blk}.proj", r.gated(gate, mine, "gelu_tanh", "own gated"))
            r.norm_add(y, w.vector(f"{blk}.post_norm.weight"), p.eps, x, "post_norm")
        if w.has(f"{blk}.layer_output_scale.weight"):
            r.scale(x, "layer_output_scale", factor=float(w.values(f"{blk}.layer_output_scale.weight")[0]))
    output(r, w, p, x, soft_cap=params.logit_cap)
    return [with_factors(params.global_rope, w), params.local_rope]


def _own_embeddings(params: Gemma4, r: Recorder, w: Weights, x: Row) -> Row:
    """(T, n_layers * per_layer): each layer's embedding of the token, mixed with a projection of the common one."""
    p, each = params.decoder, params.per_layer
    own = r.matmul(w.matrix("per_layer_model_proj.weight"), r.quantized(x, "x"), "per_layer")
    r.scale(own, "per_layer", factor=1.0 / math.sqrt(p.width))
    r.norm_heads(own, p.n_layers, w.vector("per_layer_proj_norm.weight"), p.eps, "per_layer_proj_norm")
    r.add(r.embed(w.matrix("per_layer_token_embd.weight"), scale=math.sqrt(each), name="per_layer_token"), own, "per_layer")
    r.scale(own, "per_layer", factor=1.0 / math.sqrt(2.0))
    return own


def _attention(params: Gemma4, r: Recorder, w: Weights, i: int, h: Activation, kept: dict[int, int]) -> Row:
    """kept: where the cache of each layer so far lies; this one's is added."""
    p, blk = params.layers[i], f"blk.{i}"
    q = linear(r, w, f"{blk}.attn_q", h)
    k = v = q
    if params.source(i) == i:
        k = linear(r, w, f"{blk}.attn_k", h, beside=True)
        if w.has(f"{blk}.attn_v.weight"):
            v = linear(r, w, f"{blk}.attn_v", h, beside=True)
        else:
            v = r.row("attn_v", k.width)
            r.copy_part(k, v, 1, "v is k", n=k.width, first=0, to=0)
        r.norm_heads(v, p.n_kv, None, p.eps, "v_norm")
    kept[i] = r.rope_kv(
        q,
        k,
        v,
        n_heads=p.n_heads,
        n_kv=p.n_kv,
        dim=p.dim,
        dim_v=p.dim_v,
        n_rot=p.n_rot,
        table=LOCAL if params.local[i] else GLOBAL,
        halves=True,
        scale=1.0,
        q_norm=w.vector(f"{blk}.attn_q_norm.weight"),
        k_norm=w.maybe(f"{blk}.attn_k_norm.weight"),
        eps=p.eps,
        layer=None if params.source(i) == i else kept[params.source(i)],
    )
    window = params.window if params.local[i] else 0
    source = params.layers[params.source(i)]
    return r.attention(q, kept[i], n_heads=p.n_heads, n_kv=source.n_kv, dim=p.dim, dim_v=p.dim_v, window=window)


def _experts(params: Gemma4, e: Experts, r: Recorder, w: Weights, blk: str, x: Row) -> Row:
    """(T, width), normed; the router reads x by a norm without weights, scaled value by value."""
    p = params.decoder
    scale = w.scaled(f"{blk}.ffn_gate_inp.scale", 1.0 / math.sqrt(p.width))
    scores = linear(r, w, f"{blk}.ffn_gate_inp", r.norm(x, scale, p.eps, "router_norm"))
    routing = r.route(scores, e.used, gate=e.gating, normalise=e.normalised, scale=e.scale)
    xs = r.gather(normed(r, w, p, x, f"{blk}.pre_ffw_norm_2"), routing)
    name = f"{blk}.ffn_gate_up_exps.weight"
    gate = r.expert_matmul(w.stack(name, 0, e.ffn), xs, routing, "gate_exps")
    up = r.expert_matmul(w.stack(name, e.ffn, e.ffn), xs, routing, "up_exps", beside=True)
    y = r.expert_matmul(w.stack(f"{blk}.ffn_down_exps.weight"), r.gated(gate, up, "gelu_tanh", "gated_exps"), routing, "down_exps")
    out = r.row("experts", p.width)
    r.combine(y, routing, out, "combine", add=False)
    r.norm_heads(out, 1, w.vector(f"{blk}.post_ffw_norm_2.weight"), p.eps, "post_ffw_norm_2")
    return out
