"""Tiny random checkpoints as Hugging Face lays them out, written here with nothing but struct and json."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

VOCAB = 288
WIDTH, FFN, LAYERS, HEADS, KV = 64, 96, 2, 4, 2

DECODER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "hidden_act": "silu", "rope_theta": 10_000.0,
    "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
GEMMA: dict[str, Any] = DECODER | {
    "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32, "sliding_window": 16,
    "tie_word_embeddings": True,
}  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, Floats], kind: str = "F32") -> None:
    """kind: F32, F16 or BF16 (cut, not rounded: tests use values that BF16 holds)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs = []
    at = 0
    for name, values in tensors.items():
        raw = {
            "F32": lambda v: v.astype("<f4").tobytes(),
            "F16": lambda v: v.astype("<f2").tobytes(),
            "BF16": lambda v: (v.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes(),
        }[kind](np.ascontiguousarray(values))
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        blobs.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


# ---- vocabularies -----------------------------------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + i) for i in range(256))
    return [chr(byte) if byte in plain else next(others) for byte in range(256)]


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bpe_tokenizer(split: str | None = LLAMA3_SPLIT, **model: Any) -> dict[str, Any]:
    """A tokenizer.json of 288 tokens: bytes, two special tokens, 30 merges. split: a pre-tokenizer's expression; None: GPT-2's."""
    alphabet = byte_alphabet()
    pairs = ["h e", "t he", "i n", "in g", "Ġ the", "a n", "an d", "Ġ and", "e r", "o n", "r e", "Ġ a", "Ġ t", "o r", "e n", "Ġ w", "i s",
             "e s", "o u", "Ġ s", "Ġ o", "n d", "l l", "i t", "a t", "a l", "Ġ in", "l e", "Ġ b", "s t"]  # fmt: skip
    vocab = {text: index for index, text in enumerate(alphabet)}
    vocab |= {"<s>": 256, "</s>": 257}
    vocab |= {pair.replace(" ", ""): 258 + index for index, pair in enumerate(pairs)}
    assert len(vocab) == VOCAB
    steps: list[dict[str, Any]] = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}]
    if split is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
    return {
        "version": "1.0",
        "added_tokens": [added(256, "<s>"), added(257, "</s>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs} | model,
    }


def added(index: int, text: str) -> dict[str, Any]:
    return {"id": index, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def wordpiece_tokenizer() -> dict[str, Any]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the", "and", "##ing", "##ed", ",", ".", "!"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    words += [f"[unused{index}]" for index in range(VOCAB - len(words))]
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return {
        "added_tokens": [added(words.index(text), text) for text in marks],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                       "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                  "vocab": {text: index for index, text in enumerate(words)}},
    }  # fmt: skip


def varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | int) -> bytes:
    """One field of a protocol buffer: a varint or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def spm_pieces() -> list[tuple[str, float, int]]:
    """Text, score and type of 288 pieces: <unk>, <s>, </s>, 256 bytes, letters and a few words."""
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁t", "he", "▁the", "in", "an", "▁a", "nd", "▁an", "▁and"]
    pieces += [(word, -float(order), 1) for order, word in enumerate(words)]
    pieces += [(letter, -100.0 - order, 1) for order, letter in enumerate("▁etaoinshrdlucmfwgyp")]
    return pieces[:VOCAB]


def spm_model(*, model_type: int = 2, dummy_prefix: bool = True, charsmap: bytes = b"") -> bytes:
    out = b""
    for text, score, kind in spm_pieces():
        piece = field(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + (field(3, kind) if kind != 1 else b"")
        out += field(1, piece)
    out += field(2, field(3, model_type))
    return out + field(3, field(1, b"identity") + (field(2, charsmap) if charsmap else b"") + field(3, int(dummy_prefix)) + field(4, 0))


# ---- weights ----------------------------------------------------------------------------------------------------------------------


def random(rng: np.random.Generator, *shape: int, scale: float | None = None) -> Floats:
    """Values of which BF16 holds all bits."""
    values = rng.standard_normal(shape) * (scale if scale is not None else shape[-1] ** -0.5)
    wide: Floats = values.astype(np.float32)
    return (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def decoder_tensors(
    config: dict[str, Any], *, biases: bool = False, head_norms: bool = False, four_norms: bool = False, fused: bool = False, seed: int = 0
) -> dict[str, Floats]:
    """Names as transformers saves them. Norms vary around 1, or around 0 where 1 is added (four_norms, head_norms: Gemma's)."""
    rng = np.random.default_rng(seed)
    width, ffn, heads, kv = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    dim = config.get("head_dim", width // heads)
    around = 0.0 if "hidden_activation" in config else 1.0

    def norm(n: int) -> Floats:
        return np.float32(around) + random(rng, n, scale=0.25)

    out = {"model.embed_tokens.weight": random(rng, config["vocab_size"], width, scale=0.5), "model.norm.weight": norm(width)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = random(rng, config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        sizes = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
        if fused:
            out[f"{p}self_attn.qkv_proj.weight"] = random(rng, sum(sizes.values()), width)
            out[f"{p}mlp.gate_up_proj.weight"] = random(rng, 2 * ffn, width)
        else:
            for name, n in sizes.items():
                out[f"{p}self_attn.{name}_proj.weight"] = random(rng, n, width)
                if biases:
                    out[f"{p}self_attn.{name}_proj.bias"] = random(rng, n, scale=0.5)
            out[f"{p}mlp.gate_proj.weight"] = random(rng, ffn, width)
            out[f"{p}mlp.up_proj.weight"] = random(rng, ffn, width)
        if head_norms:
            out[f"{p}self_attn.q_norm.weight"] = norm(dim)
            out[f"{p}self_attn.k_norm.weight"] = norm(dim)
        out[f"{p}self_attn.o_proj.weight"] = random(rng, width, heads * dim)
        out[f"{p}mlp.down_proj.weight"] = random(rng, width, ffn)
        for name in ("input_layernorm", "post_attention_layernorm",
                     *(("pre_feedforward_layernorm", "post_feedforward_layernorm") if four_norms else ())):  # fmt: skip
            out[f"{p}{name}.weight"] = norm(width)
    return out


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Floats], tokenizer: dict[str, Any] | bytes | None = None,
          *, kind: str = "F32", shards: int = 1, **settings: Any) -> Path:  # fmt: skip
    """The folder. tokenizer: tokenizer.json, or tokenizer.model as bytes. settings: tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if isinstance(tokenizer, bytes):
        (folder / "tokenizer.model").write_bytes(tokenizer)
    else:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer or bpe_tokenizer(ignore_merges=True)))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, kind)
        return folder
    names = list(tensors)
    index: dict[str, str] = {}
    for number in range(shards):
        part = names[number::shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in part}, kind)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": index}))
    return folder
