"""The config blob of a model: what lists and `show` say about it without opening its file again.

Knows which keys of a GGUF file go into Ollama's config JSON; what they say is known in models/show.py, where blobs lie elsewhere.
"""

from __future__ import annotations

from typing import Any

from localrun.models.gguf import GGUFFile
from localrun.models.show import parameter_count, quantization, size_label


def config_of(gguf: GGUFFile) -> dict[str, Any]:
    """The JSON object of a config blob, but for its `rootfs`: format, family, size label, quantization, context and embedding length.

    Raises ModelFileError when the file names no architecture. Keys that the file does not have are left out.
    """
    family = gguf.architecture
    config: dict[str, Any] = {
        "model_format": "gguf",
        "model_family": family,
        "model_families": [family],
        "model_type": size_label(parameter_count(gguf)),
        "file_type": quantization(gguf),
        "architecture": "amd64",
        "os": "linux",
    }
    for key in ("context_length", "embedding_length"):
        value = gguf.metadata.get(f"{family}.{key}")
        if isinstance(value, int) and not isinstance(value, bool):
            config[key] = value
    return config
