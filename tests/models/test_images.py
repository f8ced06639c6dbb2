"""Rows of images among a prompt's tokens, against Gemma 3 in NumPy."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.models.load import RecordedModel, load_model
from localrun.models.model import LoadOptions, Span
from tests.conformance.test_arch import path_of, reference_of
from tests.models import gemma_numpy
from tests.models.adapters import values

Floats = NDArray[np.float32]
SAME = 1e-3
"""Of the logits' standard deviation."""
WIDTH = 64
TABLES = [np.array([3, 9, 0, 7, 5], np.int32), np.array([1, 2, 4, 6, 8], np.int32)]


def load(name: str = "gemma3", variant: str = "f32", images: bool = True) -> RecordedModel:
    options = LoadOptions(n_threads=2, max_batch=96, kv_type="f32", cache_dir=os.environ["LOCALRUN_CACHE"], images=images)
    model = load_model(path_of(name, variant), options)
    model.allocate_kv(16)
    return model


@pytest.fixture(scope="module")
def gemma() -> Iterator[RecordedModel]:
    model = load()
    yield model
    model.close()


@pytest.fixture(scope="module")
def tokens() -> NDArray[np.int32]:
    return reference_of("gemma3", "f32").tokens.copy()


def picture(n: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(0, 8, (n, WIDTH)).astype(np.float32)


def run(model: RecordedModel, tokens: NDArray[np.int32], images: list[tuple[int, Floats]], cuts: list[int], table: int = 0) -> Floats:
    """Logits after each token, in pieces that end at `cuts`; an image that a cut falls into continues behind it."""
    got, start = [], 0
    for end in [*cuts, len(tokens)]:
        here = [(at, rows) for at, rows in images if at < end and at + len(rows) > start]
        inside = tuple((max(at, start) - start, rows[max(start - at, 0) : end - at]) for at, rows in here)
        span = Span(tokens[start:end], start, TABLES[table], np.arange(end - start, dtype=np.int32), images=inside)
        got.append(model.forward([span]).copy())
        start = end
    return np.concatenate(got)


def test_images_give_what_numpy_gives(gemma: RecordedModel, tokens: NDArray[np.int32]) -> None:
    """Images over the borders of tiles and blocks, tokens around them."""
    images = [(5, picture(14, 1)), (40, picture(4, 2))]
    got = run(gemma, tokens, images, [])
    with open_gguf(path_of("gemma3", "f32")) as gguf:
        w = {name: values(gguf, name).astype(np.float64) for name in gguf.tensors}
        keys = dict(gguf.metadata)
    want = gemma_numpy.logits(w, keys, tokens.tolist(), [(at, rows.astype(np.float64)) for at, rows in images])
    assert np.abs(got - want).max() <= SAME * want.std()
    one_by_one = [(at + i, rows[i : i + 1].astype(np.float64)) for at, rows in images for i in range(len(rows))]
    causal = gemma_numpy.logits(w, keys, tokens.tolist(), one_by_one)
    assert np.abs(got - causal).max() > 100 * SAME * want.std(), "an image's rows seeing each other makes no difference"


def test_cuts_and_neighbours_change_no_bit(gemma: RecordedModel, tokens: NDArray[np.int32]) -> None:
    images = [(5, picture(14, 1)), (40, picture(4, 2))]
    whole = run(gemma, tokens, images, [])
    assert np.array_equal(run(gemma, tokens, images, [3, 5, 19, 39, 44, 45]), whole)
    every = np.arange(len(tokens), dtype=np.int32)
    other = Span(tokens[::-1][:30].copy(), 0, TABLES[1], every[:30])
    both = gemma.forward([other, Span(tokens, 0, TABLES[0], every, images=tuple(images))]).copy()
    assert np.array_equal(both[30:], whole)
    assert np.array_equal(both[:30], gemma.forward([other]))


def test_what_is_left_of_an_image_is_computed_as_in_the_whole(gemma: RecordedModel, tokens: NDArray[np.int32]) -> None:
    """A prefix that ends inside an image was computed with all of it; the rest goes on from there."""
    images = [(5, picture(14, 1))]
    whole = run(gemma, tokens, images, [])
    rest = Span(tokens[17:], 17, TABLES[0], np.arange(len(tokens) - 17, dtype=np.int32), images=((0, images[0][1][12:]),))
    assert np.array_equal(gemma.forward([rest]), whole[17:])


def test_without_images_nothing_changes(gemma: RecordedModel, tokens: NDArray[np.int32]) -> None:
    plain = load(images=False)
    try:
        assert np.array_equal(run(gemma, tokens, [], []), run(plain, tokens, [], []))
        with pytest.raises(ValueError, match="image"):
            run(plain, tokens, [(3, picture(4, 1))], [])
    finally:
        plain.close()


def test_rows_that_do_not_fit_are_refused(gemma: RecordedModel, tokens: NDArray[np.int32]) -> None:
    for images in ([(46, picture(4, 1))], [(3, picture(4, 1)), (5, picture(4, 2))], [(3, picture(4, 1)[:, :32].copy())]):
        with pytest.raises(ValueError, match="image"):
            gemma.forward([Span(tokens, 0, TABLES[0], np.array([47], np.int32), images=tuple(images))])


def test_a_family_without_images_is_refused_by_name() -> None:
    with pytest.raises(ModelFileError, match="images are not supported in llama models"):
        load("llama")
