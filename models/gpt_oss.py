"""gpt-oss (OpenAI 2025): rotation of halves, sinks in attention, biases everywhere, experts with a bounded gate; weights by softmax of the
chosen.

Layers take turns between a sliding window and everything. The file calls the norm before the experts post_attention_norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrun.models.blocks import Attention, Decoder, Shapes, layers, output, read_rope, with_factors
from localrun.models.experts import Experts, choose
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Weights

GATE_LIMIT = 7.0
"""Bound of what goes through the experts' gate."""


def read(keys: Keys, gguf: GGUFFile) -> tuple[Decoder, Rope, Experts, int]:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    p = Decoder.read(keys, gguf, experts=True)
    e = Experts.read(keys, p, gating="softmax of chosen")
    biases: Shapes = {"ffn_gate_exps.bias": (e.ffn, e.n), "ffn_up_exps.bias": (e.ffn, e.n), "ffn_down_exps.bias": (p.width, e.n)}
    layer: Shapes = {"post_attention_norm.weight": (p.width,), "ffn_gate_inp.bias": (e.n,), "attn_output.bias": (p.width,)}
    sinks: Shapes = {"attn_sinks.weight": (p.n_heads,)}
    p.check(gguf, e.all_tensors(p, p.tensors(layer | biases | sinks | p.attention_biases(), without=("ffn_norm",))))
    return p, read_rope(keys, p), e, keys.int("attention.sliding_window", minimum=1)


def record(params: tuple[Decoder, Rope, Experts, int], r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p, rope, e, window = params
    x = r.embed(w.matrix("token_embd.weight"))


    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        routing = choose(r, w, blk, h, e)
        xs = r.gather(h, routing)

        def product(name: str, rows: Activation, beside: bool = False) -> Row:
            stack, bias = w.stack(f"{blk}.{name}.weight"), w.rows_of_vectors(f"{blk}.{name}.bias")
            return r.expert_matmul(stack, rows, routing, name, bias=bias, beside=beside)

        gate = product("ffn_gate_exps", xs)
        up = product("ffn_up_exps", xs, beside=True)
        y = product("ffn_down_exps", r.gated_limited(gate, up, GATE_LIMIT, "gated_exps"))
        out = add_to or r.row("ffn_out", p.width)
        r.combine(y, routing, out, "combine", add=add_to is not None)
        return out

    how = [Attention(halves=True, window=0 if i % 2 else window) for i in range(p.n_layers)]
    layers(r, w, p, x, how, ffn, ffn_norm="post_attention_norm")
    output(r, w, p, x)
    return [with_factors(rope, w)]
