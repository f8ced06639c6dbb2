"""Which tensor gets which type: what names such as Q4_K_M mean, tensor by tensor.

The rules are those by which llama.cpp names its files, for models without experts' special cases beyond the listed ones, and without an
importance matrix. Knows names and shapes of tensors; no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localrun.kernels_cpu.formats import BY_NAME, Format

FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
}  # fmt: skip
"""Names that can be asked for, with what general.file_type says for each."""
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "FP16": "F16", "FP32": "F32"}

_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are no whole number of blocks of 256."""
_KEPT = (
    "ffn_gate_inp", "token_types", "position_embd", "ssm_conv1d", "ssm_x", "ssm_dt", "shortconv", "attn_rel_b", "time_mix", "altup",
    "laurel",
)  # fmt: skip
"""Small matrices that models are sensitive to."""


def file_type(text: str) -> str:
    """The name that `text` means, in any case. Raises ValueError listing the names."""
    name = text.strip().upper()
    name = ALIASES.get(name, name)
    if name not in FILE_TYPES:
        raise ValueError(f"unsupported quantization type {text[:40]} - supported types are {', '.join(FILE_TYPES)}")
    return name


@dataclass(frozen=True)
class Shape:
    """What the rules look at."""

    n_layers: int
    n_experts: int
    grouped: bool
    """Four query heads or more share a key head."""
    tied: bool
    """The output matrix is the embedding."""

    @classmethod
    def of(cls, architecture: str, metadata: Mapping[str, Any], names: Mapping[str, Any]) -> Shape:
        def count(key: str) -> int:
            value = metadata.get(f"{architecture}.{key}", 0)
            return max(value) if isinstance(value, list) and value else value if type(value) is int else 0

        heads, kv_heads = count("attention.head_count"), count("attention.head_count_kv")
        return cls(count("block_count"), count("expert_count"), bool(kv_heads) and heads // kv_heads >= 4, "output.weight" not in names)


def more_bits(layer: int, n_layers: int) -> bool:
    """Of the layers in which errors matter most: the first and the last eighth, and every third between."""
    return layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2


def type_of(name: str, shape: tuple[int, ...], now: Format, target: str, model: Shape) -> Format:
    """The type of a tensor in a file of type `target`. shape: ne0 first; now: the type that it has."""
    if len(shape) < 2 or not name.endswith(".weight") or "_norm" in name or any(part in name for part in _KEPT):
        return now
    if target in ("F32", "F16", "BF16"):
        return BY_NAME[target]
    wanted = _wanted(name, target, model)
    if shape[0] % BY_NAME[wanted].block:
        wanted = _FALLBACK.get(wanted, wanted)
    return BY_NAME[wanted] if shape[0] % BY_NAME[wanted].block == 0 else BY_NAME["F16"]


def _wanted(name: str, target: str, model: Shape) -> str:
    base = target.removesuffix("_S").removesuffix("_M").removesuffix("_L")
    if name == "output.weight" or (model.tied and name == "token_embd.weight"):
        return "Q8_0" if target == "Q8_0" else "Q6_K"
    if not base.endswith("_K") or base == "Q6_K":
        return base
    found = re.match(r"blk\.(\d+)\.([a-z0-9_]+)\.weight$", name)
    if found is None:
        return base
    layer, leaf = int(found[1]), found[2]
    if leaf == "attn_v":
        return _values(layer, target, base, model)
    if leaf.startswith("ffn_down"):
        return _down(layer, target, base, model.n_layers)
    if leaf == "attn_output":
        if model.n_experts == 8 and base in ("Q2_K", "Q3_K", "Q4_K"):
            return "Q5_K"
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(target, base)
    if leaf == "attn_qkv":
        return {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(target, base)
    if leaf == "attn_k" and model.n_experts == 8:
        return "Q8_0"
    return base


def _values(layer: int, target: str, base: str, model: Shape) -> str:
    if model.n_experts == 8:
        return "Q8_0"
    if target == "Q2_K":
        return "Q4_K" if model.grouped else "Q3_K"
    if target == "Q3_K_M":
        return "Q5_K" if layer < 2 else "Q4_K"
    if target == "Q3_K_L":
        return "Q5_K"
    if target in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if more_bits(layer, model.n_layers) else base
    if target == "Q4_K_S" and layer < 4:
        return "Q5_K"
    return base


def _down(layer: int, target: str, base: str, n_layers: int) -> str:
    if target == "Q2_K":
        return "Q3_K"
    if target == "Q3_K_M":
        return "Q5_K" if layer < n_layers // 16 else "Q4_K"
    if target == "Q3_K_L":
        return "Q5_K"
    if target in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if more_bits(layer, n_layers) else base
    if target in ("Q4_K_S", "Q5_K_S") and layer < n_layers // 8:
        return "Q5_K"
    return base
