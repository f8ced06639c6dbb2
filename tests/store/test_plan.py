"""Plans: the arithmetic, the words, and the estimate beside what a load takes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.kernels_cpu import sizes
from localrun.models.gguf import open_gguf
from localrun.store import catalogue
from localrun.store.facts import Facts, facts_of
from localrun.store.plan import BASELINE_BYTES, in_words, kv_bytes, plan, shortfall
from tests.models.build import Builder, Tensor

GIB = 1 << 30


def known(index: int = 0) -> Facts:
    facts = catalogue.entries()[index].facts
    assert facts is not None
    return facts


def test_layouts_are_those_of_the_kernels() -> None:
    from localrun.kernels_cpu.formats import BY_NAME
    from localrun.kernels_cpu.octets import OCTETS

    for octets in OCTETS.values():
        packing = sizes.PACKINGS[BY_NAME[octets.name].id]
        assert (packing.kind, packing.block, packing.quants, packing.scales) == (octets.kind, octets.block, octets.quants, octets.scales)


@pytest.mark.parametrize("index", range(4))
def test_catalogue_and_header_say_the_same(index: int) -> None:
    entry = catalogue.entries()[index]
    facts = known(index)
    assert facts.file_bytes == entry.bytes and not facts.unsupported
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_header_of_the_starter_model(starter_model: Path) -> None:
    with open_gguf(starter_model) as gguf:
        assert facts_of(gguf) == known()


def test_estimate_is_within_a_tenth_of_what_loading_takes(starter_model: Path) -> None:
    command = [sys.executable, "-m", "tests.store.loading", str(starter_model), os.environ["LOCALRUN_CACHE"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    took, packed = (int(number) for number in done.stdout.split())
    planned = plan(known(), available=64 * GIB if packed else GIB, num_ctx=512)
    assert planned.packed == bool(packed)
    assert took == pytest.approx(planned.total - BASELINE_BYTES, rel=0.1)


def test_kv_per_token_by_hand() -> None:
    # 30 layers x 3 heads x (64 + 64) values x 2 bytes; q8_0: 34 bytes for 32 values, q4_0: 18
    facts = known()
    per_token = 30 * 3 * 128
    planned = plan(facts, available=64 * GIB)
    assert planned.kv_per_1000 == {
        "f16": per_token * 2 * 1000, "bf16": per_token * 2 * 1000, "f32": per_token * 4 * 1000,
        "q8_0": per_token * 34 // 32 * 1000, "q4_0": per_token * 18 // 32 * 1000,
    }  # fmt: skip
    assert kv_bytes(facts, "f16", 17) == per_token * 2 * 32, "whole blocks"


def test_users_and_context() -> None:
    facts = known()
    one, two = (plan(facts, available=64 * GIB, num_ctx=4096, users=n) for n in (1, 2))
    assert two.kv == 2 * one.kv and two.total - one.total == one.kv and one.fits
    assert plan(facts, available=64 * GIB).num_ctx == 8192 == plan(facts, available=64 * GIB, num_ctx=10**6).num_ctx
    for wrong in ({"kv_type": "f8"}, {"users": 0}, {"num_ctx": -1}):
        with pytest.raises(BadRequest):
            plan(facts, available=GIB, **wrong)  # type: ignore[arg-type]


def test_longest_context_that_fits() -> None:
    facts = known()
    least = plan(facts, available=0, num_ctx=16)
    fixed = least.total - least.kv
    roomy = plan(facts, available=fixed + kv_bytes(facts, "f16", 1600), users=2)
    assert roomy.max_ctx == 800 and not roomy.fits
    assert plan(facts, available=fixed + kv_bytes(facts, "f16", 1600), num_ctx=800, users=2).fits
    assert not plan(facts, available=fixed + kv_bytes(facts, "f16", 1600), num_ctx=816, users=2).fits
    assert least.max_ctx == 0


def test_weights_stay_in_the_file_where_memory_is_short() -> None:
    facts = known(3)
    assert plan(facts, available=64 * GIB).packed
    short = plan(facts, available=facts.packed_bytes + GIB)
    assert not short.packed and (short.weights, short.embedding) == (facts.tensor_bytes, 0)


def test_refusal_has_the_numbers() -> None:
    facts = known(3)
    assert shortfall(facts, 64 * GIB) == "" and shortfall(facts, 2 * GIB) == ""
    text = shortfall(facts, 500_000_000)
    assert text.startswith("model requires more system memory (1.")
    assert "than is available (500 MB): weights 1.1 GB, KV cache of 512 tokens" in text


def test_speed_is_memory_speed_over_bytes_read() -> None:
    facts = known()
    read = facts.read_bytes + kv_bytes(facts, "f16", 512)
    assert plan(facts, available=GIB, bandwidth=50e9).tokens_per_second == pytest.approx(50e9 / read)
    assert plan(facts, available=GIB).tokens_per_second == 0


def test_experts_that_a_token_does_not_use_are_not_read(tmp_path: Path) -> None:
    keys: list[tuple[str | bytes, str, Any]] = [
        ("general.architecture", "string", "qwen3moe"), ("qwen3moe.expert_count", "uint32", 8), ("qwen3moe.expert_used_count", "uint32", 2),
        ("qwen3moe.block_count", "uint32", 1), ("qwen3moe.embedding_length", "uint32", 32),
        ("qwen3moe.attention.head_count", "uint32", 2), ("qwen3moe.attention.head_count_kv", "array[int32]", [1]),
    ]  # fmt: skip
    experts = Tensor("blk.0.ffn_up_exps.weight", (32, 64, 8), 0, bytes(4 * 32 * 64 * 8))
    tensors = [experts, Tensor("x.weight", (32, 16), 0, bytes(4 * 32 * 16))]
    path = tmp_path / "moe.gguf"
    path.write_bytes(Builder(keys=keys, tensors=tensors).bytes())
    with open_gguf(path) as gguf:
        facts = facts_of(gguf)
    assert facts.packed_bytes == 4 * 32 * 64 * 8 + 4 * 32 * 16
    assert facts.read_bytes == facts.packed_bytes - 4 * 32 * 64 * 6
    assert facts.kv == ((1, 1, 16, 16),)


def test_file_of_another_architecture_is_planned_all_the_same() -> None:
    facts = dataclasses.replace(known(), unsupported="architecture 'x' is not supported", kv=())
    planned = plan(facts, available=64 * GIB)
    assert planned.kv == 0 and planned.to_json()["unsupported"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Q4_K_M", "4 bits, K-quant: blocks of 256 with two levels of scales, medium mix: the most sensitive layers in more bits"),
        ("Q8_0", "8 bits, blocks of 32 with a scale"),
        ("Q5_1", "5 bits, blocks of 32 with a scale and a minimum"),
        ("IQ2_XXS", "2 bits, importance quant: weights in groups, from a codebook, smallest mix"),
        ("TQ1_0", "ternary: every weight is -1, 0 or 1 times a scale (1.7 bits)"),
        ("BF16", "16-bit brain floats, not quantized"),
        ("what", ""),
    ],
)
def test_names_in_words(name: str, words: str) -> None:
    assert in_words(name) == words
