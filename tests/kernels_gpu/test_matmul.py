"""Matmuls of the card's own source, emulated, against the NumPy contract that the CPU's kernels keep: to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localrun.kernels_cpu import reference
from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_gpu.layout import CARD_TYPES
from localrun.kernels_gpu.source import WARP_ROWS_THREADS, Kernel
from tests.kernels_cpu.data import random_rows
from tests.kernels_gpu.running import Card, matmul, needs_compiler

pytestmark = needs_compiler
TYPES = sorted(PACKINGS)
IDS = [FORMATS[number].name for number in TYPES]


def shape_of(type_id: int) -> tuple[int, int]:
    """(rows, values): odd, and more than one turn of a warp."""
    return {"256": (19, 9 * 256), "32": (19, 35 * 32), "f": (35, 131)}[PACKINGS[type_id].kind]


def width_of(type_id: int) -> int:
    block = FORMATS[type_id].block
    return -(-shape_of(type_id)[1] // block) * block


@pytest.mark.parametrize("type_id", TYPES, ids=IDS)
@pytest.mark.parametrize(("bucket", "tokens"), [(1, 1), (2, 2), (4, 3), (8, 8), (8, 5), (0, 9), (0, 33)])
def test_product_is_the_contract_to_the_bit(type_id: int, bucket: int, tokens: int) -> None:
    rng = np.random.default_rng(type_id * 100 + tokens)
    rows = random_rows(rng, type_id, shape_of(type_id)[0], width_of(type_id))
    x = rng.normal(0, 1, (tokens, width_of(type_id))).astype(np.float32)
    x[0, :256] = 0  # a block of nothing
    got = matmul(Card(), type_id, rows, x, bucket)
    assert np.array_equal(got, reference.matmul(type_id, rows, x))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_0", "Q5_1", "F16"])
@pytest.mark.parametrize(("bucket", "tokens"), [(2, 2), (0, 9)])
def test_bias_and_sum(name: str, bucket: int, tokens: int) -> None:
    type_id = next(number for number in TYPES if FORMATS[number].name == name)
    rng = np.random.default_rng(7)
    n = 256
    rows = random_rows(rng, type_id, 70, n)
    x, before = rng.normal(0, 1, (tokens, n)).astype(np.float32), rng.normal(0, 1, (tokens, 70)).astype(np.float32)
    bias = rng.normal(0, 1, 70).astype(np.float32)
    plain = reference.matmul(type_id, rows, x)
    assert np.array_equal(matmul(Card(), type_id, rows, x, bucket, bias=bias), plain + bias)
    assert np.array_equal(matmul(Card(), type_id, rows, x, bucket, bias=bias, add_to=before), (plain + bias) + before)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "NVFP4", "BF16"])
def test_order_of_threads_changes_nothing(name: str) -> None:
    type_id = next(number for number in TYPES if FORMATS[number].name == name)
    rng = np.random.default_rng(3)
    rows, x = random_rows(rng, type_id, 20, 512), rng.normal(0, 1, (4, 512)).astype(np.float32)
    got = [matmul(Card(seed), type_id, rows, x, bucket) for seed in (1, 2, 3) for bucket in (4, 0)]
    assert all(np.array_equal(other, got[0]) for other in got)


@pytest.mark.parametrize("name", sorted(name for name, card_type in CARD_TYPES.items() if not card_type.is_float))
def test_layout_holds_the_values_of_the_conformance_data(name: str, shared: Path) -> None:
    """Every value of real and of random blocks, as the reference's own dequantization gives it."""
    type_id = next(number for number in TYPES if FORMATS[number].name == name)
    with np.load(shared / "dequant" / f"{name.lower().removesuffix('k') + 'K' if name.endswith('_K') else name.lower()}.npz") as data:
        for packed, values in (("packed", "values"), ("rand_packed", "rand_values")):
            expected = data[values]
            card = Card()
            card_type = CARD_TYPES[name]
            out = card.put(np.zeros(expected.size, np.float32))
            blocks = expected.size // card_type.block
            args = [*card.planes(type_id, data[packed]), blocks, out]
            card.call(Kernel("values", (card_type.struct,), WARP_ROWS_THREADS), (blocks, 1, 1), args, {})
            assert np.array_equal(card.get(out, expected), expected)
