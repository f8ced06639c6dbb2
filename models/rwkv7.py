"""RWKV 7 (Peng et al. 2025): no attention; time mixing by a generalised delta rule, with values that remember those of the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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

MIXED = "rwkvag"
"""What the six mixtures are for, in the order of the tensor."""
OF_VALUES = ("time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight")


@dataclass(frozen=True)
class Rwkv7:
    rwkv: Rwkv
    decay_rank: int
    rate_rank: int
    value_rank: int
    gate_rank: int


def read(keys: Keys, gguf: GGUFFile) -> Rwkv7:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    m = Rwkv7(
        Rwkv.read(keys, gguf),
        *(keys.int(f"attention.{name}_lora_rank", minimum=1) for name in ("decay", "iclr", "value_residual_mix", "gate")),
    )
    p = m.rwkv.decoder
    n = p.width
    layer: Shapes = {f"time_mix_{name}.weight": (n,) for name in ("w0", "a0", "k_k", "k_a", "r_k")}
    for name, rank in (("w", m.decay_rank), ("a", m.rate_rank), ("g", m.gate_rank)):
        layer |= {f"time_mix_{name}1.weight": (n, rank), f"time_mix_{name}2.weight": (rank, n)}
    layer["time_mix_lerp_fused.weight"] = (n, 1, 1, 6)
    shapes = m.rwkv.tensors(layer)
    for i in range(p.n_layers):
        # The first layer's values are what the others mix in. It mixes nothing in itself, but files have tensors for it, of the other rank.
        rank = m.value_rank if i else m.rate_rank
        shapes |= p.per_layer(dict(zip(OF_VALUES, ((n,), (n, rank), (rank, n)))), [i])
    p.check(gguf, shapes)
    return m


def record(m: Rwkv7, r: Recorder, w: Weights) -> list[Rope]:
    """The forward pass."""
    p = m.rwkv.decoder
    v_first = r.row("v_first", p.width)

    def low_rank(blk: str, letter: str, x: Row, act: Literal["tanh", "sigmoid", ""]) -> Row:
        """W2 act(W1 x) + bias."""
        name = f"{blk}.time_mix_{letter}"
        low = r.matmul(w.matrix(f"{name}1.weight"), r.quantized(x, f"mix_{letter}"), f"low_{letter}")
        given = r.activated(low, act, f"low_{letter}") if act else r.quantized(low, f"low_{letter}")
        return r.matmul(w.matrix(f"{name}2.weight"), given, f"full_{letter}", bias=w.maybe(f"{name}0.weight"))

    def time_mix(i: int, blk: str, s: Shifted, x: Row) -> None:
        name = f"{blk}.time_mix"
        shares = w.values(f"{name}_lerp_fused.weight").reshape(len(MIXED), p.width)
        mixed = {letter: s.mixed(r, w.constant(shares[j]), f"mix_{letter}") for j, letter in enumerate(MIXED)}
        rows = {
            letter: r.matmul(w.matrix(f"{name}_{matrix}.weight"), r.quantized(mixed[letter], f"mix_{letter}"), f"time_{letter}")
            for letter, matrix in (("r", "receptance"), ("k", "key"), ("v", "value"))
        }
        vectors = -(-p.width // 16)
        if i == 0:
            r.copy_part(rows["v"], v_first, 1, "v_first", n=p.width, first=0, to=0)
        else:
            share, v = low_rank(blk, "v", mixed["v"], ""), rows["v"]
            args = [v.address, v.stride, v_first.address, v_first.stride, share.address, share.stride, vectors]
            r.apply("mixing", "lerp_by_gate", args, "v_mix")
        rows["w"] = low_rank(blk, "w", mixed["w"], "tanh")
        rows["a"] = low_rank(blk, "a", mixed["a"], "")
        rows["g"] = low_rank(blk, "g", mixed["g"], "sigmoid")
        taken = [*(rows[letter] for letter in "rkvwag"), r.row("time_kk", p.width), r.row("time_y", p.width)]
        y = rwkv.wkv(r, w, p, m.rwkv.head, "wkv7", taken, [f"time_mix_{part}.weight" for part in ("k_k", "k_a", "r_k")], blk)
        r.matmul(w.matrix(f"{name}_output.weight"), r.quantized(y, "time_y"), "time_out", add_to=x)

    def channel_mix(blk: str, s: Shifted, x: Row) -> None:
        r.matmul(w.matrix(f"{blk}.channel_mix_value.weight"), rwkv.squared_relu_ffn(r, w, blk, s), "channel_value", add_to=x)

    rwkv.run(r, w, p, time_mix, channel_mix)
    return []
