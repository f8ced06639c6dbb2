"""What a new file is to hold, before any weight is read: keys with their types, and where each tensor comes from.

Families (llama.py, qwen.py, ...) make plans; write.py carries them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.convert.config import Config
from localrun.convert.safetensors import Safetensors
from localrun.models.errors import ModelFileError
from localrun.models.gguf import printable

KeyTable = dict[str, tuple[str, Any]]
"""GGUF key -> its type and value."""


@dataclass(frozen=True)
class Copied:
    """A tensor of the checkpoint under its new name."""

    name: str
    source: str
    plus: float = 0.0
    """Added to every value: Gemma stores norms as what is to be added to 1."""
    heads: int = 0
    """So many heads of rows are reordered from rotated halves to rotated pairs; 0: rows stay as they are."""


@dataclass(frozen=True)
class Made:
    """A tensor that is computed from the configuration: a vector of float32."""

    name: str
    values: NDArray[np.float32]


@dataclass
class Plan:
    architecture: str
    keys: KeyTable = field(default_factory=dict)
    """With whole names."""
    tensors: list[Copied | Made] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a person should know about the conversion."""

    def add(self, kind: str, **values: Any) -> None:
        """Keys of the architecture, all of one type; __ in a name stands for the dot. None adds nothing."""
        for name, value in values.items():
            if value is not None:
                self.keys[f"{self.architecture}.{name.replace('__', '.')}"] = (kind, value)


_OLD_ENDS = {"gamma": "weight", "beta": "bias"}
"""What the first checkpoints of BERT call the weight and the bias of a norm."""

Rule = Callable[[str, str], Copied | None]
"""(GGUF name, source) -> how the tensor is taken over; None: it is not."""


def add_sizes(plan: Plan, c: Config) -> int:
    """Adds the sizes that every transformer's config.json has; returns the number of heads. Raises ModelFileError."""
    heads: int = c.int("num_attention_heads", minimum=1)
    plan.add(
        "uint32",
        vocab_size=c.int("vocab_size", minimum=1),
        context_length=c.int("max_position_embeddings", minimum=1),
        embedding_length=c.int("hidden_size", minimum=1),
        block_count=c.int("num_hidden_layers", minimum=1),
        feed_forward_length=c.int("intermediate_size", minimum=1),
        attention__head_count=heads,
    )
    return heads


def plan_tensors(
    plan: Plan, tensors: Safetensors, prefixes: Iterable[str], top: Mapping[str, str], layer_prefix: str, layer: Mapping[str, str],
    take: Rule, skip: str,
) -> None:  # fmt: skip
    """Adds every tensor of the checkpoint to the plan.

    prefixes: that names may carry in front, the longest first. top: GGUF name by name, without .weight and .bias; layer: the same for
    what follows `layer_prefix` and a number. skip: a regular expression of names, after their prefix, that are no part of the model.
    Raises ModelFileError for a tensor that nothing is known of: a model without a part of itself would answer wrongly.
    """
    pattern = re.compile(re.escape(layer_prefix) + r"(\d+)\.(.+)")
    skipped = re.compile(skip) if skip else None
    for source in tensors.tensors:
        name = next((source.removeprefix(prefix) for prefix in prefixes if source.startswith(prefix)), source)
        if skipped and skipped.fullmatch(name):
            continue
        stem, _, end = name.rpartition(".")
        end = _OLD_ENDS.get(end, end)
        found = pattern.fullmatch(stem)
        leaf = layer.get(found[2]) if found else top.get(stem)
        if leaf is None or end not in ("weight", "bias"):
            raise ModelFileError(
                tensors.tensors[source].path, f"tensor {printable(source)}", f"is no part of a {plan.architecture} model as supported"
            )
        taken = take(f"blk.{int(found[1])}.{leaf}.{end}" if found else f"{leaf}.{end}", source)
        if taken is not None:
            plan.tensors.append(taken)
    names = [tensor.name for tensor in plan.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelFileError("the checkpoint", f"tensor {twice}", "is there under two names")
    plan.tensors.sort(key=lambda tensor: _place(tensor.name))


def _place(name: str) -> tuple[int, int, str]:
    found = re.match(r"blk\.(\d+)\.", name)
    return (1, int(found[1]), name) if found else (0, 0, name)


def pooling(plan: Plan, folder_config: Config, modules: Any) -> bool:
    """Adds pooling_type from a sentence-transformers folder: modules.json, `modules` here, names the steps and 1_Pooling says which.

    Returns whether there was one. Raises ModelFileError for steps and poolings that do not exist here.
    """
    if not isinstance(modules, list):
        return False
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, dict) else ""
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise folder_config.error("modules.json", f"has the step {printable(kind or repr(module))}, which is not supported")
    kinds = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
    chosen = [name for name, value in folder_config.values.items() if name.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in kinds:
        raise folder_config.error("pooling_mode", f"is {', '.join(chosen) or 'none'}; one of {', '.join(kinds)} is supported")
    plan.add("uint32", pooling_type=kinds[chosen[0]])
    return True
