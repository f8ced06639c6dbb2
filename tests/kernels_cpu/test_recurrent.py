"""Kernels that go over a sequence token by token, against NumPy in float64 written from the papers, on every instruction set this machine
executes; and that a cut of the sequence, a snapshot on the way, and neighbours change no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_cpu import head, isa
from localrun.kernels_cpu.spec import KernelSpec
from localrun.kernels_cpu.state_sizes import CONV_CHANNELS, SCAN_CHANNELS, conv_bytes, scan_bytes
from localrun.models.program import float_bits
from localrun.models.recurrent import lanes
from tests.kernels_cpu import running

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
TOKENS = 21
SLOTS = 5
CUTS = {"whole": [TOKENS], "chunks": [7, 1, 9, 4], "one at a time": [1] * TOKENS}


def softplus(x: Doubles) -> Doubles:
    return np.log1p(np.exp(x))


def sigmoid(x: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-x))


def silu(x: Doubles) -> Doubles:
    return x * sigmoid(x)


@dataclass
class Case:
    """A kernel, the arrays its arguments point to, and what its result must be. `args`: names of arrays ("name+3": from the fourth value
    on), their strides as "name.", numbers.
    """

    spec: KernelSpec
    parts: int
    part_bytes: int
    args: list[str | int]
    rows: dict[str, Floats]
    """(TOKENS, n), with room up to a multiple of 16."""
    constants: dict[str, Floats]
    expected: Callable[[Case], Doubles]
    spoiled: tuple[str, ...] = ()
    """Rows that the kernel writes beside its result."""
    width: int = 0
    _memory: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def r(self, name: str) -> Doubles:
        return self.rows[name].astype(np.float64)

    def c(self, name: str) -> Doubles:
        return self.constants[name].astype(np.float64)

    def run(self, isa_name: str, cuts: list[int], *, snapshots: dict[int, int] | None = None) -> tuple[Floats, NDArray[np.uint8]]:
        """The result (TOKENS, width) of one sequence in slot 3, fed in such pieces beside another in slot 1; and the slots."""
        wide = {name: -(-array.shape[1] // 16) * 16 for name, array in self.rows.items()} | {"y": -(-self.width // 16) * 16}
        slot_bytes = self.parts * self.part_bytes
        memory = running.aligned(SLOTS * slot_bytes)
        memory[:] = 0
        outs, start = [], 0
        for n in cuts:
            # Rows of a neighbour stand before this sequence's.
            batch = {name: running.aligned((n + 2) * stride * 4).view(np.float32).reshape(n + 2, stride) for name, stride in wide.items()}
            for name, array in self.rows.items():
                batch[name][:2, : array.shape[1]] = array[:2] * 0.5
                batch[name][2:, : array.shape[1]] = array[start : start + n]
            known = {name: running.aligned(array.nbytes + 128) for name, array in self.constants.items()}
            for name, array in self.constants.items():
                known[name][: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
            addresses = {name: array.ctypes.data for name, array in (batch | known).items()}
            words = [
                word if isinstance(word, int) else batch[word[:-1]].strides[0] if word.endswith(".") else place(addresses, word)
                for word in self.args
            ]
            own = [(2 + at, length, slot) for at, length, slot in segments(start, n, snapshots or {})]
            spans = np.array([[1, 0, 1], [3, 1, len(own)]], np.int32)
            table = np.array([(0, 2, -1), *own], np.int32)
            header = np.zeros(head.SIZE // 8, np.int64)
            header[head.SLOTS // 8], header[head.SLOT_BYTES // 8] = memory.ctypes.data, slot_bytes
            header[head.SPANS // 8], header[head.SEGMENTS // 8] = spans.ctypes.data, table.ctypes.data
            running.call(isa_name, self.spec, [self.parts, 0, self.part_bytes, *words], 2 * self.parts, header)
            for name, array in self.rows.items():
                if name not in self.spoiled:
                    assert np.array_equal(batch[name][2:, : array.shape[1]], array[start : start + n]), f"{name} was written"
            outs.append(batch["y"][2:, : self.width].copy())
            start += n
        return np.concatenate(outs), memory.reshape(SLOTS, slot_bytes)


def place(addresses: dict[str, int], word: str) -> int:
    """The address of "name" or of a value in it, "name+12"."""
    name, _, offset = word.partition("+")
    return addresses[name] + 4 * int(offset or 0)


def segments(start: int, n: int, snapshots: dict[int, int]) -> list[tuple[int, int, int]]:
    """(first row, rows, slot) between the places of `snapshots` (after so many tokens of the whole: slot)."""
    ends = {**{p - start: slot for p, slot in snapshots.items() if start < p <= start + n}}
    ends.setdefault(n, -1)
    done, parts = 0, []
    for end in sorted(ends):
        parts.append((done, end - done, ends[end]))
        done = end
    return parts


def values(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


# ---- the kernels ----------------------------------------------------------------------------------------------------------------


def convolution(rng: np.random.Generator) -> Case:
    """150 channels: a whole part and a rest that is no whole vector."""

    def expected(case: Case) -> Doubles:
        x = np.concatenate([np.zeros((3, 150)), case.r("x")])
        return silu(sum(x[j : j + TOKENS] * weights[:, j].astype(np.float64) for j in range(4)) + case.c("bias")[:150])

    weights = values(rng, 150, 4)
    bias = np.zeros(160, np.float32)
    bias[:150] = values(rng, 150)
    args: list[str | int] = ["x", "x.", "y", "y.", "w", "bias", 10]
    return Case(
        KernelSpec("conv", "short_conv", (4, 1)), 2, conv_bytes(CONV_CHANNELS, 3), args, {"x": values(rng, TOKENS, 150)},
        {"w": lanes(weights), "bias": bias}, expected, width=150,
    )  # fmt: skip


def token_before(rng: np.random.Generator) -> Case:
    def expected(case: Case) -> Doubles:
        return np.concatenate([np.zeros((1, 40)), case.r("x")[:-1]])

    args: list[str | int] = ["x", "x.", "y", "y.", 3]
    return Case(KernelSpec("conv", "before"), 1, conv_bytes(CONV_CHANNELS, 1), args, {"x": values(rng, TOKENS, 40)}, {}, expected, width=40)


def scan(rng: np.random.Generator) -> Case:
    """Mamba, algorithm 2: 72 channels, 5 numbers each."""
    channels, n = 72, 5
    a = -np.exp(values(rng, channels, n))

    def expected(case: Case) -> Doubles:
        x, dt, b, c, z = (case.r(name) for name in ("x", "dt", "b", "c", "z"))
        h, y, d = np.zeros((channels, n)), np.zeros((TOKENS, channels)), case.c("d")[:channels]
        for t in range(TOKENS):
            step = softplus(dt[t])[:, None]
            h = np.exp(step * a.astype(np.float64)) * h + step * b[t] * x[t][:, None]
            y[t] = (h @ c[t] + d * x[t]) * silu(z[t])
        return y

    rows = {name: values(rng, TOKENS, channels) for name in ("x", "dt", "z")} | {name: values(rng, TOKENS, n) for name in ("b", "c")}
    args: list[str | int] = ["x", "x.", "dt", "dt.", "b", "b.", "c", "c.", "z", "z.", "y", "y.", "a", "d", n, 5]
    constants = {"a": lanes(a), "d": np.pad(values(rng, channels), (0, 8))}
    return Case(KernelSpec("ssm", "selective_scan"), 2, scan_bytes(SCAN_CHANNELS, n), args, rows, constants, expected, width=channels)


def head_scan(rng: np.random.Generator) -> Case:
    """Mamba 2: 4 heads of 64 channels in two parts each, 2 groups, 6 numbers."""
    heads, dim, n, groups = 4, 64, 6, 2
    a, d, bias = -np.exp(values(rng, heads)), values(rng, heads), values(rng, heads)

    def expected(case: Case) -> Doubles:
        x = case.r("x").reshape(TOKENS, heads, dim)
        b, c = (case.r("bc")[:, i * groups * n : (i + 1) * groups * n].reshape(TOKENS, groups, n) for i in range(2))
        h, y = np.zeros((heads, dim, n)), np.zeros((TOKENS, heads, dim))
        for t in range(TOKENS):
            step = softplus(case.r("dt")[t] + bias)
            group = np.repeat(np.arange(groups), heads // groups)
            h = np.exp(step * a)[:, None, None] * h + (step[:, None] * x[t])[:, :, None] * b[t][group][:, None, :]
            y[t] = (h * c[t][group][:, None, :]).sum(axis=2) + d[:, None] * x[t]
        return y.reshape(TOKENS, -1) * silu(case.r("z"))

    rows = {name: values(rng, TOKENS, heads * dim) for name in "xz"}
    rows |= {"bc": values(rng, TOKENS, 2 * groups * n), "dt": values(rng, TOKENS, heads)}
    args: list[str | int] = [
        "x", "x.", "bc", f"bc+{groups * n}", "bc.", "dt", "dt.", "bias", "z", "z.", "y", "y.", "a", "d", n, 2, heads // groups,
    ]  # fmt: skip
    constants = {"a": a, "d": d, "bias": bias}
    return Case(KernelSpec("ssm", "head_scan", (2,)), 8, n * 128, args, rows, constants, expected, width=heads * dim)


def delta(rng: np.random.Generator, joint: bool) -> Case:
    """Gated DeltaNet, equation 10: 2 key heads, 4 value heads of 32."""
    keys, heads, dim = 2, 4, 32
    each = heads // keys
    a, bias = -np.exp(values(rng, heads)), values(rng, heads)
    key_of = [h // each if joint else h % keys for h in range(heads)]
    gate_of = [h // each * 2 * each + h % each if joint else h for h in range(heads)]
    behind = each if joint else heads

    def expected(case: Case) -> Doubles:
        qkv = case.r("qkv")
        q, k = (qkv[:, i * keys * dim : (i + 1) * keys * dim].reshape(TOKENS, keys, dim)[:, key_of] for i in range(2))
        v = qkv[:, 2 * keys * dim :].reshape(TOKENS, heads, dim)
        beta = sigmoid(case.r("gates")[:, gate_of])
        fade = np.exp(a * softplus(case.r("gates")[:, [g + behind for g in gate_of]] + bias))
        s, y = np.zeros((heads, dim, dim)), np.zeros((TOKENS, heads, dim))
        for t in range(TOKENS):
            s = s * fade[t][:, None, None]
            missing = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], s))
            s = s + k[t][:, :, None] * missing[:, None, :]
            y[t] = np.einsum("hk,hkv->hv", q[t], s) / np.sqrt(dim)
        return y.reshape(TOKENS, -1)

    qkv = values(rng, TOKENS, (2 * keys + heads) * dim) * np.float32(0.3)
    args: list[str | int] = [
        "qkv", f"qkv+{keys * dim}", f"qkv+{2 * keys * dim}", "qkv.", "gates", "gates.", f"gates+{behind}", "gates.",
        2 * each if joint else each, "bias", "a", "y", "y.", dim, 1, each, keys, int(joint), float_bits(1 / np.sqrt(dim)),
    ]  # fmt: skip
    rows = {"qkv": qkv, "gates": values(rng, TOKENS, 2 * heads)}
    spec = KernelSpec("deltanet", "gated_delta", (2,))
    return Case(spec, heads, dim * 128, args, rows, {"a": a, "bias": bias}, expected, width=heads * dim)


def normed(y: Doubles, weight: Doubles, bias: Doubles, eps: float) -> Doubles:
    """Layer norm over the last axis."""
    centred: Doubles = y - y.mean(axis=-1, keepdims=True)
    result: Doubles = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * weight + bias
    return result


def finch(rng: np.random.Generator) -> Case:
    """RWKV 6, equations 18 to 20: 2 heads of 32."""
    heads, dim = 2, 32

    def expected(case: Case) -> Doubles:
        r, k, v, w = (case.r(name).reshape(TOKENS, heads, dim) for name in "rkvw")
        u, weight, bias = (case.c(name).reshape(heads, dim) for name in ("u", "weight", "bias"))
        s, y = np.zeros((heads, dim, dim)), np.zeros((TOKENS, heads, dim))
        for t in range(TOKENS):
            added = k[t][:, :, None] * v[t][:, None, :]
            y[t] = np.einsum("hk,hkv->hv", r[t], s + u[:, :, None] * added)
            s = s * np.exp(-np.exp(w[t]))[:, :, None] + added
        return normed(y, weight, bias, 1e-3).reshape(TOKENS, -1) * silu(case.r("g"))

    width = heads * dim
    rows = {name: values(rng, TOKENS, width) for name in "rkvwg"}
    constants = {name: values(rng, width) for name in ("u", "weight", "bias")}
    args: list[str | int] = ["r", "r.", "k", "v", "w", "g", "y", "u", "weight", "bias", float_bits(1e-3)]
    return Case(KernelSpec("wkv", "wkv6", (2,)), heads, dim * 128, args, rows, constants, expected, ("w",), width)


def goose(rng: np.random.Generator) -> Case:
    """RWKV 7, equations 16 to 21: 2 heads of 32."""
    heads, dim = 2, 32

    def expected(case: Case) -> Doubles:
        r, k, v, w, a = (case.r(name).reshape(TOKENS, heads, dim) for name in "rkvwa")
        k_k, k_a, r_k, weight, bias = (case.c(name).reshape(heads, dim) for name in ("k_k", "k_a", "r_k", "weight", "bias"))
        s, y = np.zeros((heads, dim, dim)), np.zeros((TOKENS, heads, dim))
        for t in range(TOKENS):
            rate = sigmoid(a[t])
            unit = k[t] * k_k
            unit = unit / np.sqrt((unit**2).sum(axis=1, keepdims=True))
            key = k[t] * (1 + (rate - 1) * k_a)
            fade = np.exp(-np.exp(-0.5) * sigmoid(w[t]))
            said = np.einsum("hk,hkv->hv", unit, s)
            s = s * fade[:, :, None] - (unit * rate)[:, :, None] * said[:, None, :] + key[:, :, None] * v[t][:, None, :]
            y[t] = normed(np.einsum("hk,hkv->hv", r[t], s), weight, bias, 1e-3)
            y[t] += (r[t] * key * r_k).sum(axis=1, keepdims=True) * v[t]
        return y.reshape(TOKENS, -1) * case.r("g")

    width = heads * dim
    rows = {name: values(rng, TOKENS, width) for name in "rkvwag"} | {"kk": np.zeros((TOKENS, width), np.float32)}
    constants = {name: values(rng, width) for name in ("k_k", "k_a", "r_k", "weight", "bias")}
    args: list[str | int] = ["r", "r.", "k", "v", "w", "a", "g", "kk", "y", "k_k", "k_a", "r_k", "weight", "bias", float_bits(1e-3)]
    return Case(KernelSpec("wkv", "wkv7", (2,)), heads, dim * 128, args, rows, constants, expected, ("k", "w", "a", "kk"), width)


MAKERS: dict[str, Callable[[np.random.Generator], Case]] = {
    "convolution": convolution, "token before": token_before, "scan": scan, "head scan": head_scan,
    "delta": lambda rng: delta(rng, joint=False), "delta, joint": lambda rng: delta(rng, joint=True), "wkv6": finch, "wkv7": goose,
}  # fmt: skip
ISAS = [name for name in isa.available() if name != "amx"]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All kernels, compiled several at a time."""
    for isa_name in ISAS:
        running.library(isa_name).load([made(name).spec for name in MAKERS])


def made(name: str) -> Case:
    return MAKERS[name](np.random.default_rng(len(name)))


@pytest.mark.parametrize("isa_name", ISAS)
@pytest.mark.parametrize("name", list(MAKERS))
def test_as_the_paper_says(name: str, isa_name: str) -> None:
    case = made(name)
    got, _ = case.run(isa_name, CUTS["whole"])
    want = case.expected(case)
    assert np.abs(got - want).max() <= 2e-5 * max(1.0, float(np.abs(want).max()))


@pytest.mark.parametrize("name", list(MAKERS))
def test_cuts_and_snapshots_change_no_bit(name: str) -> None:
    case = made(name)
    whole, memory = case.run(ISAS[0], CUTS["whole"])
    for cuts in (CUTS["chunks"], CUTS["one at a time"]):
        got, after = case.run(ISAS[0], cuts)
        assert np.array_equal(got.view(np.uint32), whole.view(np.uint32))
        assert np.array_equal(after[3], memory[3])
    got, after = case.run(ISAS[0], CUTS["whole"], snapshots={1: 0, 8: 2, TOKENS: 4})
    assert np.array_equal(got.view(np.uint32), whole.view(np.uint32))
    for tokens, slot in {1: 0, 8: 2, TOKENS: 4}.items():
        _, alone = case.run(ISAS[0], [tokens, TOKENS - tokens] if tokens < TOKENS else [TOKENS], snapshots={tokens: 2})
        assert np.array_equal(after[slot], alone[2])
    assert not np.array_equal(after[0], after[2])


@pytest.mark.parametrize("name", list(MAKERS))
def test_all_instruction_sets_give_the_same_bits(name: str) -> None:
    case = made(name)
    results = [case.run(isa_name, CUTS["chunks"])[0] for isa_name in ISAS]
    for other in results[1:]:
        assert np.array_equal(other.view(np.uint32), results[0].view(np.uint32))
