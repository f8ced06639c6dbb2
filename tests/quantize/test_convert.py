"""Whole files in another type: which tensor gets which, what is refused, and that nothing half is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.kernels_cpu.formats import BY_NAME, FORMATS
from localrun.kernels_cpu.reference import dequantize
from localrun.models.gguf import open_gguf
from localrun.quantize import mixes
from localrun.quantize.convert import quantize_file
from tests.models.build import Builder, Tensor

WIDTH, LAYERS = 256, 16


def model(tmp_path: Path, *, kind: str = "F16", tied: bool = False, width: int = WIDTH, bad: bool = False) -> Path:
    """A file with the tensors of a small llama."""
    rng = np.random.default_rng(0)
    keys: list[tuple[str | bytes, str, Any]] = [
        ("general.architecture", "string", "llama"), ("llama.block_count", "uint32", LAYERS), ("general.file_type", "uint32", 1),
        ("llama.attention.head_count", "uint32", 4), ("llama.attention.head_count_kv", "uint32", 4),
        ("tokenizer.ggml.tokens", "array[string]", ["a", b"\xff\xfe".decode("utf-8", "surrogateescape")]),
    ]  # fmt: skip
    tensors = []

    def add(name: str, *shape: int, plain: bool = False) -> None:
        values = rng.standard_normal(int(np.prod(shape))).astype(np.float32)
        if bad and name == "blk.3.ffn_up.weight":
            values[5] = np.nan
        kept = kind if not plain else "F32"
        data = {"F16": values.astype(np.float16).tobytes(), "F32": values.tobytes()}[kept]
        tensors.append(Tensor(name, shape, BY_NAME[kept].id, data))

    add("token_embd.weight", width, 32)
    if not tied:
        add("output.weight", width, 32)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", width, plain=True)
        for leaf in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
            add(f"blk.{i}.{leaf}.weight", width, 16)
    path = tmp_path / "source.gguf"
    path.write_bytes(Builder(keys=keys, tensors=tensors).bytes())
    return path


def types(path: Path) -> dict[str, str]:
    with open_gguf(path) as gguf:
        return {name: FORMATS[info.type].name for name, info in gguf.tensors.items()}


def test_medium_mix(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    said: list[tuple[int, int]] = []
    quantize_file(model(tmp_path), target, "q4_k_m", n_threads=2, told=lambda done, total: said.append((done, total)))
    found = types(target)
    assert (found["token_embd.weight"], found["output.weight"], found["blk.0.attn_norm.weight"]) == ("Q4_K", "Q6_K", "F32")
    more = [i for i in range(LAYERS) if found[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15] == [i for i in range(LAYERS) if found[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert found["blk.5.ffn_up.weight"] == "Q4_K"
    assert said[-1][0] == said[-1][1] == sum(np.prod(info.shape) for info in open_gguf(target).tensors.values())
    with open_gguf(target) as gguf, open_gguf(model(tmp_path)) as source:
        assert (gguf.metadata["general.file_type"], gguf.metadata["general.quantization_version"]) == (15, 2)
        assert gguf.metadata["tokenizer.ggml.tokens"] == source.metadata["tokenizer.ggml.tokens"]
        for name in ("blk.7.ffn_down.weight", "blk.5.ffn_up.weight"):
            info = gguf.tensors[name]
            values = dequantize(info.type, np.frombuffer(gguf.data(name), np.uint8).reshape(16, -1), WIDTH)
            wanted = np.frombuffer(source.data(name), np.float16).reshape(16, WIDTH)
            assert np.sqrt(np.mean((values - wanted) ** 2)) < 0.09
        assert bytes(gguf.data("blk.0.attn_norm.weight")) == bytes(source.data("blk.0.attn_norm.weight"))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("Q4_K_S", {"blk.1.ffn_down": "Q5_K", "blk.2.ffn_down": "Q4_K", "blk.3.attn_v": "Q5_K", "blk.4.attn_v": "Q4_K"}),
        ("Q5_K_M", {"blk.0.ffn_down": "Q6_K", "blk.2.ffn_down": "Q5_K", "blk.2.attn_q": "Q5_K"}),
        ("Q3_K_M", {"blk.0.ffn_down": "Q5_K", "blk.1.ffn_down": "Q4_K", "blk.1.attn_v": "Q5_K", "blk.2.attn_output": "Q4_K"}),
        ("Q3_K_L", {"blk.2.ffn_down": "Q5_K", "blk.2.attn_output": "Q5_K", "blk.2.attn_k": "Q3_K"}),
        ("Q2_K", {"blk.2.ffn_down": "Q3_K", "blk.2.attn_v": "Q3_K", "blk.2.attn_output": "Q3_K", "blk.2.attn_q": "Q2_K"}),
        ("Q8_0", {"output": "Q8_0", "token_embd": "Q8_0", "blk.2.attn_q": "Q8_0"}),
        ("Q4_0", {"output": "Q6_K", "token_embd": "Q4_0", "blk.2.ffn_down": "Q4_0"}),
        ("BF16", {"output": "BF16", "blk.2.ffn_down": "BF16"}),
    ],
)
def test_other_mixes(tmp_path: Path, target: str, expected: dict[str, str]) -> None:
    with open_gguf(model(tmp_path)) as gguf:
        shape = mixes.Shape.of("llama", gguf.metadata, gguf.tensors)
        for name, wanted in expected.items():
            info = gguf.tensors[f"{name}.weight"]
            assert mixes.type_of(info.name, info.shape, FORMATS[info.type], target, shape).name == wanted, name


def test_rows_without_whole_blocks_and_tied_output(tmp_path: Path) -> None:
    quantize_file(model(tmp_path, tied=True, width=96), tmp_path / "out.gguf", "Q4_K_M", n_threads=1)
    found = types(tmp_path / "out.gguf")
    assert (found["token_embd.weight"], found["blk.2.ffn_up.weight"]) == ("Q8_0", "Q5_0")
    quantize_file(model(tmp_path, width=40), tmp_path / "odd.gguf", "Q8_0", n_threads=1)
    assert types(tmp_path / "odd.gguf")["blk.2.ffn_up.weight"] == "F16"


def test_the_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    source = model(tmp_path, kind="F32")
    for n in (1, 3):
        quantize_file(source, tmp_path / f"{n}.gguf", "Q5_K_S", n_threads=n)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_a_quantized_source_needs_permission(tmp_path: Path) -> None:
    quantize_file(model(tmp_path), tmp_path / "8.gguf", "Q8_0", n_threads=1)
    with pytest.raises(ValueError, match=r"only supported for F16, BF16 and F32 models: tensor \S+ is Q8_0"):
        quantize_file(tmp_path / "8.gguf", tmp_path / "4.gguf", "Q4_0", n_threads=1)
    quantize_file(tmp_path / "8.gguf", tmp_path / "4.gguf", "Q4_0", n_threads=1, again=True)
    assert types(tmp_path / "4.gguf")["blk.2.ffn_up.weight"] == "Q4_0"


def test_damaged_weights_leave_nothing(tmp_path: Path) -> None:
    source = model(tmp_path, bad=True)
    with pytest.raises(ValueError, match=r"tensor blk\.3\.ffn_up\.weight holds values that are no finite numbers"):
        quantize_file(source, tmp_path / "out.gguf", "Q4_K_M", n_threads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_the_program_says_what_is_wrong_on_one_line(tmp_path: Path) -> None:
    source = model(tmp_path)
    for arguments, expected in (
        ([str(source), str(tmp_path / "out.gguf"), "Q9_Z"], "unsupported quantization type Q9_Z - supported types are F32, F16"),
        ([str(tmp_path / "none.gguf"), str(tmp_path / "out.gguf"), "Q8_0"], "cannot be opened"),
        ([str(source), str(source / "x" / "out.gguf"), "Q8_0"], "cannot write"),
    ):
        command = [sys.executable, "-m", "localrun.quantize", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 1 and expected in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]
