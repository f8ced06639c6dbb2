"""LoRA adapters as the peft library saves them, as GGUF files.

    adapter_config.json           lora_alpha, use_rslora, ...
    adapter_model.safetensors     base_model.model.<name of the matrix in the checkpoint>.lora_A.weight (r, n) and .lora_B.weight (m, r)

Which matrix of a GGUF file that is, and whether rows of B are reordered as its own were, hangs on the architecture of the model that the
adapter is for (Hu et al. 2021; rank-stabilised scaling: Kalajdzievski 2023).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from localrun.convert import bert, llama
from localrun.convert.config import Config
from localrun.convert.decoder import LAYER, PREFIXES, TOP
from localrun.convert.phi3 import FUSED
from localrun.convert.plan import Copied
from localrun.convert.safetensors import Safetensors
from localrun.convert.write import jobs, shape_of
from localrun.kernels_cpu.formats import BY_NAME
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf, printable
from localrun.models.gguf_write import OutTensor
from localrun.quantize.output import Told, write_file

_DECODERS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")


def convert_adapter(source: Path, base: Path, target: Path, *, n_threads: int, told: Told = lambda done, total: None) -> None:
    """Writes the adapter in the folder `source` (or that whose weights are the file `source`), for the model in the GGUF file `base`.

    F16 stays F16, everything else becomes F32. Raises ModelFileError (no adapter, one of a kind that is not supported), OSError.
    """
    folder, weights = (source.parent, source) if source.is_file() else (source, source / "adapter_model.safetensors")
    if not weights.is_file():
        raise ModelFileError(folder, "", "has no adapter_model.safetensors; it holds no adapter as peft saves them")
    config = Config.read(folder / "adapter_config.json")
    with open_gguf(base) as model, Safetensors([weights]) as tensors:
        copied = [_copied(name, model, tensors) for name in tensors.tensors]
        metadata: dict[str, Any] = {
            "general.architecture": model.architecture, "general.type": "adapter", "general.name": folder.resolve().name,
            "adapter.type": "lora", "adapter.lora.alpha": _alpha(config),
        }  # fmt: skip
        kinds = {key: "float32" if key == "adapter.lora.alpha" else "string" for key in metadata}
        by_name = {one.name: one for one in sorted(copied, key=lambda one: one.name)}
        if len(by_name) != len(copied):
            raise ModelFileError(weights, "", "has tensors twice, under two names")
        out = []
        for one in by_name.values():
            kind = "F16" if tensors.tensors[one.source].dtype == "F16" else "F32"
            out.append(OutTensor(one.name, shape_of(one, tensors), BY_NAME[kind].id))
        write_file(target, metadata, kinds, out, lambda one: jobs(by_name[one.name], one, tensors), n_threads=n_threads, told=told)


def _alpha(config: Config) -> float:
    """What the product is scaled by, times the rank: GGUF files divide by it."""
    config.str("peft_type", "LORA", choices=("LORA",))
    config.str("bias", "none", choices=("none",))
    for name in ("use_dora", "fan_in_fan_out", "modules_to_save", "alpha_pattern", "layer_replication", "lora_bias"):
        config.refuse(name, "adapters with it are not supported")
    alpha: float = config.float("lora_alpha")
    if not config.bool("use_rslora", False):
        return alpha
    config.refuse("rank_pattern", "with use_rslora it is not supported")
    return alpha * math.sqrt(config.int("r", minimum=1))


def _copied(source: str, model: GGUFFile, tensors: Safetensors) -> Copied:
    found = _NAME.fullmatch(source)
    stem = _gguf_name(found[1], model.architecture) if found else ""
    if found is None or not stem or bool(found[2]) != (stem == "token_embd"):
        raise tensors.fail(source, f"changes nothing that a {printable(model.architecture)} model is known to have")
    name = f"{stem}.weight.lora_{found[3].lower()}"
    if model.architecture != llama.ARCHITECTURE or found[3] == "A":
        return Copied(name, source)
    n_heads = _heads(model, "head_count")
    return Copied(name, source, heads=llama.heads_of(f"{stem}.weight", n_heads, _heads(model, "head_count_kv") or n_heads))


def _heads(model: GGUFFile, key: str) -> int:
    value = model.metadata.get(f"{model.architecture}.attention.{key}", 0)
    if type(value) is not int:
        raise ModelFileError(model.path, f"{model.architecture}.attention.{key}", "differs by layer; give the adapter as a GGUF file")
    return value


def _gguf_name(name: str, architecture: str) -> str:
    """Name of the GGUF tensor, without .weight, for a matrix of the checkpoint; empty: there is none."""
    prefixes: tuple[str, ...]
    if architecture == "bert":
        prefixes, top, prefix, layer = ("bert.",), bert.BERT_TOP, "encoder.layer.", bert.BERT_LAYER
    elif architecture in _DECODERS:
        prefixes, top, prefix, layer = PREFIXES, TOP, "layers.", LAYER | FUSED
    else:
        return ""
    name = next((name.removeprefix(one) for one in prefixes if name.startswith(one)), name)
    found = re.fullmatch(re.escape(prefix) + r"(\d+)\.(.+)", name)
    if found is None:
        return top.get(name, "")
    leaf = layer.get(found[2])
    return f"blk.{int(found[1])}.{leaf}" if leaf else ""
