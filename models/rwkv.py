"""What RWKV 6 and 7 share: their hyper-parameters, mixtures of a token with the one before it, and the order of a layer's two halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrun.models.blocks import Decoder, Shapes, output
from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.recurrent import before

if TYPE_CHECKING:
    from collections.abc import Callable

    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Vector, Weights

HEAD_EPS = 64e-5
"""Of the norm of each head's result."""


@dataclass(frozen=True)
class Rwkv:
    """Hyper-parameters; the decoder's norms are layer norms."""

    decoder: Decoder
    head: int
    """Values of a head."""

    @classmethod
    def read(cls, keys: Keys, gguf: GGUFFile) -> Rwkv:
        """From the file's keys. Raises ModelFileError."""
        p = replace(Decoder.read(keys, gguf, norm="layer", fewest_heads=0), n_rot=0)
        head = keys.int("wkv.head_size", minimum=1)
        if head % 16 or head > 256 or p.width % head:
            raise keys.error("wkv.head_size", f"is {head}; only divisors of the width {p.width} that are multiples of 16 are supported")
        if keys.int("token_shift_count", 2) != 2:
            raise keys.error("token_shift_count", f"is {keys.int('token_shift_count')}; only 2 is supported")
        return cls(p, head)

    def tensors(self, layer: Shapes) -> Shapes:
        """All tensors; `layer`: what each layer has besides norms, the head's norm, and the matrices of both versions."""
        p = self.decoder
        n = p.width
        whole: Shapes = {"token_embd.weight": (n, p.n_vocab), "token_embd_norm.weight": (n,), "token_embd_norm.bias": (n,),
                         "output_norm.weight": (n,), "output_norm.bias": (n,), "output.weight": (n, p.n_vocab)}  # fmt: skip
        square = {f"time_mix_{name}.weight": (n, n) for name in ("key", "value", "receptance", "output")}
        vectors = ("attn_norm.weight", "attn_norm.bias", "attn_norm_2.weight", "attn_norm_2.bias", "time_mix_ln.weight", "time_mix_ln.bias",
                   "channel_mix_lerp_k.weight")  # fmt: skip
        channel: Shapes = {"channel_mix_key.weight": (n, p.ffn), "channel_mix_value.weight": (p.ffn, n)}
        return whole | p.per_layer({**dict.fromkeys(vectors, (n,)), **square, **channel, **layer})


@dataclass(frozen=True)
class Shifted:
    """A normed row and the one of the token before it."""

    x: Row
    previous: Row

    def mixed(self, r: Recorder, shares: Vector, name: str, *, more: Row | None = None) -> Row:
        """x + (previous - x) * (shares + more)."""
        y = r.row(name, self.x.width)
        args = [self.x.address, self.x.stride, self.previous.address, self.previous.stride, shares.address]
        args += [more.address if more else 0, more.stride if more else 0, y.address, y.stride, -(-self.x.width // 16)]
        r.apply("mixing", "lerp", args, name)
        return y


def shifted(r: Recorder, w: Weights, p: Decoder, x: Row, norm: str, name: str) -> Shifted:
    """The layer norm of x by the tensors of that name, and the token's before."""
    r.norm(x, w.vector(f"{norm}.weight"), p.eps, name, kind="layer", bias=w.vector(f"{norm}.bias"), buffer=name)
    row = r.row(name, p.width)
    return Shifted(row, before(r, row, f"{name}.before"))


def run(
    r: Recorder, w: Weights, p: Decoder, time_mix: Callable[[int, str, Shifted, Row], None],
    channel_mix: Callable[[str, Shifted, Row], None], *, halve_every: int = 0,
) -> None:
    """The forward pass: x += time_mix(norm x); x += channel_mix(norm x), the embedding normed before. halve_every: layers after which x is
    halved.
    """  # fmt: skip
    x = r.embed(w.matrix("token_embd.weight"))
    r.norm_heads(x, 1, w.vector("token_embd_norm.weight"), p.eps, "embd_norm", kind="layer", bias=w.vector("token_embd_norm.bias"))
    for i in range(p.n_layers):
        blk = f"blk.{i}"
        time_mix(i, blk, shifted(r, w, p, x, f"{blk}.attn_norm", "time"), x)
        channel_mix(blk, shifted(r, w, p, x, f"{blk}.attn_norm_2", "channel"), x)
        if halve_every and (i + 1) % halve_every == 0:
            r.scale(x, "halve", factor=0.5)
    output(r, w, p, x)


def squared_relu_ffn(r: Recorder, w: Weights, blk: str, s: Shifted) -> Activation:
    """relu(key (x mixed))**2, before channel_mix_value."""
    mixed = s.mixed(r, w.vector(f"{blk}.channel_mix_lerp_k.weight"), "mix_k")
    k = r.matmul(w.matrix(f"{blk}.channel_mix_key.weight"), r.quantized(mixed, "mix_k"), "channel_key")
    return r.activated(k, "relu_squared", "channel_key")


def wkv(r: Recorder, w: Weights, p: Decoder, head: int, kernel: str, rows: Sequence[Row], vectors: Sequence[str], blk: str) -> Row:
    """The heads' update: `rows` as the kernel takes them, after the first its stride, which all share; the result is the last of them."""
    from localrun.models.program import float_bits

    args = [rows[0].address, rows[0].stride, *(row.address for row in rows[1:])]
    args += [w.vector(f"{blk}.{name}").address for name in vectors]
    args += [w.vector(f"{blk}.time_mix_ln.weight").address, w.vector(f"{blk}.time_mix_ln.bias").address, float_bits(HEAD_EPS)]
    r.over_spans("wkv", kernel, [head // 16], args, kernel, parts=p.width // head, part_bytes=head * head * 4)
    return rows[-1]
