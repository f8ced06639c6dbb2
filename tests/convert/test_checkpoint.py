"""Folders that cannot be converted: what is wrong is said in one line, and nothing is left behind. Keys are those of the format's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.convert.write import convert
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf
from tests.convert.checkpoints import DECODER, GEMMA, VOCAB, Floats, decoder_tensors, random, spm_model, wordpiece_tokenizer, write

LLAMA = DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "type_vocab_size": 2, "vocab_size": VOCAB, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip


def refused(folder: Path, line: str, target: Path | None = None) -> None:
    target = target or folder.parent / "out.gguf"
    with pytest.raises((ModelFileError, ValueError), match=line) as caught:
        convert(folder, target, n_threads=1)
    assert "\n" not in str(caught.value) and not list(target.parent.glob("*.gguf*")) and not list(target.parent.glob(".*"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": ["FooForCausalLM"]}, r"config\.json: architectures: is \['FooForCausalLM'\]; those that can be converted are"),
        ({"architectures": "x"}, "architectures: is 'x'"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": "64"}, "hidden_size: is '64', and should be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: is -1"),
        ({"hidden_size": True}, "hidden_size: is True"),
        ({"num_attention_heads": 5}, "num_attention_heads: is 5, which does not divide hidden_size 64"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: is 0, and should be a number above 0"),
        ({"hidden_act": "relu"}, "hidden_act: is relu; a llama model has silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.rope_type: is dynamic, a scaling of the rotation"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0,
                           "original_max_position_embeddings": 64}}, "high_freq_factor: is 1, and should be above low_freq_factor 4"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale: is 1.0: YaRN with a factor of its own"),
        ({"rope_scaling": [1]}, "rope_scaling: is no JSON object"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: .*: the checkpoint is quantized; start from the unquantized one"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: is 'yes', and should be true or false"),
        ({"num_hidden_layers": 3}, "tensor blk.2.attn_norm.weight: is missing; llama needs it"),
        ({"num_hidden_layers": 1}, "tensor blk.1..*: is no part of a llama model as supported"),
        ({"intermediate_size": 95}, r"has the shape \[.*\], but \[.*\] is needed"),
    ],
)  # fmt: skip
def test_configurations(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    config = {key: value for key, value in (LLAMA | change).items() if value is not None}
    refused(write(tmp_path / "checkpoint", config, decoder_tensors(LLAMA)), line)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar: is 64, and GGUF files of gemma3 imply 32"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types: differ from the format's: every layer but each 6th"),
        ({"sliding_window_pattern": 4}, "layer_types: differ"),
        ({"final_logit_softcapping": 30.0}, "soft-capping is no part of Gemma 3 as supported"),
    ],
)
def test_configurations_of_gemma3(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    config = GEMMA | {"architectures": ["Gemma3ForCausalLM"]}
    folder = write(tmp_path / "checkpoint", config | change, decoder_tensors(config, four_norms=True, head_norms=True), spm_model())
    refused(folder, line)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model.layers.0.self_attn.o_proj.weight": None}, "tensor blk.0.attn_output.weight: is missing"),
        ({"model.layers.0.mystery.weight": np.zeros((2, 2), np.float32)}, "tensor model.layers.0.mystery.weight: is no part of a llama"),
        ({"model.embed_tokens.weight": None}, "token_embd.weight: is missing or no matrix"),
        ({"model.norm.weight": np.zeros((0,), np.float32)}, r"has the shape \[0\], which holds no weights"),
        ({"model.norm.weight": np.zeros((2, 2, 2), np.float32)}, "matrices of floats are expected"),
        ({"layers.1.mlp.up_proj.weight": np.zeros((96, 64), np.float32)}, "tensor blk.1.ffn_up.weight: is there under two names"),
        ({"model.layers.1.self_attn.q_proj.weight": np.zeros((62, 64), np.float32)}, "has 62 rows, which 4 heads do not divide into pairs"),
        ({"lm_head.weight": np.full((VOCAB, 64), np.nan, np.float32)}, "tensor output.weight holds values that are no finite numbers"),
        ({"lm_head.weight": None}, "tie_word_embeddings: is false, and the checkpoint has no lm_head.weight"),
    ],
)
def test_tensors(tmp_path: Path, change: dict[str, Floats | None], line: str) -> None:
    tensors = {name: values for name, values in (decoder_tensors(LLAMA) | change).items() if values is not None}
    refused(write(tmp_path / "checkpoint", LLAMA, tensors), line)


def test_folders(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", LLAMA, decoder_tensors(LLAMA), shards=2)
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    for name in ("../model.safetensors", "/etc/passwd.safetensors", "a\\b.safetensors", "a\0.safetensors", "x.bin"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(folder, "weight_map: names the file .*, which is not one beside it")
    index.write_text(json.dumps({"weight_map": {}}))
    refused(folder, "weight_map: names no files")
    index.write_text(json.dumps(told))
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"model-00002-of-00002\.safetensors: is missing, and model\.safetensors\.index\.json names it")
    index.unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, r"has weights as pickles \(\*\.bin\), which can run code and are not read")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "has no safetensors file")
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json: is no JSON")
    (folder / "config.json").unlink()
    refused(folder, "has no config.json: it holds no checkpoint")


# ---- encoders -------------------------------------------------------------------------------------------------------------------


def bert_tensors(config: dict[str, Any] = BERT, seed: int = 0) -> dict[str, Floats]:
    """Names as transformers saves BertModel."""
    rng = np.random.default_rng(seed)
    width, ffn = config["hidden_size"], config["intermediate_size"]
    out = {
        "embeddings.word_embeddings.weight": random(rng, config["vocab_size"], width),
        "embeddings.position_embeddings.weight": random(rng, config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": random(rng, config["type_vocab_size"], width),
    }

    def norm(name: str) -> None:
        out[f"{name}.LayerNorm.weight"], out[f"{name}.LayerNorm.bias"] = 1 + random(rng, width, scale=0.2), random(rng, width, scale=0.2)

    def linear(name: str, n: int, m: int) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = random(rng, n, m), random(rng, n, scale=0.2)

    norm("embeddings")
    for i in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{p}.attention.self.{part}", width, width)
        linear(f"{p}.attention.output.dense", width, width)
        norm(f"{p}.attention.output")
        linear(f"{p}.intermediate.dense", ffn, width)
        linear(f"{p}.output.dense", width, ffn)
        norm(f"{p}.output")
    linear("pooler.dense", width, width)
    return out


def sentence_transformer(folder: Path, mode: str = "pooling_mode_mean_tokens", *more: str) -> None:
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{kind}", kind) for kind in more)]
    listed = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(steps)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, mode: True}))


def shapes(gguf: GGUFFile) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in gguf.tensors.items()}


def test_bert_is_laid_out_as_the_reference_files_are(tmp_path: Path, shared: Path) -> None:
    folder = write(tmp_path / "checkpoint", BERT, bert_tensors(), wordpiece_tokenizer(), cls_token="[CLS]", sep_token="[SEP]",
                   unk_token="[UNK]", pad_token="[PAD]", mask_token="[MASK]")  # fmt: skip
    sentence_transformer(folder, "pooling_mode_cls_token", "Normalize")
    convert(folder, tmp_path / "out.gguf", "f32", n_threads=2)
    with open_gguf(tmp_path / "out.gguf") as ours, open_gguf(shared / "arch" / "bert" / "f32.gguf") as theirs:
        assert shapes(ours) == shapes(theirs)
        assert ours.metadata.keys() - theirs.metadata.keys() == {"general.type"} and theirs.metadata.keys() <= ours.metadata.keys()
        for key in theirs.metadata.keys() - {"general.name", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}:
            assert (ours.value_types[key], ours.metadata[key]) == (theirs.value_types[key], theirs.metadata[key]), key
        values = np.frombuffer(bytes(ours.data("blk.1.ffn_down.weight")), np.float32)
    assert np.array_equal(values, bert_tensors()["encoder.layer.1.output.dense.weight"].reshape(-1))


def test_a_cross_encoder_has_a_head(tmp_path: Path, shared: Path) -> None:
    tensors = {f"bert.{name}": values for name, values in bert_tensors().items()}
    tensors |= {"classifier.weight": np.ones((1, 64), np.float32), "classifier.bias": np.ones((1,), np.float32)}
    config = BERT | {"architectures": ["BertForSequenceClassification"]}
    convert(write(tmp_path / "one", config, tensors, wordpiece_tokenizer()), tmp_path / "out.gguf", "f32", n_threads=1)
    with open_gguf(tmp_path / "out.gguf") as ours, open_gguf(shared / "arch" / "bert-reranker" / "f32.gguf") as theirs:
        assert ours.metadata["bert.pooling_type"] == 4 and set(ours.tensors) == set(theirs.tensors)
    tensors |= {"classifier.weight": np.ones((3, 64), np.float32), "classifier.bias": np.ones((3,), np.float32)}
    (tmp_path / "out.gguf").unlink()
    refused(write(tmp_path / "three", config, tensors, wordpiece_tokenizer()), "classifier.weight: has several labels")


def test_nomic_is_laid_out_as_the_reference_files_are(tmp_path: Path, shared: Path) -> None:
    config = {
        "architectures": ["NomicBertModel"], "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 64, "n_positions": 512,
        "vocab_size": VOCAB, "type_vocab_size": 2, "layer_norm_epsilon": 1e-5, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu", "prenorm": False,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    names = {"embeddings.word_embeddings": (VOCAB, 32), "embeddings.token_type_embeddings": (2, 32)}
    for i in range(2):
        p = f"encoder.layers.{i}."
        names |= {f"{p}attn.Wqkv": (96, 32), f"{p}attn.out_proj": (32, 32), f"{p}mlp.fc11": (64, 32), f"{p}mlp.fc12": (64, 32)}
        names |= {f"{p}mlp.fc2": (32, 64)}
    tensors = {f"{name}.weight": random(rng, *shape) for name, shape in names.items()}
    for name in ("emb_ln", *(f"encoder.layers.{i}.norm{k}" for i in range(2) for k in (1, 2))):
        tensors |= {f"{name}.weight": np.ones(32, np.float32), f"{name}.bias": np.zeros(32, np.float32)}
    convert(write(tmp_path / "checkpoint", config, tensors, wordpiece_tokenizer()), tmp_path / "out.gguf", "f32", n_threads=1)
    with open_gguf(tmp_path / "out.gguf") as ours, open_gguf(shared / "arch" / "nomic-bert" / "f32.gguf") as theirs:
        assert shapes(ours) == shapes(theirs)
        for key in (key for key in theirs.metadata if key.startswith("nomic-bert.")):
            assert (ours.value_types[key], ours.metadata[key]) == (theirs.value_types[key], theirs.metadata[key]), key


@pytest.mark.parametrize(
    ("mode", "more", "line"),
    [
        ("pooling_mode_max_tokens", (), "pooling_mode: is pooling_mode_max_tokens; one of"),
        ("pooling_mode_mean_tokens", ("Dense",), "has the step Dense, which is not supported"),
    ],
)
def test_poolings_that_do_not_exist_here(tmp_path: Path, mode: str, more: tuple[str, ...], line: str) -> None:
    folder = write(tmp_path / "checkpoint", BERT, bert_tensors(), wordpiece_tokenizer())
    sentence_transformer(folder, mode, *more)
    refused(folder, line)


def test_without_a_word_on_pooling_it_is_the_mean(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", BERT, bert_tensors(), wordpiece_tokenizer())
    assert convert(folder, tmp_path / "out.gguf", n_threads=1) == [
        "the folder does not say how vectors are pooled (modules.json); the mean is taken"
    ]


def test_the_program_says_what_it_does(tmp_path: Path) -> None:
    config = LLAMA | {"sliding_window": 64}
    folder = write(tmp_path / "my-model", config, decoder_tensors(config))
    command = [sys.executable, "-m", "localrun.convert", str(folder), str(tmp_path / "out.gguf"), "q8_0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1] == {"note": "the sliding window of 64 tokens is not applied: all of the context is attended to"}
    assert lines[-2]["done"] == lines[-2]["total"] > 0
    with open_gguf(tmp_path / "out.gguf") as gguf:
        assert gguf.metadata["general.name"] == "my-model" and gguf.metadata["general.file_type"] == 7
    (folder / "config.json").unlink()
    done = subprocess.run([*command[:-2], "f16"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip().endswith("as Hugging Face lays them out") and done.stderr.count("\n") == 1
