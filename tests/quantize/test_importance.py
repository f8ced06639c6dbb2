"""Importance matrices: both forms of file, what is wrong with one is said, and the errors that count fall."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import BY_NAME, FORMATS
from localrun.kernels_cpu.reference import dequantize
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.quantize.convert import quantize_file
from localrun.quantize.importance import LEAST, Importance, read_importance
from localrun.quantize.output import QUANTIZERS
from tests.models.build import Builder, Tensor

Floats = NDArray[np.float32]
TYPES = sorted(set(QUANTIZERS) - {"Q8_0"})
COLUMNS = 256


def dat(entries: dict[str, Floats], passes: int = 3) -> bytes:
    out = struct.pack("<i", len(entries))
    for name, values in entries.items():
        raw = name.encode()
        out += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", passes, values.size) + (values * passes).astype("<f4").tobytes()
    return out + struct.pack("<ii", passes, 4) + b"text"


def gguf(entries: dict[str, Floats], counts: float = 5.0) -> bytes:
    """entries: (experts, columns) each; the first expert is seen once more than the others."""
    tensors = []
    for name, values in entries.items():
        each = counts + (np.arange(len(values)) == 0)
        tensors.append(Tensor(f"{name}.in_sum2", values.shape[::-1], 0, (values * each[:, None]).astype("<f4").tobytes()))
        tensors.append(Tensor(f"{name}.counts", (1, len(values)), 0, each.astype("<f4").tobytes()))
    keys: list[Any] = [("general.type", "string", "imatrix"), ("imatrix.chunk_count", "uint32", 5)]
    return Builder(keys=keys, tensors=tensors).bytes()


def uneven(rng: np.random.Generator, rows: int = 1, columns: int = COLUMNS) -> Floats:
    """E[x^2] as transformers have it: a few columns far above the others."""
    return np.exp(rng.standard_normal((rows, columns)) * 1.5).astype(np.float32)


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    values = {"a.weight": uneven(np.random.default_rng(0)), "b.weight": uneven(np.random.default_rng(1))}
    (tmp_path / "m.dat").write_bytes(dat(values))
    (tmp_path / "m.gguf").write_bytes(gguf(values))
    for path in (tmp_path / "m.dat", tmp_path / "m.gguf"):
        found = read_importance(path)
        assert found.name == path.name and list(found.columns) == ["a.weight", "b.weight"]
        for name, weights in found.columns.items():
            want = np.maximum(values[name] / values[name].mean(), LEAST)
            assert weights.dtype == np.float32 and np.allclose(weights, want, rtol=1e-5)


def test_experts(tmp_path: Path) -> None:
    """The newer form has a row for each expert, the older one all in a row; an expert that was never chosen counts evenly."""
    values = uneven(np.random.default_rng(0), 3, 8)
    values[1] = 0
    shapes = {"e.weight": (8, 5, 3)}
    (tmp_path / "m.dat").write_bytes(dat({"e.weight": values}))
    (tmp_path / "m.gguf").write_bytes(gguf({"e.weight": values}))
    new = read_importance(tmp_path / "m.gguf").fitted(shapes)
    assert np.allclose(new.columns["e.weight"][1], 1) and np.allclose(new.columns["e.weight"][2], values[2] / values[2].mean(), atol=LEAST)
    first = new.of("e.weight", 0)
    assert first is not None and np.allclose(first, values[0] / values[0].mean(), atol=LEAST) and new.of("other", 0) is None
    old = read_importance(tmp_path / "m.dat").fitted(shapes)
    assert np.allclose(old.columns["e.weight"][[0, 2]], new.columns["e.weight"][[0, 2]], atol=3 * LEAST)


@pytest.mark.parametrize(
    ("shapes", "line"),
    [
        ({}, "m.dat weighs a.weight, which the model does not have: it was made for another one"),
        ({"a.weight": (128, 4)}, r"m.dat has 256 values for a.weight, whose shape is \[128, 4\]: it was made for another model"),
        ({"a.weight": (256,)}, "it was made for another model"),
        ({"a.weight": (256, 4, 2)}, "it was made for another model"),
    ],
)
def test_one_of_another_model(tmp_path: Path, shapes: dict[str, tuple[int, ...]], line: str) -> None:
    (tmp_path / "m.dat").write_bytes(dat({"a.weight": np.ones((1, 256), np.float32)}))
    with pytest.raises(ValueError, match=line):
        read_importance(tmp_path / "m.dat").fitted(shapes)


ONE = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "entries: the file ends inside it"),
        (b"\xff" * 100, "entries: is -1; this is no importance matrix"),
        (struct.pack("<i", 5), "length of a name: the file ends inside it"),
        (dat({"a": ONE})[:20], "a: claims 4 values, and 3 bytes are left"),
        (struct.pack("<ii", 1, 2**31 - 1), "length of a name: is 2147483647; this is no importance matrix"),
        (struct.pack("<ii", 1, 1) + b"a" + struct.pack("<iii", 1, 4, 0), "a: claims 4 values, and 4 bytes are left"),
        (struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 0), "a: has no values or is there twice"),
        (dat({"a": -ONE}), "a: has an importance that is negative or no finite number"),
        (dat({"a": ONE * np.nan}), "negative or no finite number"),
        (dat({}), "holds no importance of any matrix"),
        (dat({"a": ONE * 0}), "holds no importance of any matrix"),
        (Builder(keys=[("general.type", "string", "model")]).bytes(), 'general.type: is not "imatrix"'),
        (Builder(keys=[("general.type", "string", "imatrix")], tensors=[Tensor("a.in_sum2", (4, 1), 0, bytes(16))]).bytes(),
         "tensor a.counts: is missing or does not have 1 values"),
        (gguf({"a": -ONE}), "negative or no finite number"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(ModelFileError, match=line) as caught:
        read_importance(tmp_path / "m.bin")
    assert "\n" not in str(caught.value)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_never_goes_further_than_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.dat"
    content = bytearray(dat({"a": ONE, "bb": ONE}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        found = read_importance(path)
    except ModelFileError:
        return
    assert all(np.isfinite(one).all() and (one > 0).all() for one in found.columns.values())


# ---- errors ---------------------------------------------------------------------------------------------------------------------


def weighted_error(name: str, x: Floats, weights: Floats, *more: Floats) -> float:
    form = BY_NAME[name]
    out = np.zeros(x.size // form.block * form.block_bytes, np.uint8)
    QUANTIZERS[name](x.reshape(-1), out, *more)
    found = dequantize(form.id, out.reshape(len(x), -1), x.shape[1])
    return float((weights * (found.astype(np.float64) - x) ** 2).sum())


@pytest.mark.parametrize("name", TYPES)
def test_the_errors_that_count_fall(name: str) -> None:
    """Over rows of two and more blocks, each with its own weights."""
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((32, 512)) * 0.02).astype(np.float32)
    weights = uneven(rng, 1, 512)[0]
    weights /= weights.mean()
    before, after = weighted_error(name, x, weights), weighted_error(name, x, weights, weights)
    assert after < before * (0.93 if name != "Q6_K" else 0.99)


@pytest.mark.parametrize("name", TYPES)
def test_even_weights_change_no_bit(name: str) -> None:
    x = np.random.default_rng(5).standard_normal((8, 512)).astype(np.float32)
    form = BY_NAME[name]
    plain, even = (np.zeros(x.size // form.block * form.block_bytes, np.uint8) for _ in range(2))
    QUANTIZERS[name](x.reshape(-1), plain)
    QUANTIZERS[name](x.reshape(-1), even, np.ones(512, np.float32))
    assert np.array_equal(plain, even)


def source(tmp_path: Path) -> tuple[Path, dict[str, Floats]]:
    rng = np.random.default_rng(6)
    values = {"blk.0.ffn_up.weight": rng.standard_normal((40, COLUMNS)), "blk.0.ffn_gate_exps.weight": rng.standard_normal((3, 8, COLUMNS))}
    weights = {name: (one * 0.05).astype(np.float32) for name, one in values.items()}
    tensors = [Tensor(name, one.shape[::-1], 0, one.tobytes()) for name, one in weights.items()]
    path = tmp_path / "source.gguf"
    path.write_bytes(Builder(keys=[("general.architecture", "string", "llama")], tensors=tensors).bytes())
    return path, weights


def test_a_whole_file(tmp_path: Path) -> None:
    """Each expert's matrix is weighed by its own row."""
    path, weights = source(tmp_path)
    seen = {name: uneven(np.random.default_rng(7), 3 if "exps" in name else 1) for name in weights}
    errors: dict[bool, list[float]] = {}
    for used in (False, True):
        target = tmp_path / "out.gguf"
        quantize_file(path, target, "q3_K_S", n_threads=2, importance=Importance("m", seen) if used else None)
        errors[used] = []
        with open_gguf(target) as made:
            assert ("quantize.imatrix.file" in made.metadata) is used
            for name, info in made.tensors.items():
                data = np.frombuffer(bytes(made.data(name)), np.uint8)
                found = dequantize(info.type, data.reshape(-1, FORMATS[info.type].row_bytes(COLUMNS)), COLUMNS)
                for matrix, (got, want) in enumerate(zip(found.reshape(len(seen[name]), -1, COLUMNS), weights[name].reshape(
                        len(seen[name]), -1, COLUMNS))):  # fmt: skip
                    errors[used].append(float((seen[name][matrix] * (got.astype(np.float64) - want) ** 2).sum()))
    assert len(errors[True]) == 4 and all(after < 0.95 * before for after, before in zip(errors[True], errors[False]))


def test_the_program(tmp_path: Path) -> None:
    path, weights = source(tmp_path)
    (tmp_path / "m.dat").write_bytes(dat({"blk.0.ffn_up.weight": uneven(np.random.default_rng(8))}))
    command = [sys.executable, "-m", "localrun.quantize", str(path), str(tmp_path / "out.gguf"), "q4_0", "--json", "--imatrix"]
    done = subprocess.run([*command, str(tmp_path / "m.dat")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["done"] == sum(one.size for one in weights.values())
    (tmp_path / "m.dat").write_bytes(dat({"blk.9.ffn_up.weight": ONE}))
    done = subprocess.run([*command, str(tmp_path / "m.dat")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == (
        "m.dat weighs blk.9.ffn_up.weight, which the model does not have: it was made for another one\n"
    )
