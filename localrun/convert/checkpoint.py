"""A folder with a checkpoint: which of its files hold what, which family it is of, and the plan for its GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localrun.convert import bert, gemma, llama, phi3, qwen
from localrun.convert.config import Config, read_json
from localrun.convert.plan import Copied, Plan, pooling
from localrun.convert.safetensors import Safetensors
from localrun.convert.vocabulary import vocabulary
from localrun.models.errors import ModelFileError
from localrun.models.gguf import printable

FAMILIES: dict[str, Callable[[Config, Safetensors], Plan]] = {
    "LlamaForCausalLM": llama.plan,
    "MistralForCausalLM": llama.plan,
    "Qwen2ForCausalLM": qwen.plan_qwen2,
    "Qwen3ForCausalLM": qwen.plan_qwen3,
    "GemmaForCausalLM": gemma.plan_gemma,
    "Gemma2ForCausalLM": gemma.plan_gemma2,
    "Gemma3ForCausalLM": gemma.plan_gemma3,
    "Gemma3ForConditionalGeneration": gemma.plan_gemma3,
    "Phi3ForCausalLM": phi3.plan,
    "BertModel": bert.plan_bert,
    "BertForMaskedLM": bert.plan_bert,
    "BertForSequenceClassification": bert.plan_bert,
    "NomicBertModel": bert.plan_nomic,
}
"""By config.json's `architectures`."""

_MEAN = 1
"""pooling_type."""


def shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the model. Raises ModelFileError: there are none, or the index names some that are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = Config.read(index).part("weight_map").values.values()
        names = list(dict.fromkeys(name for name in listed if isinstance(name, str)))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors") or "\\" in name or "\0" in name:
                raise ModelFileError(index, "weight_map", f"names the file {printable(repr(name))}, which is not one beside it")
            if not (folder / name).is_file():
                raise ModelFileError(folder / name, "", "is missing, and model.safetensors.index.json names it")
        if names:
            return [folder / name for name in names]
        raise ModelFileError(index, "weight_map", "names no files")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(("adapter_", "consolidated")))
    if len(found) == 1:
        return found
    if not found and any(folder.glob("*.bin")):
        raise ModelFileError(folder, "", "has weights as pickles (*.bin), which can run code and are not read; safetensors are")
    what = "no safetensors file" if not found else f"{len(found)} safetensors files and no index"
    raise ModelFileError(folder, "", f"has {what}: it holds no checkpoint as Hugging Face lays them out")


@dataclass
class Checkpoint:
    """An open checkpoint and the plan for it. A context manager."""

    folder: Path
    tensors: Safetensors
    plan: Plan

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *raised: object) -> None:
        self.tensors.close()


def open_checkpoint(folder: Path, title: str = "") -> Checkpoint:
    """title: general.name; the folder's name when empty. Raises ModelFileError."""
    if not (folder / "config.json").is_file():
        raise ModelFileError(folder, "", "has no config.json: it holds no checkpoint as Hugging Face lays them out")
    config = Config.read(folder / "config.json")
    named = config.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    family = FAMILIES.get(architecture)
    if family is None:
        raise config.error("architectures", f"is {printable(repr(named))}; those that can be converted are {', '.join(sorted(FAMILIES))}")
    tensors = Safetensors(shards(folder))
    try:
        plan = family(config, tensors)
        text = config.part("text_config") if config.has("text_config") else config
        _add_pooling(plan, folder)
        plan.keys = {
            "general.architecture": ("string", plan.architecture),
            "general.type": ("string", "model"),
            "general.name": ("string", title or folder.resolve().name),
            **plan.keys,
            **vocabulary(folder, text, _rows(plan, tensors)),
        }
    except BaseException:
        tensors.close()
        raise
    return Checkpoint(folder, tensors, plan)


def _rows(plan: Plan, tensors: Safetensors) -> int:
    embedding = next((one for one in plan.tensors if isinstance(one, Copied) and one.name == "token_embd.weight"), None)
    if embedding is None or len(tensors.tensors[embedding.source].shape) != 2:
        raise ModelFileError("the checkpoint", "token_embd.weight", "is missing or no matrix: the model has no embedding")
    n = tensors.tensors[embedding.source].shape[0]
    plan.keys[f"{plan.architecture}.vocab_size"] = ("uint32", n)
    return n


def _add_pooling(plan: Plan, folder: Path) -> None:
    """How an embedding model makes one vector of many. An encoder whose folder does not say gets the mean, the usual one."""
    if f"{plan.architecture}.pooling_type" in plan.keys:
        return
    modules = folder / "modules.json"
    said = modules.is_file() and pooling(plan, Config.read_if_there(folder / "1_Pooling" / "config.json"), read_json(modules))
    if not said and plan.keys.get(f"{plan.architecture}.attention.causal") == ("bool", False):
        plan.add("uint32", pooling_type=_MEAN)
        plan.notes.append("the folder does not say how vectors are pooled (modules.json); the mean is taken")
