"""What a model file is, in words: the facts behind `show`, the lists, and the config of a stored model.

Knows which keys and counts say something to a person. Opens no file, loads no weights, imports neither NumPy nor Numba.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.gguf import GGUFFile
from localrun.models.pooling import ability

LONGEST_ARRAY = 5
"""Arrays with more items are shown empty unless everything is asked for: a vocabulary has 100,000s."""

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip
"""general.file_type: names of quantization mixes (Q4_K_M is Q4_K with some tensors in Q6_K, and so on)."""

GUESSED = 1024
"""Bit of general.file_type: the writer inferred it from the tensors."""

FILL_IN_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""What vocabularies call the tokens around a gap that is to be filled, where no key names them."""


def describe(gguf: GGUFFile, *, template: str | None = None, verbose: bool = False) -> dict[str, Any]:
    """The file's facts, ready for JSON.

    architecture, name (or None), parameter_count, parameter_size ("1.5B"), quantization ("Q4_K_M"), context_length, embedding_length,
    layers, heads, kv_heads (int, list if they differ by layer, or None), vocabulary, file_size in bytes; types: for each tensor type its
    name, tensors, parameters and bytes, most bytes first; model_info as /api/show gives it; capabilities; with verbose, tensors too.
    template: the chat template in use, if not the file's own. Raises ModelFileError when the file names no architecture.
    """
    architecture = gguf.architecture
    metadata = gguf.metadata

    def key(name: str) -> Any:
        return metadata.get(f"{architecture}.{name}")

    tokens = metadata.get("tokenizer.ggml.tokens")
    facts = {
        "architecture": architecture,
        "name": metadata.get("general.name"),
        "parameter_count": parameter_count(gguf),
        "parameter_size": size_label(parameter_count(gguf)),
        "quantization": quantization(gguf),
        "context_length": key("context_length"),
        "embedding_length": key("embedding_length"),
        "layers": key("block_count"),
        "heads": key("attention.head_count"),
        "kv_heads": key("attention.head_count_kv") or key("attention.head_count"),
        "vocabulary": len(tokens) if isinstance(tokens, list) else None,
        "file_size": gguf.file_size,
        "types": type_table(gguf),
        "model_info": model_info(gguf, verbose=verbose),
        "capabilities": capabilities(metadata, template),
    }
    if verbose:
        facts["tensors"] = [{"name": t.name, "type": FORMATS[t.type].name, "shape": list(t.shape)} for t in gguf.tensors.values()]
    return facts


def parameter_count(gguf: GGUFFile) -> int:
    """Values of all tensors together."""
    return sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())


def size_label(count: int) -> str:
    """A count as model sizes are written: 135M is "134.52M" in full, 1,543,714,304 is "1.5B"."""
    for unit, suffix, decimals in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count // unit}{suffix}" if count % unit == 0 else f"{count / unit:.{decimals}f}{suffix}"
    return str(count)


def quantization(gguf: GGUFFile) -> str:
    """The file's own word for its quantization; where it has none, the type that most bytes are of; "unknown" without tensors."""
    file_type = gguf.metadata.get("general.file_type")
    if type(file_type) is int and file_type & ~GUESSED in FILE_TYPES:
        return FILE_TYPES[file_type & ~GUESSED]
    table = type_table(gguf)
    return str(table[0]["type"]) if table else "unknown"


def type_table(gguf: GGUFFile) -> list[dict[str, Any]]:
    """For each tensor type in the file: type, tensors, parameters, bytes; the one with most bytes first."""
    rows: dict[int, dict[str, Any]] = {}
    for tensor in gguf.tensors.values():
        row = rows.setdefault(tensor.type, {"type": FORMATS[tensor.type].name, "tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def model_info(gguf: GGUFFile, *, verbose: bool = False) -> dict[str, Any]:
    """The file's keys as /api/show gives them, with general.parameter_count, without the chat template and the name.

    Arrays longer than LONGEST_ARRAY are empty unless verbose. Everything can be written as JSON in UTF-8: bytes of tokens that are no text
    become U+FFFD, floats that are no numbers None.
    """
    info: dict[str, Any] = {"general.parameter_count": parameter_count(gguf)}
    for key, value in gguf.metadata.items():
        if key in ("tokenizer.chat_template", "general.name"):
            continue
        if not isinstance(value, list):
            info[key] = _plain(value)
        else:
            info[key] = [_plain(item) for item in value] if verbose or len(value) <= LONGEST_ARRAY else []
    return info


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return value


def capabilities(metadata: Mapping[str, Any], template: str | None = None) -> list[str]:
    """What the model can be asked for: completion, embedding or rerank; tools, thinking, insert.

    Judged by the keys, the vocabulary and what the chat template mentions (template: the one in use, if not the file's own).
    """
    able = ability(metadata)
    if able != "completion":
        return [able]
    own = metadata.get("tokenizer.chat_template")
    text = template if template is not None else own if isinstance(own, str) else ""
    found = ["completion"]
    if "tools" in text or "tool_call" in text:
        found.append("tools")
    if any(mark in text for mark in ("<think>", "enable_thinking", "reasoning_content", ".thinking")):
        found.append("thinking")
    if _can_fill_in(metadata):
        found.append("insert")
    return found


def _can_fill_in(metadata: Mapping[str, Any]) -> bool:
    if all(f"tokenizer.ggml.{name}_token_id" in metadata for name in ("fim_pre", "fim_suf", "fim_mid")):
        return True
    tokens = metadata.get("tokenizer.ggml.tokens")
    known: Iterable[Any] = tokens if isinstance(tokens, list) else ()
    marks = {mark for names in FILL_IN_TOKENS for mark in names}.intersection(known)
    return any(marks.issuperset(names) for names in FILL_IN_TOKENS)
