"""safetensors files: what is read, and that no damaged or malicious one is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from localrun.convert.safetensors import Safetensors
from localrun.models.errors import ModelFileError
from tests.convert.checkpoints import write_safetensors

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.array([0.5, -2.0, 1e-3], np.float32)


def raw(header: Any, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (2, 2), begin: Any = 0, end: Any = 16) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape if isinstance(shape, str) else list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_rows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": A, "b": np.array([0.5, -2.0, 1.0], np.float32)}, kind)
    with Safetensors([path]) as file:
        assert file.tensors["a"].shape == (3, 4) and file.metadata == {"format": "pt"}
        assert np.array_equal(file.rows("a"), A) and file.rows("a").dtype == np.float32
        assert np.array_equal(file.rows("a", 1, 1), A[1:2])
        assert np.array_equal(file.rows("a", 0, 2, np.array([2, 0, 1])), A[[2, 0]])
        assert np.array_equal(file.rows("b"), [[0.5, -2.0, 1.0]])


def test_a_file_of_the_formats_own_library(tmp_path: Path) -> None:
    save_file({"x": A, "y": B.astype(np.float64), "z": np.array([1], np.int64)}, tmp_path / "a.safetensors")
    with Safetensors([tmp_path / "a.safetensors"]) as file:
        assert np.array_equal(file.rows("x"), A) and np.array_equal(file.rows("y")[0], B)
        with pytest.raises(ModelFileError, match="tensor z: is of type I64; weights in F32, F16, BF16 and F64 can be converted"):
            file.rows("z")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "has 0 bytes; this is no safetensors file"),
        (b"1234567", "has 7 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header: claims 1152921504606846976 bytes, and the file has 10"),
        (raw(b"{", b""), "header: is no JSON"),
        (raw(b"[" * 100_000, b""), "header: is no JSON"),
        (raw([1]), "header: is no JSON object"),
        (raw({"a": 5}), "tensor a: is not described by dtype, shape and data_offsets"),
        (raw({"a": entry() | {"more": 1}}), "tensor a: is not described"),
        (raw({"a": entry("F31")}), "tensor a: has the unknown type 'F31'"),
        (raw({"a": entry(shape=(2, -2))}), r"tensor a: has the shape \[2, -2\], which is none"),
        (raw({"a": entry(shape=(2, 2.0))}), "which is none"),
        (raw({"a": entry(shape=(True, 4))}), "which is none"),
        (raw({"a": entry(shape=[1] * 9)}), "which is none"),
        (raw({"a": entry(begin=16, end=0)}), r"tensor a: has the offsets \[16, 0\], which are none"),
        (raw({"a": entry(begin=-1)}), "which are none"),
        (raw({"a": entry(end=1 << 61)}), "tensor a: ends at byte .*, and the file has .*: it is incomplete"),
        (raw({"a": entry(shape=(2, 3))}), r"tensor a: has 16 bytes, and its shape \[2, 3\] of F32 needs 24"),
        (raw({"a": entry(shape=(1 << 31, 1 << 31))}), "tensor a: has 16 bytes"),
        (raw({"a": entry(), "b": entry(shape=(2,), begin=8)}), "tensor b: begins at byte .*: it overlaps the one before it"),
        (raw({"a": entry(shape=(2,), begin=8)}), "tensor a: begins at byte .*: it leaves a gap"),
        (raw({"a": entry(shape=(2,), end=8)}), "tensor data: ends at byte .*, and the file has"),
        (raw(json.dumps({"a": entry(), "b": entry()}).replace('"b"', '"a"').encode()), "header: has the name 'a' twice"),
        (raw({"__metadata__": {"a": 1}}, b""), "__metadata__: is no object of strings"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=line) as caught:
        Safetensors([path])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"a": A})
    with pytest.raises(ModelFileError, match=r"tensor a: is in one\.safetensors too"):
        Safetensors([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_never_goes_further_than_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any bytes of the header changed, or the file cut: it is refused, or every tensor still lies inside the file and can be read."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_safetensors(path, {"a": A, "b": B})
    content = bytearray(path.read_bytes())
    length = 8 + struct.unpack_from("<Q", content)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        file = Safetensors([path])
    except ModelFileError:
        return
    with file:
        for name in file.tensors:
            if file.is_float(name):
                file.rows(name)
