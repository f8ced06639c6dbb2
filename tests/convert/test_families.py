"""Each family's converted file computes what the checkpoint means: our logits against NumPy over the checkpoint's own tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.convert.write import convert
from localrun.kernels_cpu.formats import FORMATS
from localrun.models.gguf import open_gguf
from localrun.models.load import load_model
from localrun.models.model import BLOCK_TOKENS, LoadOptions, Span
from tests.convert import forward
from tests.convert.checkpoints import DECODER, GEMMA, decoder_tensors, spm_model, write

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 256, 40)]
MAX_DIFFERENCE = 1e-3
"""Of logits, in units of their standard deviation."""

FACTORS = [1.0 + 0.1 * i for i in range(6)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {}),
    "llama, biases and heads of their own size": (
        DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32}, {"biases": True}),
    "llama 3.1": (
        DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3,
                   "tie_word_embeddings": True}, {}),
    "llama, linear": (
        DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "mistral": (DECODER | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16, "num_key_value_heads": 1}, {}),
    "qwen2": (DECODER | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6}, {"biases": True}),
    "qwen3": (DECODER | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}, {"head_norms": True}),
    "gemma": (GEMMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "sliding_window": None}, {}),
    "gemma2": (
        GEMMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 5.0,
                 "final_logit_softcapping": 3.0}, {"four_norms": True}),
    "gemma3": (
        GEMMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3", "num_hidden_layers": 7, "rope_theta": 1e6,
                 "rope_local_base_freq": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"four_norms": True, "head_norms": True}),
    "phi3": (DECODER | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, {"fused": True}),
    "phi3, LongRoPE": (
        DECODER | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75,
                   "original_max_position_embeddings": 128,
                   "rope_scaling": {"type": "longrope", "long_factor": FACTORS, "short_factor": FACTORS[::-1]}}, {"fused": True}),
}  # fmt: skip


def our_logits(path: Path, n_ctx: int = 256) -> Any:
    options = LoadOptions(n_threads=2, max_batch=64, n_ctx=n_ctx, kv_type="f32", cache_dir=os.environ["LOCALRUN_CACHE"])
    model = load_model(path, options)
    try:
        model.allocate_kv(4)
        table = np.arange(-(-len(TOKENS) // BLOCK_TOKENS), dtype=np.int32)
        span = Span(np.array(TOKENS, np.int32), 0, table, np.arange(len(TOKENS), dtype=np.int32))
        return model.forward([span]).copy()
    finally:
        model.close()


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    config, kinds = CASES[name]
    config = {key: value for key, value in config.items() if value is not None}
    tensors = decoder_tensors(config, **kinds)
    folder = write(tmp_path / "checkpoint", config, tensors, spm_model() if "gemma" in name or "phi3" in name else None)
    convert(folder, tmp_path / "out.gguf", "F32", n_threads=2)
    for n_ctx in (256, 64) if "LongRoPE" in name else (256,):
        want = forward.logits(config, tensors, TOKENS, n_ctx)
        got = our_logits(tmp_path / "out.gguf", n_ctx)
        assert np.abs(got - want).max() <= MAX_DIFFERENCE * want.std()


def test_the_order_of_rows_matters(tmp_path: Path) -> None:
    """What the comparison would say of a file whose queries were not reordered: the test can fail."""
    config, _ = CASES["llama"]
    tensors = decoder_tensors(config)
    heads = config["num_attention_heads"]
    moved = {
        name: values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape) if ".q_proj." in name else values
        for name, values in tensors.items()
    }
    folder = write(tmp_path / "checkpoint", config, moved)
    convert(folder, tmp_path / "out.gguf", "F32", n_threads=2)
    want = forward.logits(config, tensors, TOKENS)
    assert np.abs(our_logits(tmp_path / "out.gguf") - want).max() > 0.1 * want.std()


def test_a_nested_text_part_and_transformers_5(tmp_path: Path) -> None:
    """A Gemma 3 with a vision tower, and the rotation described once for each kind of layer: the same file, but for its name."""
    config, kinds = CASES["gemma3"]
    config = {key: value for key, value in config.items() if value is not None}
    tensors = decoder_tensors(config, **kinds)
    convert(write(tmp_path / "plain", config, tensors, spm_model()), tmp_path / "plain.gguf", "F32", n_threads=2, title="same")
    gone = ("architectures", "rope_theta", "rope_local_base_freq", "rope_scaling")
    text = {key: value for key, value in config.items() if key not in gone}
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    nested = {f"language_model.{name}": values for name, values in tensors.items()}
    nested["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    folder = write(tmp_path / "nested", outer, nested, spm_model())
    notes = convert(folder, tmp_path / "nested.gguf", "F32", n_threads=2, title="same")
    assert notes == ["the vision tower is left out: pictures are not supported"]
    assert (tmp_path / "nested.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


@pytest.mark.parametrize(("kind", "name", "types"), [("F16", "", "F16"), ("BF16", "", "BF16"), ("F32", "", "F16"), ("BF16", "f32", "F32")])
def test_types_and_shards(tmp_path: Path, kind: str, name: str, types: str) -> None:
    """Shards are one model; matrices stay at 16 bits unless another type is asked for, vectors become F32; the same weights each way."""
    config, _ = CASES["llama"]
    tensors = decoder_tensors(config)
    if kind == "F16":
        tensors = {key: values.astype(np.float16).astype(np.float32) for key, values in tensors.items()}
    convert(write(tmp_path / "whole", config, tensors, kind=kind), tmp_path / "one.gguf", name, n_threads=1, title="x")
    convert(write(tmp_path / "parts", config, tensors, kind=kind, shards=3), tmp_path / "many.gguf", name, n_threads=3, title="x")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()
    with open_gguf(tmp_path / "one.gguf") as gguf:
        assert {FORMATS[info.type].name for info in gguf.tensors.values() if len(info.shape) == 2} == {types}
        assert {FORMATS[info.type].name for info in gguf.tensors.values() if len(info.shape) == 1} == {"F32"}
        assert gguf.metadata["general.file_type"] == {"F32": 0, "F16": 1, "BF16": 32}[types]
        up = gguf.data("blk.0.ffn_up.weight")
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[types]
        values = np.frombuffer(up, dtype).copy()
        up.release()
    want = tensors["model.layers.0.mlp.up_proj.weight"].reshape(-1)
    got = (values.astype(np.uint32) << 16).view(np.float32) if types == "BF16" else values.astype(np.float32)
    assert np.array_equal(got, want) or (kind == "F32" and np.allclose(got, want, rtol=1e-3, atol=1e-7))


def test_quantized_at_once(tmp_path: Path) -> None:
    config, _ = CASES["llama"]
    config = config | {"hidden_size": 256, "intermediate_size": 256}
    folder = write(tmp_path / "checkpoint", config, decoder_tensors(config), kind="BF16")
    convert(folder, tmp_path / "out.gguf", "q4_K_M", n_threads=2)
    with open_gguf(tmp_path / "out.gguf") as gguf:
        kinds = {name: FORMATS[info.type].name for name, info in gguf.tensors.items()}
    assert kinds["blk.0.ffn_up.weight"] == "Q4_K" and kinds["output.weight"] == "Q6_K" and kinds["blk.0.attn_norm.weight"] == "F32"
