"""LoRA adapters at create: which are taken in, in which order, and what is said about those that do not belong to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.errors import BadRequest, LocalrunError, ModelFileRejected
from localrun.kernels_cpu.formats import BY_NAME
from localrun.store import CreateSpec, Store, modelfile_for, spec_from_modelfile
from localrun.store.modelfile import ModelfileError
from tests.models.build import Builder, Tensor

WIDTH, TOKENS, KV = 32, 48, 16
RANK = 4


def tensor(name: str, *shape: int, kind: str = "F32", seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(int(np.prod(shape))).astype(np.float32)
    data = values.tobytes() if kind == "F32" else values.astype(np.float16).tobytes() if kind == "F16" else bytes(len(values) // 32 * 34)
    return Tensor(name, shape, BY_NAME[kind].id, data)


def base_file(path: Path) -> Path:
    keys: list[Any] = [("general.architecture", "string", "llama")]
    matrices = [tensor("token_embd.weight", WIDTH, TOKENS), tensor("blk.0.attn_q.weight", WIDTH, WIDTH)]
    path.write_bytes(Builder(keys=keys, tensors=[*matrices, tensor("blk.0.attn_k.weight", WIDTH, KV)]).bytes())
    return path


def pair(name: str, n: int, m: int, rank: int = RANK, kind: str = "F32", seed: int = 0) -> list[Tensor]:
    return [tensor(f"{name}.lora_a", n, rank, kind=kind, seed=seed), tensor(f"{name}.lora_b", rank, m, kind=kind, seed=seed)]


def adapter_file(path: Path, tensors: list[Tensor] | None = None, **changes: tuple[str, Any] | None) -> Path:
    """A sound adapter, but for `changes`: keys by name with __ for a dot, None takes one away."""
    keys: dict[str, tuple[str, Any] | None] = {
        "general.type": ("string", "adapter"), "adapter.type": ("string", "lora"), "general.architecture": ("string", "llama"),
        "adapter.lora.alpha": ("float32", 8.0),
    }  # fmt: skip
    for name, value in changes.items():
        keys[name.replace("__", ".")] = value
    listed: list[Any] = [(name, *value) for name, value in keys.items() if value is not None]
    path.write_bytes(Builder(keys=listed, tensors=pair("blk.0.attn_q.weight", WIDTH, WIDTH) if tensors is None else tensors).bytes())
    return path


@pytest.fixture
def base(store: Store, tmp_path: Path) -> str:
    store.create("base", CreateSpec(path=base_file(tmp_path / "base.gguf")), lambda line: None)
    return "base"


def create(store: Store, text: str, folder: Path, name: str = "tuned") -> list[Path]:
    store.create(name, spec_from_modelfile(text, folder), lambda line: None)
    return store.get(name).adapters


def test_adapters_stay_in_the_order_of_the_file(store: Store, base: str, tmp_path: Path) -> None:
    one = adapter_file(tmp_path / "one.gguf")
    two = adapter_file(tmp_path / "two.gguf", pair("blk.0.attn_k.weight", WIDTH, KV, kind="F16"))
    three = adapter_file(tmp_path / "three.gguf", pair("token_embd.weight", TOKENS, WIDTH))
    # by digest they would stand in another order
    for order in ([one, two, three], [three, two, one]):
        lines = "".join(f"ADAPTER ./{path.name}\n" for path in order)
        found = create(store, f"FROM base\n{lines}", tmp_path)
        assert [path.read_bytes() for path in found] == [path.read_bytes() for path in order]
    model = store.get("tuned")
    assert model.model_digest == store.get(base).model_digest and store.get(base).adapters == []
    # the same again from what show prints
    store.create("again", spec_from_modelfile(modelfile_for(model), tmp_path), lambda line: None)
    assert store.get("again").digest == model.digest


def test_adapters_come_after_those_of_the_base(store: Store, base: str, tmp_path: Path) -> None:
    one = adapter_file(tmp_path / "one.gguf")
    two = adapter_file(tmp_path / "two.gguf", pair("blk.0.attn_k.weight", WIDTH, KV))
    create(store, "FROM base\nADAPTER one.gguf", tmp_path)
    both = create(store, "FROM tuned\nADAPTER two.gguf", tmp_path, "both")
    assert [path.read_bytes() for path in both] == [one.read_bytes(), two.read_bytes()]
    digest = store.blobs.put(two.read_bytes())
    assert create(store, f"FROM base\nADAPTER @{digest}", tmp_path, "sent") == [store.blobs.path(digest)]
    store.delete("both")
    store.delete("sent")
    assert [path.exists() for path in both] == [True, False]


@pytest.mark.parametrize(
    ("changes", "tensors", "line"),
    [
        ({"general__type": ("string", "model")}, None, "general.type is 'model', not \"adapter\"; FROM takes models"),
        ({"general__type": None}, None, "general.type is None"),
        ({"adapter__type": ("string", "ia3")}, None, "adapter.type is 'ia3'; only \"lora\" is supported"),
        ({"general__architecture": ("string", "qwen2")}, None, "for models of architecture qwen2, and this one is llama"),
        ({"adapter__lora__alpha": None}, None, "alpha is missing"),
        ({"adapter__lora__alpha": ("float32", float("nan"))}, None, "alpha is missing or no finite number"),
        ({}, [], "holds no tensors"),
        ({}, [tensor("blk.0.attn_q.weight", WIDTH, WIDTH)], "neither a lora_a nor a lora_b"),
        ({}, pair("blk.0.attn_q.weight", WIDTH, WIDTH)[:1], "has a lora_a and no lora_b"),
        ({}, pair("blk.0.attn_q.weight", WIDTH, WIDTH)[1:], "has a lora_b and no lora_a"),
        ({}, pair("blk.1.attn_q.weight", WIDTH, WIDTH), "changes blk.1.attn_q.weight, which the model does not have"),
        ({}, pair("blk.0.attn_q.weight", WIDTH, 2 * WIDTH), "maps 32 values to 32, and the adapter's maps 32 to 64: it is for another"),
        ({}, pair("token_embd.weight", WIDTH, TOKENS), "maps 48 values to 32, and the adapter's maps 32 to 48: it is"),
        ({}, [*pair("blk.0.attn_q.weight", WIDTH, WIDTH)[:1], tensor("blk.0.attn_q.weight.lora_b", 8, WIDTH)],
         "lora_a has rank 4 and lora_b 8"),
        ({}, pair("blk.0.attn_q.weight", WIDTH, WIDTH, rank=32, kind="Q8_0"), "is Q8_0; F32, F16 and BF16 are supported"),
    ],
)  # fmt: skip
def test_what_does_not_belong_is_refused(
    store: Store, base: str, tmp_path: Path, changes: dict[str, Any], tensors: list[Tensor] | None, line: str
) -> None:
    adapter_file(tmp_path / "bad.gguf", tensors, **changes)
    before = set(store.blobs.digests())
    with pytest.raises(ModelFileRejected, match=line) as caught:
        create(store, "FROM base\nADAPTER bad.gguf", tmp_path)
    assert "\n" not in str(caught.value) and "bad.gguf" in str(caught.value)
    assert set(store.blobs.digests()) == before and [model.name for model in store.list()] == ["base:latest"]


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("FROM base\nADAPTER none.gguf", ModelfileError, "line 2, column 1: ADAPTER none.gguf: there is no file"),
        ("FROM base\nADAPTER base.gguf", ModelFileRejected, "FROM takes models"),
        ("FROM ./one.gguf", ModelFileRejected, "is an adapter; name it with ADAPTER"),
        (f"FROM base\nADAPTER sha256:{'0' * 64}", BadRequest, "is not in the store; send it first"),
    ],
)
def test_wrong_files(store: Store, base: str, tmp_path: Path, text: str, kind: type[LocalrunError], line: str) -> None:
    adapter_file(tmp_path / "one.gguf")
    with pytest.raises(kind, match=line):
        create(store, text, tmp_path)


def test_paths_of_another_machine_are_not_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ModelfileError, match="line 2, column 1: ADAPTER: paths are taken from clients on this machine only"):
        spec_from_modelfile("FROM base\nADAPTER one.gguf", None)
    assert spec_from_modelfile(f"FROM base\nADAPTER @sha256:{'1' * 64}", None).adapters == [f"sha256:{'1' * 64}"]
