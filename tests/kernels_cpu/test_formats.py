"""The tensor types in NumPy: dequantization to the bit, the matmul contract within named bounds, and the pieces that it rests on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.kernels_cpu import reference
from localrun.kernels_cpu.formats import BY_NAME, FORMATS, Format
from localrun.kernels_cpu.formats.grids import grid
from tests.kernels_cpu.data import random_rows

MAX_ERROR = {
    **dict.fromkeys(["F16", "BF16"], 1e-7),
    **dict.fromkeys(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4"], 8e-4),
    **dict.fromkeys(["Q1_0", "Q2_0"], 5e-4),
    **dict.fromkeys(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ1_S", "IQ1_M"], 9e-4),
    **dict.fromkeys(["IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"], 1.1e-3),
}
"""Largest |result - exact product| / (|row| * |activations|), Euclidean norms, on the reference data: rounding activations to int8."""

RMS_RATIO = 1.06
"""Our root mean square error beside the reference's own, on the same products; it is its equal but for how halves are rounded."""

WEIGHTS = sorted({*reference.UNPACK, *reference.FLOATS} - {BY_NAME["Q8_K"].id})
IN_PACKAGE = [t for t in WEIGHTS if FORMATS[t].name not in ("Q1_0", "Q2_0")]
"""The types that the gguf package can dequantize."""


def data(shared: Path) -> Iterator[tuple[Format, dict[str, NDArray[Any]]]]:
    for row in json.loads((shared / "dequant" / "types.json").read_text("utf-8")):
        with np.load(shared / "dequant" / f"{row['type']}.npz") as arrays:
            yield BY_NAME[row["type"].upper()], dict(arrays)


def test_the_reference_data_covers_every_type_with_weights(shared: Path) -> None:
    assert {form.id for form, _ in data(shared)} == {*reference.UNPACK, *reference.FLOATS} - {BY_NAME["F32"].id}
    assert len(list((shared / "dequant").glob("*.npz"))) == 28


def test_dequantization_is_exact(shared: Path) -> None:
    for form, arrays in data(shared):
        for kind in ("", "rand_"):
            values = reference.dequantize(form.id, arrays[kind + "packed"], 512)
            assert values.dtype == np.float32
            np.testing.assert_array_equal(values.view(np.uint32), arrays[kind + "values"].view(np.uint32), err_msg=form.name)


def test_matmul_is_as_close_as_the_reference(shared: Path) -> None:
    for form, arrays in data(shared):
        if form.name == "Q8_K":
            continue
        ours, theirs = [], []
        for kind in ("", "rand_"):
            exact = arrays[kind + "mul_mat_exact"]
            norms = np.linalg.norm(arrays["vec"], axis=1)[:, None] * np.linalg.norm(arrays[kind + "values"], axis=1) + 1e-30
            ours.append((reference.matmul(form.id, arrays[kind + "packed"], arrays["vec"]) - exact) / norms)
            theirs.append((arrays[kind + "mul_mat"] - exact) / norms)
        error, peer = np.concatenate(ours, axis=1), np.concatenate(theirs, axis=1)
        assert np.abs(error).max() < MAX_ERROR[form.name], form.name
        assert np.sqrt((error**2).mean()) < RMS_RATIO * np.sqrt((peer**2).mean()), form.name


def test_f32_is_itself() -> None:
    values = np.array([[0.0, -0.0, 1.5, np.inf, 1e-45]], np.float32)
    out = reference.dequantize(BY_NAME["F32"].id, values.view(np.uint8), 5)
    np.testing.assert_array_equal(out.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("type_id", IN_PACKAGE, ids=lambda t: FORMATS[t].name)
@given(seed=st.integers(0, 2**32), rows=st.integers(0, 5), blocks=st.integers(1, 3))
def test_agrees_with_the_formats_own_package(type_id: int, seed: int, rows: int, blocks: int) -> None:
    from gguf import GGMLQuantizationType, quants

    n = blocks * FORMATS[type_id].block
    packed = random_rows(np.random.default_rng(seed), type_id, rows, n)
    ours = reference.dequantize(type_id, packed, n)
    assert ours.shape == (rows, n)
    if rows:
        theirs = quants.dequantize(packed, GGMLQuantizationType(type_id)).astype(np.float32)
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("type_id", WEIGHTS, ids=lambda t: FORMATS[t].name)
@given(seed=st.integers(0, 2**32), rows=st.integers(0, 5), tokens=st.integers(0, 4), units=st.integers(1, 3))
def test_matmul_of_odd_shapes(type_id: int, seed: int, rows: int, tokens: int, units: int) -> None:
    """Near the exact product, and every result the same bits when its row and its token are all there is."""
    rng = np.random.default_rng(seed)
    form = FORMATS[type_id]
    n = units * max(form.block, 7 if type_id in reference.FLOATS else 32)
    packed = random_rows(rng, type_id, rows, n)
    x = (rng.normal(0, 1, (tokens, n)) * 10 ** rng.uniform(-4, 4, (tokens, 1))).astype(np.float32)
    out = reference.matmul(type_id, packed, x)
    assert out.shape == (tokens, rows)
    values = reference.dequantize(type_id, packed, n).astype(np.float64)
    # An activation is off by half a step at most, and a step is 1/127 of the largest.
    step = 0.0 if type_id in reference.FLOATS else np.abs(x).max(axis=1, keepdims=True) / 254
    bound = step * np.abs(values).sum(axis=1) + 1e-5 * np.abs(x) @ np.abs(values).T
    assert (np.abs(out - x @ values.T) <= bound).all()
    if not out.size:
        return
    t, r = int(rng.integers(tokens)), int(rng.integers(rows))
    alone = reference.matmul(type_id, packed[r : r + 1], x[t : t + 1])
    assert alone.view(np.uint32)[0, 0] == out.view(np.uint32)[t, r]


def test_what_is_refused() -> None:
    row = np.zeros((1, 18), np.uint8)
    with pytest.raises(ValueError, match="no whole number of Q4_0 blocks of 32"):
        reference.dequantize(BY_NAME["Q4_0"].id, row, 33)
    with pytest.raises(ValueError, match=r"rows of 64 Q4_0 values are uint8 \(rows, 36\)"):
        reference.matmul(BY_NAME["Q4_0"].id, row, np.zeros((1, 64), np.float32))
    with pytest.raises(ValueError, match="tensor type I32 holds no weights"):
        reference.dequantize(BY_NAME["I32"].id, row, 4)
    with pytest.raises(ValueError, match="tensor type 99 holds no weights"):
        reference.dequantize(99, row, 4)


# ---- what the contract rests on ----


@given(seed=st.integers(0, 2**32), tokens=st.integers(0, 3), blocks=st.integers(1, 4), block=st.sampled_from([32, 256]))
def test_quantized_activations(seed: int, tokens: int, blocks: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    wild = rng.normal(0, 1, (tokens, blocks, block))
    flat_or_not = np.where(rng.random((tokens, blocks, 1)) < 0.3, rng.uniform(0.3, 1, wild.shape), wild)
    x = (flat_or_not * 10 ** rng.uniform(-36, 30, (tokens, blocks, 1))).astype(np.float32)
    x[rng.random(x.shape[:2]) < 0.2] = 0
    q, d, sums = reference.quantize_q8(x.reshape(tokens, blocks * block), block)
    assert [a.dtype.name for a in (q, d, sums)] == ["int8", "float32", "int32"]
    assert (q.shape, d.shape, sums.shape) == ((tokens, blocks * block), (tokens, blocks), (tokens, blocks * block // 16))
    largest = np.abs(x).max(axis=2)
    live = largest >= 1e-30
    flat = np.zeros_like(live)
    if block == 256:
        full = np.rint(np.abs(x) * np.where(live, np.float32(127) / np.where(live, largest, 1), 0)[:, :, None])
        flat = full.reshape(tokens, blocks, 16, 16).sum(axis=3).max(axis=2, initial=0) > 1023
        assert np.abs(q.astype(int)).reshape(tokens, blocks * 16, 16).sum(axis=2).max(initial=0) <= 1023
    levels = np.where(flat, 63, 127)
    assert (np.abs(q.reshape(x.shape).astype(int)).max(axis=2) == levels * live).all()
    assert ((d == 0) == ~live).all()
    error = np.abs(q.reshape(x.shape) * d[:, :, None].astype(np.float64) - x)
    assert (error <= np.where(live, largest / (2 * levels) * (1 + 1e-4), 1e-30)[:, :, None]).all()
    assert (sums == q.astype(int).reshape(tokens, blocks * block // 16, 16).sum(axis=2)).all()


def test_halves_are_rounded_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [127, 0.5, 1.5, -2.5, 2.5000002]
    q, d, _ = reference.quantize_q8(x, 32)
    assert d.tolist() == [[1.0]]
    assert q[0, :5].tolist() == [127, 0, 2, -2, 3]


def f32(values: list[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to `exact`, ties to even, by trying the neighbours."""
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1))


_moderate = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)


@given(_moderate, _moderate, _moderate | st.sampled_from([2.0**-60, -(2.0**-70)]))
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    result = reference.fma(f32([a]), f32([b]), f32([c]))[0]
    assert result == rounded(exact)


def test_fma_where_rounding_twice_goes_wrong() -> None:
    """1 + 2^-24 lies halfway between two float32; what is added beyond 53 bits decides, and rounding to float64 first would lose it."""
    a, b = f32([1 + 2.0**-12]), f32([1 + 2.0**-12])
    for tiny, expected in ((2.0**-80, 1 + 2.0**-11 + 2.0**-23), (-(2.0**-80), 1 + 2.0**-11)):
        assert reference.fma(a, b, f32([tiny]))[0] == np.float32(expected)


def test_fma_keeps_infinities_and_nan() -> None:
    inf, one = f32([np.inf]), f32([1])
    assert reference.fma(inf, one, one)[0] == np.inf
    assert np.isnan(reference.fma(inf, one, -inf)[0])
    assert reference.fma(f32([3e38]), f32([10]), one)[0] == np.inf


def test_grids_hold_what_their_indices_can_say() -> None:
    sizes = {"iq2_xxs": (256, 8), "iq2_xs": (512, 8), "iq2_s": (1024, 8), "iq3_xxs": (256, 4), "iq3_s": (512, 4), "iq1": (2048, 8)}
    for name, shape in sizes.items():
        points = grid(name)
        assert points.shape == shape
        assert len(np.unique(points, axis=0)) == len(points)
        assert not points.flags.writeable
