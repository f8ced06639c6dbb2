"""Gemma 3n, text part (Google DeepMind 2025).

Gemma 3's layer, within four streams of which one is computed and the others are predicted and corrected (AltUp, Baykal et al. 2023); beside
attention a low-rank path (LAuReL, Menghani et al. 2024); an embedding of its own for each layer; sparse gates in the first layers. The last
layers use the keys and values of earlier ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.models.blocks import Decoder, Shapes, linear, normed, output, read_rope
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

STREAMS = 4
OWN = 256
"""Values of a layer's own embedding."""
LOW_RANK = 64
PATTERN = 5
"""Every fifth layer is global."""
OWN_KV = 20
"""Layers from this one on use the keys and values of the last one before it that is of their kind."""
SPARSE_LAYERS, SPARSE_LEVEL = 10, 1.6448533535003662
"""The first layers keep the gates above mean + level * deviation: a twentieth of a normal distribution."""
LOGIT_CAP = 30.0
GLOBAL, LOCAL = 0, 1
"""Angle tables."""
HALF = 1.0 / math.sqrt(2.0)


@dataclass(frozen=True)
class Gemma3n:
    decoder: Decoder
    window: int
    global_rope: Rope
    local_rope: Rope


def read(keys: Keys, gguf: GGUFFile) -> Gemma3n:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf)
    for name, value in (("altup.num_inputs", STREAMS), ("altup.active_idx", 0), ("embedding_length_per_layer_input", OWN)):
        if keys.int(name, value) != value:
            raise keys.error(name, f"is {keys.int(name)}; only {value} is supported")
    if keys.int("attention.shared_kv_layers", max(0, p.n_layers - OWN_KV)) != max(0, p.n_layers - OWN_KV):
        raise keys.error("attention.shared_kv_layers", f"does not leave {OWN_KV} layers with keys and values of their own")
    width = (p.width,)
    layer: Shapes = {
        "attn_q_norm.weight": (p.dim,), "attn_k_norm.weight": (p.dim,),
        "post_attention_norm.weight": width, "post_ffw_norm.weight": width,
        "inp_gate.weight": (p.width, OWN), "proj.weight": (OWN, p.width), "post_norm.weight": width,
        "altup_correct_coef.weight": (STREAMS, STREAMS), "altup_correct_scale.weight": width,
        "altup_predict_coef.weight": (STREAMS, STREAMS * STREAMS),
        "altup_router.weight": (p.width, STREAMS), "altup_router_norm.weight": width,
        "laurel_l.weight": (p.width, LOW_RANK), "laurel_r.weight": (LOW_RANK, p.width), "laurel_post_norm.weight": width,
    }  # fmt: skip
    whole: Shapes = {
        "altup_proj.weight": (p.width, p.width, STREAMS - 1), "altup_unembd_proj.weight": (p.width, p.width, STREAMS - 1),
        "per_layer_token_embd.weight": (OWN * p.n_layers, p.n_vocab), "per_layer_model_proj.weight": (p.width, OWN * p.n_layers),
        "per_layer_proj_norm.weight": (OWN,),
    }  # fmt: skip
    p.check(gguf, p.tensors(layer) | whole)
    return Gemma3n(
        decoder=p,
        window=keys.int("attention.sliding_window", minimum=1),
        global_rope=read_rope(keys, p, base=1_000_000.0),
        local_rope=Rope(p.n_rot, keys.float("rope.freq_base_swa", 10_000.0, above=0)),
    )


def record(params: Gemma3n, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = params.decoder
    x = r.embed(w.matrix("token_embd.weight"), scale=math.sqrt(p.width))
    own = _own_embeddings(r, w, p, x)
    streams = [x, *_further(r, w, p, x, "altup_proj.weight", [x] * (STREAMS - 1), "stream")]
    predicted = [r.row(f"predicted{j}", p.width) for j in range(STREAMS)]
    kept: dict[int, int] = {}
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        every = [row.address for row in (*streams, *predicted)]
        c = r.matmul(w.matrix(f"{blk}.altup_predict_coef.weight"), r.quantized(_modalities(r, w, p, blk, x), "modalities"), "coefficients")
        r.apply("altup", "predict", [*every, x.stride, p.width, c.address, c.stride], "predict")
        y = _layer(params, r, w, i, predicted[0], kept)
        every = [row.address for row in (*predicted, *streams)]
        c = r.matmul(w.matrix(f"{blk}.altup_correct_coef.weight"), r.quantized(_modalities(r, w, p, blk, y), "modalities"), "coefficients")
        r.apply("altup", "correct", [*every, x.stride, p.width, c.address, c.stride, y.address], "correct")
        # The layer's own embedding, gated by the corrected stream, goes to the others.
        first = r.row("first", p.width)
        r.copy_part(x, first, 1, "first", n=p.width, first=0, to=0)
        r.scale(first, "correct_scale", factors=w.vector(f"{blk}.altup_correct_scale.weight"))
        gate = linear(r, w, f"{blk}.inp_gate", r.quantized(first, "first"))
        mine = r.row("own", OWN)
        r.copy_part(own, mine, 1, "own", n=OWN, first=i * OWN, to=0)
        y = linear(r, w, f"{blk}.proj", r.gated(gate, mine, "gelu_tanh", "own gated"))
        r.norm_heads(y, 1, w.vector(f"{blk}.post_norm.weight"), p.eps, "post_norm")
        for stream in streams[1:]:
            r.add(y, stream, "own")
    for row in _further(r, w, p, x, "altup_unembd_proj.weight", streams[1:], "unembedded"):
        r.add(row, x, "streams")
    r.scale(x, "streams", factor=1.0 / STREAMS)
    output(r, w, p, x, soft_cap=LOGIT_CAP)
    return [params.global_rope, params.local_rope]


def _own_embeddings(r: Recorder, w: Weights, p: Decoder, x: Row) -> Row:
    """(T, n_layers * OWN): each layer's embedding of the token, mixed with a projection of the common one."""
    own = r.matmul(w.matrix("per_layer_model_proj.weight"), r.quantized(x, "x"), "per_layer")
    r.scale(own, "per_layer", factor=1.0 / math.sqrt(p.width))
    r.norm_heads(own, p.n_layers, w.vector("per_layer_proj_norm.weight"), p.eps, "per_layer_proj_norm")
    r.add(r.embed(w.matrix("per_layer_token_embd.weight"), scale=math.sqrt(OWN), name="per_layer_token"), own, "per_layer")
    r.scale(own, "per_layer", factor=HALF)
    return own


def _further(r: Recorder, w: Weights, p: Decoder, x: Row, name: str, sources: list[Row], out: str) -> list[Row]:
    """A projection of each source, as long as x."""
    rows = []
    for j, source in enumerate(sources):
        y = r.matmul(w.matrix(name, j * p.width, p.width), r.quantized(source, "stream"), f"{out}{j + 1}")
        r.apply("altup", "match_length", [y.address, y.stride, x.address, x.stride, p.width], "match_length")
        rows.append(y)
    return rows


def _modalities(r: Recorder, w: Weights, p: Decoder, blk: str, x: Row) -> Row:
    """(T, STREAMS), within -1..1."""
    norm = w.scaled(f"{blk}.altup_router_norm.weight", 1.0 / p.width)
    y = linear(r, w, f"{blk}.altup_router", r.norm(x, norm, p.eps, "router_norm"))
    r.apply("altup", "squash", [y.address, y.stride, STREAMS], "squash")
    return y


def _layer(params: Gemma3n, r: Recorder, w: Weights, i: int, x: Row, kept: dict[int, int]) -> Row:
    """Attention with the low-rank path beside it, then the feed-forward part: (T, width). x is left as it is."""
    p, blk = params.decoder, f"blk.{i}"
    h = normed(r, w, p, x, f"{blk}.attn_norm")
    low = r.matmul(w.matrix(f"{blk}.laurel_r.weight"), r.quantized(linear(r, w, f"{blk}.laurel_l", h), "laurel"), "laurel")
    # laurel = norm(low) + h and y = norm(attention) + x, half of both summed.
    y = r.row("layer", p.width)
    r.copy_part(x, y, 1, "layer", n=p.width, first=0, to=0)
    r.norm_add(x, w.vector(f"{blk}.attn_norm.weight"), p.eps, y, "laurel + h")
    r.norm_add(low, w.vector(f"{blk}.laurel_post_norm.weight"), p.eps, y, "laurel_post_norm")
    a = linear(r, w, f"{blk}.attn_output", r.quantized(_attention(params, r, w, i, h, kept), "attended"))
    r.norm_add(a, w.vector(f"{blk}.post_attention_norm.weight"), p.eps, y, "post_attention_norm")
    r.scale(y, "half", factor=HALF)
    h = normed(r, w, p, y, f"{blk}.ffn_norm")
    gate, up = linear(r, w, f"{blk}.ffn_gate", h), linear(r, w, f"{blk}.ffn_up", h, beside=True)
    if i < SPARSE_LAYERS:
        r.apply("altup", "sparse", [gate.address, gate.stride, p.ffn, SPARSE_LEVEL], "sparse")
    out = linear(r, w, f"{blk}.ffn_down", r.gated(gate, up, "gelu_tanh", "gated"))
    r.norm_add(out, w.vector(f"{blk}.post_ffw_norm.weight"), p.eps, y, "post_ffw_norm")
    return y


def _attention(params: Gemma3n, r: Recorder, w: Weights, i: int, h: Activation, kept: dict[int, int]) -> Row:
    """kept: where the cache of each layer so far lies; this one's is added."""
    p, blk = params.decoder, f"blk.{i}"
    everything = i % PATTERN == PATTERN - 1
    shared = max(j for j in range(min(OWN_KV, p.n_layers)) if (j % PATTERN == PATTERN - 1) == everything) if i >= OWN_KV else None
    q = linear(r, w, f"{blk}.attn_q", h)
    k = v = q
    if shared is None:
        k, v = linear(r, w, f"{blk}.attn_k", h, beside=True), linear(r, w, f"{blk}.attn_v", h, beside=True)
        r.norm_heads(v, p.n_kv, None, p.eps, "v_norm")
    kept[i] = r.rope_kv(
        q, k, v, n_heads=p.n_heads, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, n_rot=p.n_rot, halves=True,
        q_norm=w.vector(f"{blk}.attn_q_norm.weight"), k_norm=w.vector(f"{blk}.attn_k_norm.weight"), eps=p.eps,
        table=GLOBAL if everything else LOCAL, scale=1.0, layer=None if shared is None else kept[shared],
    )  # fmt: skip
    return r.attention(
        q, kept[i], n_heads=p.n_heads, n_kv=p.n_kv, dim=p.dim, dim_v=p.dim_v, window=0 if everything else params.window
    )
