"""RWKV 6 (Peng et al. 2024): no attention; time mixing whose mixtures with the token before and whose decay depend on the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.models import rwkv
from localrun.models.blocks import Shapes
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.rope import Rope
from localrun.models.rwkv import Rwkv, Shifted

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Row
    from localrun.models.weights import Weights

MIXED = "wkvrg"
"""What the five mixtures are for, in the order of the tensors."""


@dataclass(frozen=True)
class Rwkv6:
    rwkv: Rwkv
    mix_rank: int
    decay_rank: int
    halve_every: int


def read(keys: Keys, gguf: GGUFFile) -> Rwkv6:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    m = Rwkv6(
        Rwkv.read(keys, gguf),
        keys.int("time_mix_extra_dim", minimum=1),
        keys.int("time_decay_extra_dim", minimum=1),
        keys.int("rescale_every_n_layers", 0),
    )
    n = m.rwkv.decoder.width
    layer: Shapes = {
        "time_mix_w1.weight": (n, 5 * m.mix_rank), "time_mix_w2.weight": (m.mix_rank, n, 5), "time_mix_lerp_x.weight": (n,),
        "time_mix_lerp_fused.weight": (n, 1, 1, 5), "time_mix_decay.weight": (n,), "time_mix_decay_w1.weight": (n, m.decay_rank),
        "time_mix_decay_w2.weight": (m.decay_rank, n), "time_mix_gate.weight": (n, n), "channel_mix_lerp_r.weight": (n,),
        "channel_mix_receptance.weight": (n, n),
    }  # fmt: skip
    first = gguf.tensors.get("blk.0.time_mix_first.weight")
    layer["time_mix_first.weight"] = (m.rwkv.head, n // m.rwkv.head) if first is not None and len(first.shape) > 1 else (n,)
    m.rwkv.decoder.check(gguf, m.rwkv.tensors(layer))
    return m


def record(m: Rwkv6, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = m.rwkv.decoder

    def mixtures(blk: str, s: Shifted) -> dict[str, Row]:
        """x mixed with the token before it in five ways; by how much depends on a first mixture."""
        name = f"{blk}.time_mix"
        given = r.quantized(s.mixed(r, w.vector(f"{name}_lerp_x.weight"), "mix_x"), "mix_x")
        shares = w.values(f"{name}_lerp_fused.weight").reshape(5, p.width)
        low = [
            r.matmul(w.matrix(f"{name}_w1.weight", j * m.mix_rank, m.mix_rank), given, f"mix_low_{letter}", beside=j > 0)
            for j, letter in enumerate(MIXED)
        ]
        mixed = {}
        for j, letter in enumerate(MIXED):
            more = r.matmul(w.matrix(f"{name}_w2.weight", j * p.width, p.width), r.activated(low[j], "tanh", "mix_low"), "mix_more")
            mixed[letter] = s.mixed(r, w.constant(shares[j]), f"mix_{letter}", more=more)
        return mixed

    def time_mix(i: int, blk: str, s: Shifted, x: Row) -> None:
        name = f"{blk}.time_mix"
        mixed = mixtures(blk, s)
        rows = {
            letter: r.matmul(w.matrix(f"{name}_{matrix}.weight"), r.quantized(mixed[letter], f"mix_{letter}"), f"time_{letter}")
            for letter, matrix in (("r", "receptance"), ("k", "key"), ("v", "value"), ("g", "gate"))
        }
        low = r.matmul(w.matrix(f"{name}_decay_w1.weight"), r.quantized(mixed["w"], "mix_w"), "decay_low")
        bias = w.vector(f"{name}_decay.weight")
        rows["w"] = r.matmul(w.matrix(f"{name}_decay_w2.weight"), r.activated(low, "tanh", "decay_low"), "time_w", bias=bias)
        taken = [*(rows[letter] for letter in "rkvwg"), r.row("time_y", p.width)]
        y = rwkv.wkv(r, w, p, m.rwkv.head, "wkv6", taken, ["time_mix_first.weight"], blk)
        r.matmul(w.matrix(f"{name}_output.weight"), r.quantized(y, "time_y"), "time_out", add_to=x)

    def channel_mix(blk: str, s: Shifted, x: Row) -> None:
        value = r.matmul(w.matrix(f"{blk}.channel_mix_value.weight"), rwkv.squared_relu_ffn(r, w, blk, s), "channel_value")
        mixed = s.mixed(r, w.vector(f"{blk}.channel_mix_lerp_r.weight"), "mix_r")
        gate = r.matmul(w.matrix(f"{blk}.channel_mix_receptance.weight"), r.quantized(mixed, "mix_r"), "channel_gate")
        r.gated(gate, value, "sigmoid", "channel_gated")
        r.add(gate, x, "channel_add")

    rwkv.run(r, w, p, time_mix, channel_mix, halve_every=m.halve_every)
    return []
