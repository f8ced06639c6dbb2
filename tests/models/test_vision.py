"""The vision encoder against NumPy."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.models.errors import ModelFileError
from localrun.models.model import LoadOptions
from localrun.models.vision import VisionEncoder, load_vision
from tests.models import vision_numpy

SAME = 1e-4
"""Of the values' standard deviation: float32 against float64."""


def loaded(tmp_path: Path, data: bytes, **options: Any) -> VisionEncoder:
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(data)
    return load_vision(path, 64, LoadOptions(**{"n_threads": 2, "cache_dir": os.environ["LOCALRUN_CACHE"], **options}))


def picture(size: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("sizes", "swapped"),
    [
        ({}, False),
        ({}, True),  # the feed-forward's matrices by the names that older files have
        ({"side": 9, "square": 3, "patch": 4}, False),  # 81 patches: neither whole tiles nor whole vectors
        ({"heads": 3, "width": 48, "side": 4, "square": 4}, False),
    ],
)
def test_the_encoder_gives_what_numpy_gives(half: bool, sizes: dict[str, int], swapped: bool, tmp_path: Path) -> None:
    data, values = vision_numpy.mmproj(**sizes, half=half, swapped=swapped)  # type: ignore[arg-type]
    encoder = loaded(tmp_path, data)
    try:
        pixels = picture(encoder.params.image_size)
        got = encoder.encode(pixels)
        other = encoder.encode(picture(encoder.params.image_size, 2))
        again = encoder.encode(pixels)
    finally:
        encoder.close()
        encoder.close()
    want = vision_numpy.encode(values, pixels, heads=sizes.get("heads", 4), square=sizes.get("square", 2), swapped=swapped)
    assert got is not None and other is not None and again is not None
    assert got.shape == want.shape == (encoder.params.n_tokens, 64)
    assert np.abs(got - want).max() <= SAME * want.std()
    assert np.array_equal(got, again) and not np.array_equal(got, other)


def test_threads_and_packing_change_no_bit(tmp_path: Path) -> None:
    data, _ = vision_numpy.mmproj()
    seen = []
    for options in ({"n_threads": 1}, {"n_threads": 3}, {"pack": False}):
        encoder = loaded(tmp_path, data, **options)
        try:
            seen.append(encoder.encode(picture(30)))
        finally:
            encoder.close()
    assert all(np.array_equal(seen[0], one) for one in seen[1:])  # type: ignore[arg-type]


def test_a_pass_can_be_left_between_layers(tmp_path: Path) -> None:
    data, _ = vision_numpy.mmproj()
    encoder = loaded(tmp_path, data)
    asked = itertools.count(1)
    try:
        whole = encoder.encode(picture(30))
        assert encoder.encode(picture(30, 2), cancelled=lambda: next(asked) == 2) is None
        assert np.array_equal(encoder.encode(picture(30)), whole)  # type: ignore[arg-type]
    finally:
        encoder.close()
    assert next(asked) == 3


@pytest.mark.parametrize(
    ("keys", "drop", "word"),
    [
        ({"general.architecture": ("string", "llama")}, "", "general.architecture"),
        ({"clip.projector_type": ("string", "llava")}, "", "projector_type: is \"llava\""),
        ({"clip.use_gelu": ("bool", False)}, "", "use_gelu"),
        ({"clip.vision.attention.head_count": ("uint32", 5)}, "", "5 heads"),
        ({"clip.vision.patch_size": ("uint32", 7)}, "", "not cut"),
        ({"clip.vision.image_std": ("array[float32]", [0.5, 0.0, 0.5])}, "", "image_std"),
        ({"clip.vision.image_mean": None}, "", "image_mean"),
        ({}, "v.blk.1.ln2.bias", "v.blk.1.ln2.bias: is missing"),
        ({"clip.vision.block_count": ("uint32", 1)}, "", "v.blk.1.attn_q.weight: is no part"),
    ],
)
def test_what_is_no_projector_as_supported_is_refused_by_name(keys: dict[str, Any], drop: str, word: str, tmp_path: Path) -> None:
    data, _ = vision_numpy.mmproj(keys=keys, drop=drop)
    with pytest.raises(ModelFileError) as refusal:
        loaded(tmp_path, data)
    assert word in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_projector_for_another_width_is_refused(tmp_path: Path) -> None:
    data, _ = vision_numpy.mmproj(n_embd=32)
    with pytest.raises(ModelFileError, match=r"mm\.input_projection\.weight: has the shape"):
        loaded(tmp_path, data)
