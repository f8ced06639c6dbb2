"""What is said of a file, and that it can always be written as JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf
from localrun.models.show import capabilities, describe, model_info, quantization, size_label
from tests.models.build import Builder, Tensor

Key = tuple[str | bytes, str, Any]

QWEN: list[Key] = [
    ("general.architecture", "string", "qwen2"),
    ("general.name", "string", "Tiny"),
    ("general.file_type", "uint32", 15),
    ("qwen2.context_length", "uint32", 4096),
    ("qwen2.embedding_length", "uint32", 256),
    ("qwen2.block_count", "uint32", 2),
    ("qwen2.attention.head_count", "uint32", 4),
    ("qwen2.attention.head_count_kv", "uint32", 2),
    ("tokenizer.ggml.tokens", "array[string]", ["a", "b", "c", "d", "e", b"\xff"]),
    ("tokenizer.ggml.short", "array[int32]", [1, 2]),
    ("tokenizer.chat_template", "string", "{% if tools %}{{ tools }}{% endif %}"),
]
TENSORS = [Tensor("w", (256, 2), 12, bytes(288)), Tensor("v", (256, 1), 12, bytes(144)), Tensor("norm", (256,), 0, bytes(1024))]


def opened(folder: Path, keys: list[Key], tensors: list[Tensor] | None = None) -> GGUFFile:
    path = folder / "m.gguf"
    path.write_bytes(Builder(keys, tensors or []).bytes())
    return open_gguf(path)


def test_the_facts(tmp_path: Path) -> None:
    gguf = opened(tmp_path, QWEN, TENSORS)
    facts = describe(gguf)
    assert facts.pop("file_size") == (tmp_path / "m.gguf").stat().st_size
    assert facts.pop("model_info") == {
        "general.parameter_count": 1024,
        "general.architecture": "qwen2",
        "general.file_type": 15,
        "qwen2.context_length": 4096,
        "qwen2.embedding_length": 256,
        "qwen2.block_count": 2,
        "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2,
        "tokenizer.ggml.tokens": [],
        "tokenizer.ggml.short": [1, 2],
    }
    assert facts == {
        "architecture": "qwen2",
        "name": "Tiny",
        "parameter_count": 1024,
        "parameter_size": "1K",
        "quantization": "Q4_K_M",
        "context_length": 4096,
        "embedding_length": 256,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "vocabulary": 6,
        "types": [
            {"type": "F32", "tensors": 1, "parameters": 256, "bytes": 1024},
            {"type": "Q4_K", "tensors": 2, "parameters": 768, "bytes": 432},
        ],
        "capabilities": ["completion", "tools"],
    }


def test_verbose_holds_everything_and_is_json(tmp_path: Path) -> None:
    keys = [*QWEN, ("x.nan", "float32", math.nan), ("x.all", "array[float32]", [1.0, math.inf] * 4)]
    facts = describe(opened(tmp_path, keys, TENSORS), verbose=True)
    assert facts["model_info"]["tokenizer.ggml.tokens"] == ["a", "b", "c", "d", "e", "\ufffd"]
    assert facts["model_info"]["x.nan"] is None
    assert facts["model_info"]["x.all"] == [1.0, None] * 4
    assert facts["tensors"][0] == {"name": "w", "type": "Q4_K", "shape": [256, 2]}
    json.dumps(facts, allow_nan=False, ensure_ascii=False).encode("utf-8")


def test_a_file_that_says_little(tmp_path: Path) -> None:
    facts = describe(opened(tmp_path, [("general.architecture", "string", "x")]))
    assert (facts["quantization"], facts["layers"], facts["vocabulary"], facts["types"]) == ("unknown", None, None, [])
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        describe(opened(tmp_path, []))


@pytest.mark.parametrize(("file_type", "name"), [(0, "F32"), (7 | 1024, "Q8_0"), (99, "F32"), (38, "MXFP4_MOE")])
def test_quantization(tmp_path: Path, file_type: int, name: str) -> None:
    assert quantization(opened(tmp_path, [("general.file_type", "uint32", file_type)], TENSORS)) == name


@pytest.mark.parametrize(
    ("count", "label"),
    [
        (0, "0"), (999, "999"), (1000, "1K"), (134_515_008, "134.52M"), (137_000_000, "137M"), (494_032_768, "494.03M"),
        (1_543_714_304, "1.5B"), (7_000_000_000, "7B"), (70_553_706_496, "70.6B"),
    ],
)  # fmt: skip
def test_size_labels(count: int, label: str) -> None:
    assert size_label(count) == label


@pytest.mark.parametrize(
    ("metadata", "template", "expected"),
    [
        ({}, None, ["completion"]),
        ({"bert.pooling_type": 1}, None, ["embedding"]),
        ({"general.architecture": "bert"}, None, ["embedding"]),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 0}, None, ["completion"]),
        ({"general.architecture": "qwen3", "qwen3.pooling_type": 4}, None, ["rerank"]),
        ({"tokenizer.chat_template": "{{ tools }}"}, None, ["completion", "tools"]),
        ({"tokenizer.chat_template": "{{ tools }}"}, "plain", ["completion"]),
        ({}, "{% if enable_thinking %}<think>{% endif %}", ["completion", "thinking"]),
        ({f"tokenizer.ggml.fim_{part}_token_id": 1 for part in ("pre", "suf", "mid")}, None, ["completion", "insert"]),
        ({"tokenizer.ggml.tokens": ["x", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]}, None, ["completion", "insert"]),
        ({"tokenizer.ggml.tokens": ["<|fim_prefix|>", "<fim_suffix>", "<|fim_middle|>"]}, None, ["completion"]),
    ],
)
def test_capabilities(metadata: dict[str, Any], template: str | None, expected: list[str]) -> None:
    assert capabilities(metadata, template) == expected


def test_every_reference_file_can_be_described(shared: Path) -> None:
    for path in sorted((shared / "arch").glob("*/*.gguf")):
        with open_gguf(path) as gguf:
            facts = describe(gguf, verbose=True)
            assert facts["architecture"] == gguf.architecture
            assert sum(row["tensors"] for row in facts["types"]) == len(gguf.tensors) == len(facts["tensors"])
            assert len(model_info(gguf)) <= len(gguf.metadata) + 1
            json.dumps(facts, allow_nan=False, ensure_ascii=False).encode("utf-8")


def test_reading_headers_loads_no_numerics(repository: Path) -> None:
    modules = ", ".join(f"localrun.models.{name}" for name in ("gguf", "params", "show", "validate"))
    program = f"import sys, {modules}; print([m for m in ('numpy', 'numba') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, timeout=600, check=True)
    assert result.stdout.strip() == "[]"
