"""PEFT adapters: base file + scale * B A is the file of the checkpoint into which the adapter was merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.convert.lora import convert_adapter
from localrun.convert.write import convert
from localrun.errors import BadRequest, ModelFileRejected
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.store import CreateSpec, Store, spec_from_modelfile
from localrun.store.adapters import check
from tests.convert.checkpoints import DECODER, GEMMA, Floats, decoder_tensors, random, spm_model, write, write_safetensors

LLAMA = DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
PHI3 = DECODER | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GEMMA3 = GEMMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3"}
RANK = 4
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def adapter(folder: Path, tensors: dict[str, Floats], *, kind: str = "F32", modules: tuple[str, ...] = MODULES, **config: Any) -> Path:
    """An adapter for both layers of the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    out: dict[str, Floats] = {}
    for i in range(2):
        for module in modules:
            m, n = tensors[f"model.layers.{i}.{module}.weight"].shape
            out[f"base_model.model.model.layers.{i}.{module}.lora_A.weight"] = random(rng, RANK, n)
            out[f"base_model.model.model.layers.{i}.{module}.lora_B.weight"] = random(rng, m, RANK)
    write_safetensors(folder / "adapter_model.safetensors", out, kind)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none"} | config))
    return folder


def floats(path: Path) -> dict[str, Floats]:
    """All tensors of an F32 file, (rows, values of a row)."""
    with open_gguf(path) as gguf:
        return {name: np.frombuffer(bytes(gguf.data(name)), np.float32).reshape(-1, info.shape[0]) for name, info in gguf.tensors.items()}


def merged(tensors: dict[str, Floats], folder: Path, scale: float, kind: str = "F32") -> dict[str, Floats]:
    rng = np.random.default_rng(3)
    out = dict(tensors)
    modules = MODULES if "model.layers.0.self_attn.q_proj.weight" in tensors else ("self_attn.qkv_proj", "mlp.gate_up_proj")
    for i in range(2):
        for module in modules:
            name = f"model.layers.{i}.{module}.weight"
            m, n = tensors[name].shape
            a, b = random(rng, RANK, n), random(rng, m, RANK)
            out[name] = tensors[name] + np.float32(scale) * (b @ a)
    return out


@pytest.mark.parametrize(
    ("config", "kinds", "modules", "change", "scale"),
    [
        (LLAMA, {}, MODULES, {}, 2.0),
        (LLAMA, {}, MODULES, {"use_rslora": True}, 4.0),
        (PHI3, {"fused": True}, ("self_attn.qkv_proj", "mlp.gate_up_proj"), {}, 2.0),
        (GEMMA3, {"four_norms": True, "head_norms": True}, MODULES, {"lora_alpha": 1.0}, 0.25),
    ],
    ids=["llama", "llama, rank-stabilised", "phi3", "gemma3"],
)
def test_base_and_adapter_are_the_merged_model(
    tmp_path: Path, config: dict[str, Any], kinds: dict[str, bool], modules: tuple[str, ...], change: dict[str, Any], scale: float
) -> None:
    tensors = decoder_tensors(config, **kinds)
    vocab = spm_model() if config is GEMMA3 else None
    convert(write(tmp_path / "base", config, tensors, vocab), tmp_path / "base.gguf", "f32", n_threads=1)
    folder = adapter(tmp_path / "adapter", tensors, modules=modules, **change)
    convert(write(tmp_path / "merged", config, merged(tensors, folder, scale), vocab), tmp_path / "merged.gguf", "f32", n_threads=1)
    convert_adapter(folder, tmp_path / "base.gguf", tmp_path / "adapter.gguf", n_threads=2)
    with open_gguf(tmp_path / "adapter.gguf") as made, open_gguf(tmp_path / "base.gguf") as base:
        check(made, base, "it")
        assert made.metadata["adapter.lora.alpha"] / RANK == scale
    base_of, parts, want = floats(tmp_path / "base.gguf"), floats(tmp_path / "adapter.gguf"), floats(tmp_path / "merged.gguf")
    changed = {name.removesuffix(".lora_a").removesuffix(".lora_b") for name in parts}
    assert len(changed) == 2 * len(modules)
    for name, values in want.items():
        got = base_of[name] + (scale * (parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"]) if name in changed else 0)
        assert np.allclose(got, values, rtol=0, atol=1e-5), name


def test_embeddings_and_types(tmp_path: Path) -> None:
    """The embedding's A has a row of values for each rank and a column for each token. F16 stays, BF16 becomes F32."""
    tensors = decoder_tensors(LLAMA)
    convert(write(tmp_path / "base", LLAMA, tensors), tmp_path / "base.gguf", n_threads=1)
    rng = np.random.default_rng(0)
    folder = adapter(tmp_path / "adapter", tensors)
    a, b = random(rng, RANK, 288), random(rng, 64, RANK)
    prefix = "base_model.model.model.embed_tokens.lora_embedding_"
    for kind, expected in (("F16", 1), ("BF16", 0)):
        write_safetensors(folder / "adapter_model.safetensors", {f"{prefix}A": a, f"{prefix}B": b}, kind)
        convert_adapter(folder / "adapter_model.safetensors", tmp_path / "base.gguf", tmp_path / "adapter.gguf", n_threads=1)
        with open_gguf(tmp_path / "adapter.gguf") as made, open_gguf(tmp_path / "base.gguf") as base:
            check(made, base, "it")
            assert {info.type for info in made.tensors.values()} == {expected}
            assert made.tensors["token_embd.weight.lora_a"].shape == (288, RANK)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"peft_type": "IA3"}, "peft_type: is 'IA3'; supported: LORA"),
        ({"bias": "all"}, "bias: is 'all'; supported: none"),
        ({"use_dora": True}, "use_dora: is True: adapters with it are not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"lora_alpha": None}, "lora_alpha: is missing"),
        ({"lora_alpha": "8"}, "lora_alpha: is '8', and should be a number"),
    ],
)
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    tensors = decoder_tensors(LLAMA)
    convert(write(tmp_path / "base", LLAMA, tensors), tmp_path / "base.gguf", n_threads=1)
    with pytest.raises(ModelFileError, match=line):
        convert_adapter(adapter(tmp_path / "adapter", tensors, **change), tmp_path / "base.gguf", tmp_path / "a.gguf", n_threads=1)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("name", ["base_model.model.model.layers.0.mystery.lora_A.weight", "model.layers.0.self_attn.q_proj.weight",
                                  "base_model.model.model.layers.0.mlp.up_proj.lora_embedding_A"])  # fmt: skip
def test_tensors_that_change_nothing_known_are_refused(tmp_path: Path, name: str) -> None:
    tensors = decoder_tensors(LLAMA)
    convert(write(tmp_path / "base", LLAMA, tensors), tmp_path / "base.gguf", n_threads=1)
    folder = adapter(tmp_path / "adapter", tensors)
    write_safetensors(folder / "adapter_model.safetensors", {name: np.ones((4, 4), np.float32)})
    with pytest.raises(ModelFileError, match="changes nothing that a llama model is known to have"):
        convert_adapter(folder, tmp_path / "base.gguf", tmp_path / "a.gguf", n_threads=1)


# ---- through the store ----------------------------------------------------------------------------------------------------------


def test_create_from_a_folder_with_an_adapter(tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    tensors = decoder_tensors(LLAMA)
    write(tmp_path / "checkpoint", LLAMA, tensors, kind="BF16")
    adapter(tmp_path / "adapter", tensors)
    said: list[str] = []
    text = "FROM ./checkpoint\nADAPTER ./adapter\nSYSTEM S"
    store.create("tuned", spec_from_modelfile(text, tmp_path), lambda line: said.append(line.status))
    model = store.get("tuned")
    assert model.config["file_type"] == "BF16" and len(model.adapters) == 1 and model.system == "S"
    assert "converting model" in said and "converting adapter" in said and said[-1] == "success"
    with open_gguf(model.adapters[0]) as made, open_gguf(model.model_path) as base:
        check(made, base, "it")
    # the same from blobs, as a client on another machine sends it
    files = {path.name: store.blobs.put(path.read_bytes()) for path in (tmp_path / "checkpoint").iterdir()}
    adapters = {path.name: store.blobs.put(path.read_bytes()) for path in (tmp_path / "adapter").iterdir()}
    sent = spec_from_modelfile("FROM @files\nADAPTER @adapters", None, files=files, adapters=adapters)
    store.create("sent", sent, lambda line: None)
    with open_gguf(store.get("sent").model_path) as one, open_gguf(model.model_path) as two:
        for name in two.tensors:
            assert bytes(one.data(name)) == bytes(two.data(name))
    store.create("small", CreateSpec(path=tmp_path / "checkpoint", quantize="q8_0"), lambda line: None)
    assert store.get("small").config["file_type"] == "Q8_0"


def test_what_create_says_of_folders_it_cannot_use(tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    tensors = decoder_tensors(LLAMA)
    write(tmp_path / "checkpoint", LLAMA, tensors)
    store.create("base", CreateSpec(path=tmp_path / "checkpoint"), lambda line: None)
    before = set(store.blobs.digests())
    other = decoder_tensors(LLAMA | {"hidden_size": 32})
    cases = [
        (CreateSpec(from_name="base", adapters=[adapter(tmp_path / "a", tensors, use_dora=True)]), BadRequest, "use_dora: is True"),
        (CreateSpec(from_name="base", adapters=[adapter(tmp_path / "b", other)]), ModelFileRejected, "it is for another size"),
        (CreateSpec(from_name="base", adapters=[tmp_path / "checkpoint"]), BadRequest, "has no adapter_model.safetensors"),
        (CreateSpec(path=tmp_path / "checkpoint", quantize="f32", adapters=[tmp_path / "b"]), ModelFileRejected, "it is for another size"),
        (CreateSpec(path=tmp_path / "a"), BadRequest, "has no config.json"),
        (CreateSpec(files={"../config.json": "sha256:" + "0" * 64, "b": ""}), BadRequest, "file path must be relative: '../config.json'"),
        (CreateSpec(files={"/etc/x": "", "b": ""}), BadRequest, "file path must be relative"),
        (CreateSpec(files={"a\\b": "", "b": ""}), BadRequest, "file path must be relative"),
        (CreateSpec(files={"config.json": "sha256:" + "0" * 64, "b": ""}), BadRequest, "is not in the store; send it first"),
    ]  # fmt: skip
    for spec, kind, line in cases:
        with pytest.raises(kind, match=line):
            store.create("x", spec, lambda line: None)
        assert set(store.blobs.digests()) == before and [model.name for model in store.list()] == ["base:latest"]
        assert not list((store.root / "localrun" / "partial").glob("*"))
