"""Which file of this folder knows which architecture. Adding a family is one file and one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, printable
from localrun.models.params import Keys

if TYPE_CHECKING:  # the table of architectures is read where NumPy must not be loaded
    from localrun.models.rope import Rope

ARCHITECTURES = {
    "apertus": "apertus",
    "arctic": "arctic",
    "dbrx": "dbrx",
    "deepseek": "deepseek",
    "deepseek2": "deepseek2",
    "dots1": "dots1",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "glm4moe": "glm4moe",
    "gpt-oss": "gpt_oss",
    "granitemoe": "granitemoe",
    "hunyuan-moe": "hunyuan_moe",
    "minimax-m2": "minimax_m2",
    "phimoe": "phimoe",
    "qwen2moe": "qwen2moe",
    "qwen3moe": "qwen3moe",
    "smallthinker": "smallthinker",
    "arcee": "arcee",
    "baichuan": "baichuan",
    "bert": "bert",
    "gemma-embedding": "gemma_embedding",
    "jina-bert-v2": "jina_bert_v2",
    "llama-embed": "llama_embed",
    "modern-bert": "modern_bert",
    "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert",
    "bitnet": "bitnet",
    "bloom": "bloom",
    "chatglm": "chatglm",
    "codeshell": "codeshell",
    "cohere2": "cohere2",
    "command-r": "command_r",
    "ernie4_5": "llama",
    "deci": "deci",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "glm4": "glm4",
    "gpt2": "gpt2",
    "gptneox": "gptneox",
    "granite": "granite",
    "granitehybrid": "granitehybrid",
    "hunyuan-dense": "hunyuan_dense",
    "internlm2": "llama",
    "jais": "jais",
    "jamba": "jamba",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2moe",
    "llama": "llama",
    "llama4": "llama4",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minicpm": "minicpm",
    "minicpm3": "minicpm3",
    "mistral3": "mistral3",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "openelm": "openelm",
    "orion": "orion",
    "phi2": "phi2",
    "phi3": "phi3",
    "plamo": "plamo",
    "qwen": "qwen",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35moe",
    "qwen3next": "qwen3next",
    "refact": "refact",
    "rwkv6": "rwkv6",
    "rwkv7": "rwkv7",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "t5": "t5",
    "t5encoder": "t5",
    "xverse": "llama",
}
"""Value of general.architecture -> module."""


class Family(Protocol):
    """What a family's module provides."""

    def read(self, keys: Keys, gguf: GGUFFile) -> Any:
        """Hyper-parameters, checked, and the tensors checked against them. Raises ModelFileError. Imports neither NumPy nor Numba."""

    def record(self, params: Any, r: Any, w: Any) -> list[Rope]:
        """Records the forward pass on a plan.Recorder with weights.Weights; returns the angle tables that it refers to by number."""


def family_of(gguf: GGUFFile) -> Family:
    """The module for a file's architecture. Raises ModelFileError naming what is known."""
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise ModelFileError(
            gguf.path,
            "general.architecture",
            f'is "{printable(name)}", which is not supported; supported are {", ".join(sorted(ARCHITECTURES))}',
        )
    family: Family = cast(Any, importlib.import_module(f"localrun.models.{ARCHITECTURES[name]}"))
    return family
