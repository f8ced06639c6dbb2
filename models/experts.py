"""Feed-forward parts that are mixtures of experts: their keys, their tensors, and how they are recorded.

A router scores the experts for each token; the best few are computed and summed by weight (Shazeer et al. 2017). Shared experts see every
token. Families differ in how scores become weights and in what stands beside the experts; they say so in `Experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from localrun.models.blocks import Decoder, Ffn, Gate, Shapes, gated, linear
from localrun.models.params import Keys

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Routing, Row
    from localrun.models.weights import Weights

Gating = Literal["softmax", "sigmoid", "softmax of chosen"]
GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax of chosen"}
"""Values of expert_gating_func."""


@dataclass(frozen=True)
class Experts:
    """A layer's experts."""

    n: int
    used: int
    ffn: int
    """Width of one expert."""
    shared: int = 0
    """Width of what every token passes through beside them; 0: nothing."""
    gating: Gating = "softmax"
    normalised: bool = True
    """Weights of the chosen are divided by their sum."""
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    """Groups of experts, and how many of them may be chosen from."""
    activation: Gate = "silu"
    first: int = 0
    """Layers before this one are dense."""
    step: int = 1
    """From there on, every n-th layer has experts."""

    @classmethod
    def read(
        cls, keys: Keys, p: Decoder, *, ffn: int | None = None, shared: int = 0, gating: Gating = "softmax", normalised: bool = True,
        activation: Gate = "silu",
    ) -> Experts:
        """The common keys; the arguments hold where the file is silent. Raises ModelFileError."""
        known = {0: gating, **GATINGS}
        number = keys.int("expert_gating_func", 0)
        if number not in known:
            raise keys.error("expert_gating_func", f"is {number}, which is not supported")
        n = keys.int("expert_count", minimum=1)
        return cls(
            n=n,
            used=keys.int("expert_used_count", minimum=1, maximum=n),
            ffn=keys.int("expert_feed_forward_length", p.ffn if ffn is None else ffn, minimum=1),
            shared=shared,
            gating=known[number],
            normalised=keys.bool("expert_weights_norm", normalised),
            scale=keys.float("expert_weights_scale", 1.0) or 1.0,
            groups=(keys.int("expert_group_count", 1) or 1, keys.int("expert_group_used_count", 1) or 1),
            activation=activation,
            first=keys.int("leading_dense_block_count", 0),
        )

    def in_layer(self, i: int) -> bool:
        return i >= self.first and (i + 1) % self.step == 0

    def tensors(self, p: Decoder, *, gated: bool = True) -> Shapes:
        """Tensors of one layer's experts, the shared ones included."""
        shapes: Shapes = {
            "ffn_gate_inp.weight": (p.width, self.n),
            "ffn_up_exps.weight": (p.width, self.ffn, self.n),
            "ffn_down_exps.weight": (self.ffn, p.width, self.n),
        }
        if gated:
            shapes["ffn_gate_exps.weight"] = (p.width, self.ffn, self.n)
        if self.shared:
            shapes["ffn_up_shexp.weight"] = (p.width, self.shared)
            shapes["ffn_down_shexp.weight"] = (self.shared, p.width)
            shapes["ffn_gate_shexp.weight"] = (p.width, self.shared)
        return shapes

    def optional(self) -> Shapes:
        """Tensors of a layer that may be there: what is added to scores for choosing only."""
        return {"exp_probs_b.bias": (self.n,)}

    def all_tensors(self, p: Decoder, base: Shapes) -> Shapes:
        """`base` (Decoder.tensors) with this feed-forward part instead of the dense one in the layers that have experts."""
        dense = ("ffn_gate", "ffn_up", "ffn_down")
        sparse = [i for i in range(p.n_layers) if self.in_layer(i)]
        gone = {f"blk.{i}.{name}.weight" for i in sparse for name in dense}
        return {name: shape for name, shape in base.items() if name not in gone} | p.per_layer(self.tensors(p), sparse)

    def all_optional(self, p: Decoder) -> Shapes:
        return p.per_layer(self.optional())


def choose(r: Recorder, w: Weights, blk: str, h: Activation, e: Experts) -> Routing:
    """Scores h and chooses."""
    scores = linear(r, w, f"{blk}.ffn_gate_inp", h)
    return r.route(
        scores, e.used, gate=e.gating, bias=w.maybe(f"{blk}.exp_probs_b.bias"), normalise=e.normalised, scale=e.scale, groups=e.groups
    )


def chosen_ffn(
    r: Recorder, w: Weights, blk: str, h: Activation, routing: Routing, activation: Gate, *, weighted_input: bool = False
) -> Row:
    """Each chosen expert's down(act(gate h) * up h): (T * used, width) by expert."""
    x = r.gather(h, routing, weighted=weighted_input)
    gate = r.expert_matmul(w.stack(f"{blk}.ffn_gate_exps.weight"), x, routing, "gate_exps")
    up = r.expert_matmul(w.stack(f"{blk}.ffn_up_exps.weight"), x, routing, "up_exps", beside=True)
    g = r.gated(gate, up, activation, "gated_exps")
    return r.expert_matmul(w.stack(f"{blk}.ffn_down_exps.weight"), g, routing, "down_exps")


def shared_ffn(r: Recorder, w: Weights, blk: str, h: Activation, activation: Gate) -> Activation:
    """The shared expert before its ffn_down_shexp."""
    gate = linear(r, w, f"{blk}.ffn_gate_shexp", h)
    up = linear(r, w, f"{blk}.ffn_up_shexp", h, beside=True)
    return r.gated(gate, up, activation, "gated_shexp")


def experts(r: Recorder, w: Weights, p: Decoder, e: Experts, *, weighted_input: bool = False) -> Ffn:
    """The feed-forward part of layers with experts, dense in the layers before them.

    A shared expert is added as it is, or times the sigmoid of its own gate where the file has one. weighted_input: weights are applied to
    what the experts read instead of to what they give (Llama 4).
    """
    dense = gated(r, w, p, e.activation)

    def ffn(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        if not e.in_layer(i):
            return dense(i, blk, h, add_to)
        routing = choose(r, w, blk, h, e)
        y = chosen_ffn(r, w, blk, h, routing, e.activation, weighted_input=weighted_input)
        x = add_to or r.row("ffn_out", p.width)
        r.combine(y, routing, x, "combine", add=add_to is not None, weighted=not weighted_input)
        if e.shared:
            g = shared_ffn(r, w, blk, h, e.activation)
            if w.has(f"{blk}.ffn_gate_inp_shexp.weight"):
                gate = r.matmul(w.matrix(f"{blk}.ffn_gate_inp_shexp.weight"), h, "gate_inp_shexp")
                r.add(linear(r, w, f"{blk}.ffn_down_shexp", g), x, "add_shexp", gate=gate)
            else:
                linear(r, w, f"{blk}.ffn_down_shexp", g, add_to=x)
        return x

    return ffn


def with_shared(e: Experts, width: int) -> Experts:
    """The same with a shared expert of that width."""
    return replace(e, shared=width)
