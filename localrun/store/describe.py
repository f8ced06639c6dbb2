"""The config blob of a model: what lists and `show` say about it without opening its file again.

Knows which keys of a GGUF file and which counts go into Ollama's config JSON; nothing of where blobs lie.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.gguf import GGUFFile

# general.file_type: ggml's llama_ftype. 4, 5 and 6, 33 to 35 named layouts that no longer exist.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip


def config_of(gguf: GGUFFile) -> dict[str, Any]:
    """The JSON object of a config blob, but for its `rootfs`: format, family, size label, quantization, context and embedding length.

    Raises ModelFileError when the file names no architecture. Keys that the file does not have are left out.
    """
    family = gguf.architecture
    config: dict[str, Any] = {
        "model_format": "gguf",
        "model_family": family,
        "model_families": [family],
        "model_type": human_count(parameter_count(gguf)),
        "file_type": quantization(gguf),
        "architecture": "amd64",
        "os": "linux",
    }
    for key in ("context_length", "embedding_length"):
        value = gguf.metadata.get(f"{family}.{key}")
        if isinstance(value, int) and not isinstance(value, bool):
            config[key] = value
    return config


def parameter_count(gguf: GGUFFile) -> int:
    """Weights of all tensors together."""
    return sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())


def quantization(gguf: GGUFFile) -> str:
    """The file's own word for its quantization ("Q4_K_M"), or, where it says none, the type that most of its bytes have."""
    named = _FILE_TYPES.get(gguf.metadata.get("general.file_type", -1))
    if named:
        return named
    counted: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        counted[FORMATS[tensor.type].name] += tensor.nbytes
    return counted.most_common(1)[0][0] if counted else "unknown"


def human_count(count: int) -> str:
    """`count` with a suffix, as model sizes are written: 134.52M, 1.5B, 7B."""
    for unit, suffix, decimals in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            number = count / unit
            return f"{number:.0f}{suffix}" if number == int(number) else f"{number:.{decimals}f}{suffix}"
    return str(count)
