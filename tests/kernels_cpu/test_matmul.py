"""Compiled matmuls, packing and embedding rows against the NumPy reference, bit for bit, on every instruction set this machine executes."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_cpu import isa, reference
from localrun.kernels_cpu.activation_sizes import MANY as MATRIX
from localrun.kernels_cpu.activation_sizes import SUPER
from localrun.kernels_cpu.formats import BY_NAME, FORMATS
from localrun.kernels_cpu.shapes import NEVER, WIDE_FROM, Shape
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_cpu.spec import KernelSpec
from tests.kernels_cpu import running
from tests.kernels_cpu.data import random_rows

pytestmark = pytest.mark.timeout(1500)
"""The first of them waits until a hundred kernels are compiled, where none is cached."""
TYPES = [FORMATS[t].name for t in PACKINGS]
ISAS = isa.available()
BEST = ISAS[0]
ROWS = 37
"""Two whole groups of 16 and one of 5."""
MANY = MATRIX + 36
COUNTS = [*range(1, 18), MANY]
"""Token counts that go through every tile, and, where there are matrix tiles, through those and a rest."""

Floats = NDArray[np.float32]


EVERY_SHAPE = [
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
    "Q2_K", "TQ2_0", "IQ4_XS", "IQ2_S", "IQ3_S", "IQ4_NL", "MXFP4", "NVFP4",
]  # fmt: skip
"""Types that between them use every tile; the others differ in tables, offsets and packing, which no instruction set changes."""


def combinations() -> list[tuple[str, str]]:
    """(instruction set, type): every type on the best set, every tile on the others, or, with TESTS_ALL_KERNELS set, every type on all.

    A kernel takes one to three seconds to compile.
    """
    others = TYPES if os.environ.get("TESTS_ALL_KERNELS") else EVERY_SHAPE
    return [(name, t) for name in ISAS for t in (TYPES if name == BEST else others)]


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Everything that the selected tests of this file run, compiled several at a time."""
    wanted: dict[str, list[KernelSpec]] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        parameters = callspec.params if callspec and item.path == request.path else {}
        specs = wanted.setdefault(parameters.get("isa_name", BEST), [])
        if "name" in parameters and "embedding" in item.name:
            specs.append(KernelSpec("elementwise", "embed", (parameters["name"],)))
        elif "name" in parameters:
            specs += [KernelSpec("matmul", "matmul", (parameters["name"],)), KernelSpec("pack", "pack", (parameters["name"],))]
    for isa_name, specs in wanted.items():
        running.library(isa_name).load([*specs, KernelSpec("elementwise", "norm")])


def bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def columns(name: str) -> int:
    """A row length: several blocks, of kind '32' an odd number of them, of floats no multiple of 4."""
    form, packing = BY_NAME[name], PACKINGS[BY_NAME[name].id]
    return {"f": 39, "32": 3 * max(form.block, 32), "256": 512}[packing.kind]


@functools.cache
def case(name: str) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """(rows of the file, activations, their product by the contract). One row of weights and one of activations is all zeros."""
    rng = np.random.default_rng(BY_NAME[name].id)
    n = columns(name)
    rows = random_rows(rng, BY_NAME[name].id, ROWS, n)
    x = (rng.normal(0, 1, (MANY, n)) * 10 ** rng.uniform(-3, 3, (MANY, 1))).astype(np.float32)
    x[5] = 0
    x[6] *= np.float32(1e-33)
    x[7, :32] = 127  # the largest sums there are
    x[8] = np.where(rng.random(n) < 0.5, -1, 1)  # flat: fewer levels
    return rows, x, reference.matmul(BY_NAME[name].id, rows, x)


@functools.cache
def activations(isa_name: str, name: str) -> running.Quantized:
    return running.Quantized(isa_name, case(name)[1], PACKINGS[BY_NAME[name].id].kind)


@pytest.mark.parametrize(("isa_name", "name"), combinations())
def test_matmul_keeps_the_contract(isa_name: str, name: str) -> None:
    """Any number of tokens, packed and from the file's bytes, gives the bits of the contract."""
    rows, _, expected = case(name)
    for tokens in COUNTS:
        packed = tokens in (1, 2, 3, 7, 16, MANY)
        for form in (True, False) if packed else (tokens % 2 == 0,):
            out = running.matmul(isa_name, BY_NAME[name].id, rows, activations(isa_name, name), tokens, columns(name), packed=form)
            # An absent bias is +0, so that -0 becomes +0.
            np.testing.assert_array_equal(bits(out), bits(expected[:tokens] + np.float32(0)), err_msg=f"{tokens} tokens, packed: {form}")


SHAPES = [Shape(wide_from=w, matrix_from=m) for w in WIDE_FROM for m in (MATRIX, 13, NEVER)]


@pytest.mark.parametrize("name", ["Q4_K", "Q4_1", "F16"])
def test_no_shape_changes_a_bit(name: str) -> None:
    """Every choice that timing may make, for every number of rows at which it decides something."""
    rows, _, expected = case(name)
    for tokens in (4, 5, 6, 7, 8, 9, 12, 13, 14, 15, MANY):
        for shape in SHAPES:
            out = running.matmul(
                BEST, BY_NAME[name].id, rows, activations(BEST, name), tokens, columns(name), packed=tokens != 14, shape=shape
            )
            np.testing.assert_array_equal(bits(out), bits(expected[:tokens] + np.float32(0)), err_msg=f"{tokens} tokens, {shape}")


@pytest.mark.parametrize("rows_wanted", [1, 16, 33])
@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "IQ4_XS", "F16"])
def test_bias_and_addition(name: str, rows_wanted: int) -> None:
    """(product + bias) + what was there, in float32, whatever the number of rows."""
    rng = np.random.default_rng(rows_wanted)
    rows, _, product = case(name)
    bias = rng.normal(0, 10, rows_wanted).astype(np.float32)
    for tokens in (1, 5, MANY):
        before = rng.normal(0, 10, (tokens, rows_wanted)).astype(np.float32)
        for with_bias in (True, False):
            for add in (True, False):
                out = running.matmul(
                    BEST, BY_NAME[name].id, rows[:rows_wanted], activations(BEST, name), tokens, columns(name), packed=True,
                    bias=bias if with_bias else None, add_to=before if add else None,
                )
                expected = product[:tokens, :rows_wanted] + (bias if with_bias else np.float32(0))
                np.testing.assert_array_equal(bits(out), bits(expected + before if add else expected))


EMBEDDING = [(BEST, name) for name in TYPES] + [("generic", name) for name in ("F16", "Q4_1", "IQ4_XS", "NVFP4") if BEST != "generic"]


@pytest.mark.parametrize(("isa_name", "name"), EMBEDDING)
def test_embedding_rows_are_exact(isa_name: str, name: str) -> None:
    rows, _, _ = case(name)
    n = columns(name)
    tokens = np.array([0, ROWS - 1, 3, 3], np.int32)
    expected = reference.dequantize(BY_NAME[name].id, rows, n)[tokens]
    np.testing.assert_array_equal(bits(running.embedding_rows(isa_name, BY_NAME[name].id, rows, n, tokens)), bits(expected))
    scaled = running.embedding_rows(isa_name, BY_NAME[name].id, rows, n, tokens, scale=22.6)
    np.testing.assert_array_equal(bits(scaled), bits(expected * np.float32(22.6)))


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "IQ4_XS"])
def test_long_rows_and_many_tokens(name: str) -> None:
    """So many activations that they do not fit into a cache and are worked on in parts."""
    rng = np.random.default_rng(11)
    n, tokens = 16384, 77
    rows = random_rows(rng, BY_NAME[name].id, 17, n)
    x = rng.normal(0, 1, (tokens, n)).astype(np.float32)
    expected = reference.matmul(BY_NAME[name].id, rows, x) + np.float32(0)
    form = running.Quantized(BEST, x, PACKINGS[BY_NAME[name].id].kind)
    for packed in (True, False):
        out = running.matmul(BEST, BY_NAME[name].id, rows, form, tokens, n, packed=packed)
        np.testing.assert_array_equal(bits(out), bits(expected), err_msg=f"packed: {packed}")


SCALES_AT = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q6_K": (208, 210)}
"""Bytes of a block that are its float16 scales."""


@pytest.mark.parametrize("isa_name", ISAS)
@pytest.mark.parametrize("name", SCALES_AT)
def test_largest_sums_of_sub_blocks(isa_name: str, name: str) -> None:
    """Every weight at either end of its range, every activation of the same sign: what a sub-block adds up to still is right."""
    form = BY_NAME[name]
    blocks = np.zeros((4, 2, form.block_bytes), np.uint8)
    blocks[1], blocks[2], blocks[3] = 255, 0x0F, 0xF0
    first, last = SCALES_AT[name]
    blocks[:, :, first:last] = np.array([1.0] * ((last - first) // 2), np.float16).view(np.uint8)
    rows = np.resize(blocks.reshape(4, -1), (16, 2 * form.block_bytes))
    x = np.full((8, 512), 64, np.float32)
    x[:, ::16] = 63  # sixteen magnitudes add up to 1023
    x[:, :512:256], x[:, 1:512:256] = 127, 0  # the first of them still so
    x[:, 2:512:256] = 62
    x[1] *= -1
    x[2, 1::2] *= -1
    x[3] = 1
    x[4] = -1
    expected = reference.matmul(form.id, rows, x) + np.float32(0)
    quantized = running.Quantized(isa_name, x, "256")
    for tokens in (1, 8):
        out = running.matmul(isa_name, form.id, rows, quantized, tokens, 512, packed=True)
        np.testing.assert_array_equal(bits(out), bits(expected[:tokens]))


def test_every_weight_type_has_kernels() -> None:
    assert set(PACKINGS) == {*reference.UNPACK, *reference.FLOATS} - {BY_NAME["Q8_K"].id}


@pytest.mark.parametrize("isa_name", ISAS)
def test_quantized_activations(isa_name: str) -> None:
    """Quants, scales and every sum that kernels use, of both kinds; halves go to even, next to nothing is zero."""
    rng = np.random.default_rng(3)
    x = (rng.normal(0, 1, (6, 512)) * 10 ** rng.uniform(-20, 20, (6, 1))).astype(np.float32)
    x[5] = 0
    x[1] = 0
    x[2] = np.float32(1e-30) * np.linspace(-0.99, 0.99, 512, dtype=np.float32)
    x[3, :256] = np.float32(1e-30)
    x[4, :5] = [127, 0.5, 1.5, -2.5, 2.5000002]
    x[4, 5:] = 0
    x[5, 16:32] = 64  # sums of magnitudes of just 1023, and of 1024
    x[5, 0], x[5, 16] = 127, 63
    x[5, 256 + 16 : 256 + 32] = -64
    x[5, 256] = 127
    q, d, sums = reference.quantize_q8(x, 256)
    assert [np.abs(q[5, at : at + 256]).max() for at in (0, 256)] == [127, 63]
    form = running.Quantized(isa_name, x, "256")
    for t in range(len(x)):
        blocks = form.row(t)[: 2 * SUPER].reshape(2, SUPER)
        np.testing.assert_array_equal(blocks[:, :256].view(np.int8).reshape(-1), q[t])
        np.testing.assert_array_equal(blocks[:, 256:260].copy().view(np.uint32)[:, 0], bits(d[t]))
        np.testing.assert_array_equal(blocks[:, 264:280].copy().view(np.int16), sums[t].reshape(2, 8, 2).sum(axis=2))
        np.testing.assert_array_equal(blocks[:, 288:320].copy().view(np.int16), sums[t].reshape(2, 16))
        np.testing.assert_array_equal(blocks[:, 320:384].copy().view(np.int32), -32 * sums[t].reshape(2, 16))
    q, d, sums = reference.quantize_q8(x, 32)
    form = running.Quantized(isa_name, x, "32")
    for t in range(len(x)):
        np.testing.assert_array_equal(form.row(t)[:512].view(np.int8), q[t])
        meta = form.row(t)[512 : 512 + 16 * 28].reshape(16, 28).copy()
        halves = sums[t].reshape(16, 2)
        total = halves.sum(axis=1)
        np.testing.assert_array_equal(meta[:, :4].copy().view(np.uint32)[:, 0], bits(d[t]))
        np.testing.assert_array_equal(meta[:, 4:8].copy().view(np.uint32)[:, 0], bits(d[t] * total.astype(np.float32)))
        expected = np.stack([-8 * total, -16 * total, -128 * total, -16 * halves[:, 0], -16 * halves[:, 1]], axis=1)
        np.testing.assert_array_equal(meta[:, 8:].copy().view(np.int32), expected)
