"""Adapters beside weights that stay as they are, against models whose weights have the adapters added."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.models.errors import ModelFileError
from localrun.models.load import RecordedModel, load_model
from localrun.models.model import MAX_ADAPTERS, LoadOptions, Span
from tests.conformance.test_arch import load, noise, path_of, reference_of
from tests.models.adapters import adapter_bytes, merged
from tests.models.build import Builder, Tensor

Floats = NDArray[np.float32]

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LLAMA = [f"blk.{i}.{name}.weight" for i in range(2) for name in MATRICES]
EVERYTHING = [*LLAMA, "token_embd.weight", "output.weight"]
SAME = 1e-4
"""Of the logits' standard deviation: W x + B (A x) and (W + B A) x differ in rounding only."""
TABLES = [np.array([3, 9, 0, 7, 5], np.int32), np.array([1, 2, 4, 6, 8], np.int32), np.array([10, 11, 12, 13, 14], np.int32)]


def span(tokens: NDArray[np.int32], adapter: int = 0, scale: float = 1.0, table: int = 0, start: int = 0) -> Span:
    return Span(tokens, start, TABLES[table], np.arange(len(tokens), dtype=np.int32), adapter=adapter, adapter_scale=scale)


def answer(model: RecordedModel, *spans: Span) -> Floats:
    return model.forward(list(spans)).copy()


def bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def add(model: RecordedModel, tmp_path: Path, *files: bytes) -> int:
    paths = []
    for i, data in enumerate(files):
        paths.append(tmp_path / f"adapter{i}.gguf")
        paths[-1].write_bytes(data)
    return model.add_adapter(model.read_adapter(paths))


@pytest.fixture
def llama() -> Iterator[RecordedModel]:
    model = load("llama", "f32")
    assert isinstance(model, RecordedModel)
    yield model
    model.close()


def loaded(path: Path) -> RecordedModel:
    options = LoadOptions(n_threads=2, max_batch=64, n_ctx=256, kv_type="f32", cache_dir=os.environ["LOCALRUN_CACHE"])
    model = load_model(path, options)
    model.allocate_kv(16)
    return model


def merged_answer(name: str, variant: str, tmp_path: Path, tokens: NDArray[np.int32], *adapters: tuple[bytes, float]) -> Floats:
    model = loaded(merged(path_of(name, variant), tmp_path / "merged.gguf", adapters))
    try:
        return answer(model, span(tokens))
    finally:
        model.close()


CASES = {
    "llama": EVERYTHING,
    "llama-tied": ["token_embd.weight", "blk.0.attn_q.weight"],
    "phi3": ["blk.0.attn_qkv.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"],
    "gemma2": ["blk.0.attn_output.weight", "blk.1.ffn_down.weight", "token_embd.weight"],
    "gpt2": ["blk.0.attn_qkv.weight", "blk.1.ffn_up.weight"],
    "falcon": ["blk.0.attn_qkv.weight", "blk.1.ffn_down.weight"],
    "command-r": ["blk.0.attn_k.weight", "blk.1.ffn_gate.weight"],
    "qwen3moe": ["blk.0.attn_q.weight", "blk.1.attn_output.weight"],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_an_adapter_does_what_adding_it_to_the_weights_does(name: str, kind: type, tmp_path: Path) -> None:
    tokens = reference_of(name, "f32").tokens
    data = adapter_bytes(path_of(name, "f32"), CASES[name], rank=5, kind=kind)
    model = load(name, "f32")
    assert isinstance(model, RecordedModel)
    try:
        before = answer(model, span(tokens))
        number = add(model, tmp_path, data)
        got = answer(model, span(tokens, number))
        assert np.array_equal(bits(answer(model, span(tokens))), bits(before)), "a row without adapter has changed"
    finally:
        model.close()
    want = merged_answer(name, "f32", tmp_path, tokens, (data, 1.0))
    assert np.abs(got - want).max() <= SAME * want.std()
    assert np.abs(got - before).max() > 100 * SAME * want.std(), "the adapter is too small to show"


def test_beside_quantized_weights_it_is_as_near_as_the_weights_are(tmp_path: Path) -> None:
    tokens = reference_of("llama", "q8_0").tokens
    data = adapter_bytes(path_of("llama", "q8_0"), EVERYTHING)
    model = load("llama", "q8_0")
    assert isinstance(model, RecordedModel)
    try:
        before = answer(model, span(tokens))
        got = answer(model, span(tokens, add(model, tmp_path, data)))
    finally:
        model.close()
    rounding = noise(before, merged_answer("llama", "q8_0", tmp_path, tokens))
    assert noise(got, merged_answer("llama", "q8_0", tmp_path, tokens, (data, 1.0))) < 2 * rounding


def test_scales_and_several_files_add_up(llama: RecordedModel, tmp_path: Path) -> None:
    base, tokens = path_of("llama", "f32"), reference_of("llama", "f32").tokens
    first = adapter_bytes(base, EVERYTHING[:6], rank=3, alpha=None, seed=1)
    second = adapter_bytes(base, EVERYTHING[4:], rank=17, alpha=34.0, seed=2, kind=np.float16)
    got = answer(llama, span(tokens, add(llama, tmp_path, first, second), scale=-0.5))
    want = merged_answer("llama", "f32", tmp_path, tokens, (first, -0.5), (second, -0.5))
    assert np.abs(got - want).max() <= SAME * want.std()


def test_neighbours_with_other_adapters_change_no_bit(llama: RecordedModel, tmp_path: Path) -> None:
    base = path_of("llama", "f32")
    kinds = (np.float32, np.float16, np.float32)
    files = [adapter_bytes(base, EVERYTHING[i::2], seed=i, rank=3 + i, kind=kind) for i, kind in enumerate(kinds)]
    numbers = [add(llama, tmp_path, data) for data in files]
    tokens = reference_of("llama", "f32").tokens[:20]
    other = tokens[::-1].copy()
    prompts = [tokens, other, np.roll(tokens, 5)]
    alone = [answer(llama, span(prompts[i], numbers[i])) for i in range(3)]
    plain = answer(llama, span(tokens))
    together = answer(llama, *(span(prompts[i], numbers[i], table=i) for i in range(3)))
    assert np.array_equal(bits(together), bits(np.concatenate(alone)))
    mixed = answer(llama, span(prompts[0], numbers[0], table=0), span(tokens, table=1), span(prompts[2][:7], numbers[2], table=2))
    assert np.array_equal(bits(mixed), bits(np.concatenate([alone[0], plain, alone[2][:7]])))
    step_by_step = [answer(llama, span(tokens[i : i + 1], numbers[0], start=i)) for i in range(len(tokens))]
    assert np.array_equal(bits(np.concatenate(step_by_step)), bits(alone[0]))


def test_what_comes_and_goes_between_two_passes_of_one_size(llama: RecordedModel, tmp_path: Path) -> None:
    base, tokens = path_of("llama", "f32"), reference_of("llama", "f32").tokens[:10]
    files = [adapter_bytes(base, [name], seed=1) for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight")]
    plain = answer(llama, span(tokens))
    first = add(llama, tmp_path, files[0])
    one = answer(llama, span(tokens, first))
    other = answer(llama, span(tokens, add(llama, tmp_path, files[1])))
    llama.remove_adapter(first)
    again = answer(llama, span(tokens, add(llama, tmp_path, files[0])))
    assert np.array_equal(bits(again), bits(one))
    for got, data in ((one, files[0]), (other, files[1])):
        want = merged_answer("llama", "f32", tmp_path, tokens, (data, 1.0))
        assert np.abs(got - want).max() <= SAME * want.std() < np.abs(got - plain).max()


def test_only_the_last_rows_logits_are_asked_for(llama: RecordedModel, tmp_path: Path) -> None:
    """The output matrix works on rows of its own numbering."""
    number = add(llama, tmp_path, adapter_bytes(path_of("llama", "f32"), ["output.weight"]))
    tokens = reference_of("llama", "f32").tokens[:20]
    whole = answer(llama, span(tokens, number))
    last = np.array([19], np.int32)
    got = answer(llama, Span(tokens[::-1].copy(), 0, TABLES[1], last[:0]), Span(tokens, 0, TABLES[0], last, adapter=number))
    assert np.array_equal(bits(got), bits(whole[19:]))


def test_removing_gives_the_place_back_and_no_number_twice(llama: RecordedModel, tmp_path: Path) -> None:
    tokens = reference_of("llama", "f32").tokens[:10]
    data = adapter_bytes(path_of("llama", "f32"), LLAMA[:2])
    plain = answer(llama, span(tokens))
    first = add(llama, tmp_path, data)
    adapted = answer(llama, span(tokens, first))
    llama.remove_adapter(first)
    with pytest.raises(ValueError, match=f"no adapter {first}"):
        answer(llama, span(tokens, first))
    numbers = [add(llama, tmp_path, data) for _ in range(MAX_ADAPTERS)]
    assert len({first, *numbers}) == MAX_ADAPTERS + 1
    with pytest.raises(ValueError, match=f"{MAX_ADAPTERS} adapters"):
        add(llama, tmp_path, data)
    assert np.array_equal(bits(answer(llama, span(tokens, numbers[-1]))), bits(adapted))
    for number in numbers:
        llama.remove_adapter(number)
    llama.remove_adapter(12345)
    assert np.array_equal(bits(answer(llama, span(tokens))), bits(plain))
    assert llama._adapters is not None and not llama._adapters._kept and not llama._adapters._adapted


def wrong(base: Path, change: str) -> bytes:
    """An adapter that is wrong in one place."""
    keys = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    tensors = {"blk.0.attn_q.weight.lora_a": (64, 4), "blk.0.attn_q.weight.lora_b": (4, 64)}
    match change:
        case "architecture":
            keys["general.architecture"] = "gemma"
        case "general.type":
            keys["general.type"] = "model"
        case "adapter.type":
            del keys["adapter.type"]
        case "lora_b: is missing":
            del tensors["blk.0.attn_q.weight.lora_b"]
        case "no half":
            tensors["blk.0.attn_norm.weight"] = (64, 1)
        case "no tensor blk.7":
            tensors = {name.replace("blk.0", "blk.7"): shape for name, shape in tensors.items()}
        case "has the shape":
            tensors["blk.0.attn_q.weight.lora_a"] = (32, 4)
        case "must be":
            tensors["blk.0.attn_q.weight.lora_b"] = (5, 64)
        case "without pairs":
            tensors = {}
    data = [Tensor(name, shape, 0, bytes(4 * shape[0] * shape[1])) for name, shape in tensors.items()]
    return Builder(keys=[(key, "string", value) for key, value in keys.items()], tensors=data).bytes()


WRONG = [
    "architecture", "general.type", "adapter.type", "lora_b: is missing", "no half", "no tensor blk.7", "has the shape", "must be",
    "without pairs",
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_what_is_no_adapter_for_this_model_is_refused_by_name(change: str, llama: RecordedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=change) as refusal:
        add(llama, tmp_path, wrong(path_of("llama", "f32"), change))
    assert "\n" not in str(refusal.value)
    assert llama._adapters is None


def test_experts_take_no_adapter(tmp_path: Path) -> None:
    model = load("qwen3moe", "f32")
    assert isinstance(model, RecordedModel)
    name = "blk.0.ffn_up_exps.weight"
    shapes = {f"{name}.lora_a": (64, 4), f"{name}.lora_b": (4, 64)}
    data = Builder(
        keys=[("general.architecture", "string", "qwen3moe"), ("general.type", "string", "adapter"), ("adapter.type", "string", "lora")],
        tensors=[Tensor(half, shape, 0, bytes(1024)) for half, shape in shapes.items()],
    )
    try:
        with pytest.raises(ModelFileError, match=r"ffn_up_exps.*not supported"):
            add(model, tmp_path, data.bytes())
    finally:
        model.close()
