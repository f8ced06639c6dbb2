"""Quantizers against ggml's own quantization of the same rows, and against the reference that reads them back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import BY_NAME
from localrun.kernels_cpu.reference import dequantize
from localrun.quantize.fit import half_bits, half_value
from localrun.quantize.output import QUANTIZERS

TYPES = sorted(QUANTIZERS)
STEPS = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "Q2_K": 3, "Q3_K": 4, "Q4_K": 15, "Q5_K": 31, "Q6_K": 32}


def there_and_back(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x: (rows, n)."""
    form = BY_NAME[name]
    out = np.full(x.size // form.block * form.block_bytes, 0xA5, np.uint8)
    QUANTIZERS[name](np.ascontiguousarray(x).reshape(-1), out)
    found: NDArray[np.float32] = dequantize(form.id, out.reshape(len(x), -1), x.shape[1])
    return found


def rmse(values: NDArray[np.float32], source: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((values.astype(np.float64) - source) ** 2)))


@pytest.mark.parametrize("name", TYPES)
def test_error_is_no_larger_than_the_references(shared: Path, name: str) -> None:
    data = np.load(shared / "dequant" / f"{name.replace('_K', '_k').lower().replace('_k', '_K')}.npz")
    source, theirs = data["source"].astype(np.float32), data["values"]
    assert rmse(there_and_back(name, source), source) <= 1.02 * rmse(theirs, source)


@pytest.mark.parametrize("name", TYPES)
def test_error_on_random_weights(name: str) -> None:
    """Independent of reference data: the error is that of a uniform grid over a block's range, or less."""
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32) * 0.02
    assert rmse(there_and_back(name, x), x) < 0.02 * 3.2 / STEPS[name] / np.sqrt(12) * 1.6


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 1e-3, 3e-9, -1e-30, 1000.0, 60000.0])
def test_constant_rows(name: str, value: float) -> None:
    x = np.full((2, 256), value, np.float32)
    found = there_and_back(name, x)
    # a scale below float16's smallest number is zero, and so is what it scales
    assert np.abs(found - x).max() <= max(abs(value) * (0.02 if name in ("Q4_1", "Q5_1", "Q8_0") else 0.04), 2e-5)


@pytest.mark.parametrize("name", TYPES)
def test_ternary_rows_are_exact_and_outliers_stay(name: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(-1, 2, (8, 256)).astype(np.float32) * 0.5
    assert rmse(there_and_back(name, x), x) < (1e-3 if name != "Q2_K" else 0.02)
    x = rng.standard_normal((1, 256)).astype(np.float32) * 0.01
    x[0, 77] = 5.0
    assert abs(there_and_back(name, x)[0, 77] - 5.0) < 0.2


@pytest.mark.parametrize("name", TYPES)
def test_a_block_does_not_depend_on_its_neighbours(name: str) -> None:
    x = np.random.default_rng(3).standard_normal((70, 256)).astype(np.float32)
    together = there_and_back(name, x)
    for row in (0, 1, 63, 64, 69):
        assert np.array_equal(there_and_back(name, x[row : row + 1]), together[row : row + 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-30, 2), st.sampled_from(TYPES))
def test_no_row_gains_more_than_its_range(seed: int, exponent: float, name: str) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((1, 256)) * rng.choice([0, 1, 1, 50], (1, 256)) * 10.0**exponent).astype(np.float32)
    found = there_and_back(name, x)
    assert np.isfinite(found).all()
    # Values up to 20,000: minimums are halves too, and a half ends at 65,504.
    # A scale is a half, exact to 2**-25 where it is subnormal, and is multiplied by up to 127 * 32 (Q6_K's integer scale and quant).
    subnormal = 127 * 32 * 2.0**-25
    assert np.abs(found - x).max() <= 1.1 * (np.abs(x).max() * 2 / STEPS[name] + subnormal)


def test_float16_as_numpy_rounds() -> None:
    every = np.arange(0x7C00, dtype=np.uint16)
    values = every.view(np.float16).astype(np.float32)
    middles = (values[:-1] + values[1:]) / 2
    between = np.concatenate([values, middles, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(1e9))])
    for value in np.concatenate([between[::7], -between[::11], np.array([1e-30, 0, 65504, 65519.9], np.float32)]):
        expected = int(np.float32(value).astype(np.float16).view(np.uint16))
        assert half_bits(value) == expected or (expected & 0x7FFF == 0x7C00 and half_bits(value) & 0x7FFF == 0x7BFF), value
    for bits in (*range(0, 0x7C00, 13), *range(0x8000, 0xFC00, 17)):
        assert half_value(bits) == float(np.uint16(bits).view(np.float16))
    assert half_bits(np.float32(1e9)) == 0x7BFF, "the largest one, never infinity"
