"""Layers that keep a state instead of keys and values: their keys, their tensors, and how they are recorded.

The state of a sequence lies in a slot (kernels_cpu/slots.py); which one is the engine's business. A family's file says which of its layers
are of which kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.kernels_cpu.state_sizes import CONV_CHANNELS, SCAN_CHANNELS, conv_bytes, scan_bytes
from localrun.models.blocks import Attention, Decoder, Ffn, Shapes, attention_block, linear, normed
from localrun.models.params import Keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from localrun.models.plan import Recorder
    from localrun.models.program import Activation, Row
    from localrun.models.weights import Vector, Weights


@dataclass(frozen=True)
class StateSpace:
    """A Mamba layer: names as in the GGUF specification (ssm.*)."""

    taps: int
    """Inputs that the convolution sees."""
    inner: int
    n_state: int
    rank: int
    """Mamba: rank of the matrix that gives time steps; Mamba 2: heads."""
    groups: int
    """Mamba 2: groups of heads with B and C in common."""
    plain_norms: bool = False
    """Mamba: B, C and dt are normed, by no weights (FalconMamba)."""

    @classmethod
    def read(cls, keys: Keys, *, heads: bool = False) -> StateSpace:
        """From the file's keys; heads: Mamba 2. Raises ModelFileError."""
        ssm = cls(
            taps=keys.int("ssm.conv_kernel", minimum=2, maximum=16),
            inner=keys.int("ssm.inner_size", minimum=1),
            n_state=keys.int("ssm.state_size", minimum=1),
            rank=keys.int("ssm.time_step_rank", minimum=1),
            groups=keys.int("ssm.group_count", minimum=1) if heads else 1,
            plain_norms=keys.bool("ssm.dt_b_c_rms", False),
        )
        if heads:
            if ssm.inner % ssm.rank or ssm.inner // ssm.rank % 16:
                raise keys.error("ssm.inner_size", f"is {ssm.inner}: {ssm.rank} heads must have a multiple of 16 values each")
            if ssm.rank % ssm.groups:
                raise keys.error("ssm.group_count", f"is {ssm.groups}, which does not divide the {ssm.rank} heads")
        return ssm

    @property
    def conv_width(self) -> int:
        """Channels of Mamba 2's convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.n_state

    def mamba_tensors(self, p: Decoder, *, normed: bool = False) -> Shapes:
        """Of one layer; normed: dt, B and C are normed by weights (Jamba)."""
        norms: Shapes = {"ssm_dt_norm.weight": (self.rank,), "ssm_b_norm.weight": (self.n_state,), "ssm_c_norm.weight": (self.n_state,)}
        return {
            "ssm_in.weight": (p.width, 2 * self.inner), "ssm_conv1d.weight": (self.taps, self.inner), "ssm_conv1d.bias": (self.inner,),
            "ssm_x.weight": (self.inner, self.rank + 2 * self.n_state), "ssm_dt.weight": (self.rank, self.inner),
            "ssm_dt.bias": (self.inner,), "ssm_a": (self.n_state, self.inner), "ssm_d": (self.inner,),
            "ssm_out.weight": (self.inner, p.width), **(norms if normed else {}),
        }  # fmt: skip

    def mamba2_tensors(self, p: Decoder) -> Shapes:
        """Of one layer, without its norm."""
        return {
            "ssm_in.weight": (p.width, self.inner + self.conv_width + self.rank), "ssm_conv1d.weight": (self.taps, self.conv_width),
            "ssm_dt.bias": (self.rank,), "ssm_a": (1, self.rank), "ssm_d": (1, self.rank), "ssm_out.weight": (self.inner, p.width),
        }  # fmt: skip

    def mamba2_norm(self) -> Shapes:
        """The norm of what a layer gives, by group."""
        return {"ssm_norm.weight": (self.inner // self.groups, self.groups)}

    def mamba2_optional(self) -> Shapes:
        """What a layer may have."""
        return {"ssm_conv1d.bias": (self.conv_width,)}


def short_conv(
    r: Recorder, w: Weights, name: str, x: Row, out: str, *, activated: bool, bias: Vector | None = None, first: int = 0,
    n: int | None = None,
) -> Row:
    """Causal convolution of each channel of x (T, C) with its few taps, and SiLU where `activated`.

    out: name of the buffer of the result; first, n: which of the weight's rows.
    """
    taps = w.gguf.tensors[f"{name}.weight"].shape[0]
    weights = w.values(f"{name}.weight").reshape(-1, taps)[first : None if n is None else first + n]
    y = r.row(out, x.width)
    vectors = -(-x.width // 16)
    args = [x.address, x.stride, y.address, y.stride, w.constant(lanes(weights)).address, bias.address if bias else 0, vectors]
    r.over_spans(
        "conv", "short_conv", [taps, int(activated)], args, "conv", parts=-(-x.width // CONV_CHANNELS),
        part_bytes=conv_bytes(CONV_CHANNELS, taps - 1),
    )  # fmt: skip
    return y


def before(r: Recorder, x: Row, name: str) -> Row:
    """x of the token before (T, C), zero before the first."""
    y = r.row(name, x.width)
    vectors = -(-x.width // 16)
    args = [x.address, x.stride, y.address, y.stride, vectors]
    r.over_spans("conv", "before", [], args, name, parts=-(-x.width // CONV_CHANNELS), part_bytes=conv_bytes(CONV_CHANNELS, 1))
    return y


def lanes(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """(channels, n) as [vector of 16 channels][n][16], flat, zeros behind the last channel."""
    import numpy as np

    channels, n = values.shape
    padded = np.zeros(((channels + 15) // 16 * 16, n), np.float32)
    padded[:channels] = values
    return padded.reshape(-1, 16, n).transpose(0, 2, 1).ravel()


def mamba(r: Recorder, w: Weights, p: Decoder, s: StateSpace, blk: str, h: Activation) -> Activation:
    """Mamba (Gu and Dao 2023): h (T, width) -> (T, inner), ready for ssm_out."""
    x = r.matmul(w.matrix(f"{blk}.ssm_in.weight", 0, s.inner), h, "ssm_x")
    z = r.matmul(w.matrix(f"{blk}.ssm_in.weight", s.inner, s.inner), h, "ssm_z", beside=True)
    x = short_conv(r, w, f"{blk}.ssm_conv1d", x, "conv_x", activated=True, bias=w.vector(f"{blk}.ssm_conv1d.bias"))
    given = r.quantized(x, "ssm_x")
    parts, first = [], 0
    for name, n in (("dt", s.rank), ("b", s.n_state), ("c", s.n_state)):
        parts.append(r.matmul(w.matrix(f"{blk}.ssm_x.weight", first, n), given, f"ssm_{name}", beside=name != "dt"))
        first += n
        norm = w.maybe(f"{blk}.ssm_{name}_norm.weight")
        if norm or s.plain_norms:
            r.norm_heads(parts[-1], 1, norm, p.eps, f"ssm_{name}_norm")
    dt, b, c = parts
    dt = r.matmul(w.matrix(f"{blk}.ssm_dt.weight"), r.quantized(dt, "ssm_dt"), "ssm_step", bias=w.vector(f"{blk}.ssm_dt.bias"))
    y = r.row("ssm_y", s.inner)
    a = w.constant(lanes(w.values(f"{blk}.ssm_a").reshape(s.inner, s.n_state)))
    vectors = -(-s.inner // 16)
    args = [*(word for row in (x, dt, b, c, z, y) for word in (row.address, row.stride)), a.address, w.vector(f"{blk}.ssm_d").address]
    r.over_spans(
        "ssm", "selective_scan", [], [*args, s.n_state, vectors], "ssm_scan", parts=-(-s.inner // SCAN_CHANNELS),
        part_bytes=scan_bytes(SCAN_CHANNELS, s.n_state),
    )  # fmt: skip
    return r.quantized(y, "ssm_y")


def mamba2(r: Recorder, w: Weights, p: Decoder, s: StateSpace, blk: str, h: Activation) -> Activation:
    """Mamba 2 (Dao and Gu 2024), with its norm if the file has it: h (T, width) -> (T, inner), ready for ssm_out."""
    z = r.matmul(w.matrix(f"{blk}.ssm_in.weight", 0, s.inner), h, "ssm_z")
    first = s.inner
    xbc = []
    for name, n in (("x", s.inner), ("bc", 2 * s.groups * s.n_state)):
        row = r.matmul(w.matrix(f"{blk}.ssm_in.weight", first, n), h, f"ssm_{name}", beside=True)
        bias = w.maybe(f"{blk}.ssm_conv1d.bias", first - s.inner, n)
        xbc.append((name, row, bias, first - s.inner, n))
        first += n
    dt = r.matmul(w.matrix(f"{blk}.ssm_in.weight", first, s.rank), h, "ssm_dt", beside=True)
    x, bc = (
        short_conv(r, w, f"{blk}.ssm_conv1d", row, f"conv_{name}", activated=True, bias=bias, first=at, n=n)
        for name, row, bias, at, n in xbc
    )
    y = r.row("ssm_y", s.inner)
    dim = s.inner // s.rank
    wide = next(n for n in (4, 2, 1) if dim % (16 * n) == 0)
    of_head = dim // (16 * wide)
    args = [
        x.address, x.stride, bc.address, bc.address + 4 * s.groups * s.n_state, bc.stride, dt.address, dt.stride,
        w.vector(f"{blk}.ssm_dt.bias").address, z.address, z.stride, y.address, y.stride, w.vector(f"{blk}.ssm_a").address,
        w.vector(f"{blk}.ssm_d").address, s.n_state, of_head, s.rank // s.groups,
    ]  # fmt: skip
    r.over_spans("ssm", "head_scan", [wide], args, "ssm_scan", parts=s.rank * of_head, part_bytes=s.n_state * wide * 64)
    if w.has(f"{blk}.ssm_norm.weight"):
        r.norm_heads(y, s.groups, w.vector(f"{blk}.ssm_norm.weight"), p.eps, "ssm_norm")
    return r.quantized(y, "ssm_y")


# ---- layers of which each is of its own kind ------------------------------------------------------------------------------------


def mixed_layers(
    r: Recorder, w: Weights, p: Decoder, x: Row, mixers: Sequence[Ffn], ffn: Ffn | None, *, residual_scale: float = 1.0,
    ffn_norm: str = "ffn_norm",
) -> None:
    """x += mixer(norm x); x += ffn(norm x), with one mixer for each layer; no ffn: the mixer is all of a layer. residual_scale: factor of
    what is added.
    """
    whole = residual_scale == 1.0

    def add(part: Ffn, i: int, norm: str) -> None:
        y = part(i, f"blk.{i}", normed(r, w, p, x, f"blk.{i}.{norm}"), x if whole else None)
        if not whole:
            r.add(y, x, "residual", scale=residual_scale)

    for i, mixer in enumerate(mixers):
        add(mixer, i, "attn_norm")
        if ffn is not None:
            add(ffn, i, ffn_norm)


def attending(r: Recorder, w: Weights, p: Decoder, how: Attention) -> Ffn:
    """The mixer of a layer that attends."""

    def mixer(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        return linear(r, w, f"{blk}.attn_output", attention_block(r, w, p, blk, h, how), add_to=add_to)

    return mixer


def scanning(r: Recorder, w: Weights, p: Decoder, s: StateSpace, *, heads: bool) -> Ffn:
    """The mixer of a layer of Mamba or, with `heads`, of Mamba 2."""

    def mixer(i: int, blk: str, h: Activation, add_to: Row | None) -> Row:
        return linear(r, w, f"{blk}.ssm_out", (mamba2 if heads else mamba)(r, w, p, s, blk, h), add_to=add_to)

    return mixer


def multiply(r: Recorder, a: Row, b: Row, name: str) -> Row:
    """a * b, value by value, in a buffer of that name."""
    y = r.row(name, a.width)
    r.apply("mixing", "multiply", [a.address, a.stride, b.address, b.stride, y.address, y.stride, -(-a.width // 16)], name)
    return y
