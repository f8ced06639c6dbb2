"""Reads low-rank adapters (Hu et al. 2021, LoRA) from GGUF files: pairs of matrices beside a model's own.

    general.type "adapter" | adapter.type "lora" | adapter.lora.alpha f32 | general.architecture as the model's
    NAME.lora_a (values of a row, rank) and NAME.lora_b (rank, rows) for a matrix NAME of the model: W x becomes W x + s B (A x)
    token_embd.weight.lora_a (rank, tokens): row t of the table becomes row t + s B a[t]

s = alpha / rank, 1 where alpha is 0 or missing; what the user asks for multiplies it. Several files add up. A model whose output matrix is
its embedding keeps it: a pair for token_embd.weight changes what is read, not what is said. Knows files and shapes, not kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_cpu.reference import dequantize
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf, printable
from localrun.models.program import EMBEDDING, MAX_RANK
from localrun.models.validate import F16, WEIGHT_TYPES

HALVES = (".lora_a", ".lora_b")
Floats = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True)
class Pair:
    """What is added to one matrix (rows, columns). a: (rank, columns), of the embedding (tokens, rank); b: (rows, rank); scales: float32
    (rank,). a and b are float16 where every file says so, else float32.
    """

    a: Floats
    b: Floats
    scales: NDArray[np.float32]

    @property
    def rank(self) -> int:
        return len(self.scales)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One or several files, added up: pairs by the name of the matrix."""

    pairs: dict[str, Pair]

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def read_adapter(paths: Sequence[Path | str], model: GGUFFile, able: Collection[str] | None = None) -> Adapter:
    """The adapters in those files, checked against the model. able: matrices that the model as recorded can adapt; None: all.

    Raises ModelFileError, naming the tensor, for a file that is no adapter, or none for this model.
    """
    found: dict[str, list[Pair]] = {}
    for path in paths:
        with open_gguf(path) as gguf:
            for name, pair in _pairs(gguf, model, able).items():
                found.setdefault(name, []).append(pair)
                if (rank := sum(one.rank for one in found[name])) > MAX_RANK:
                    raise ModelFileError(gguf.path, f"tensor {name}.lora_b", f"ranks of {rank} in all; up to {MAX_RANK} are possible")
    return Adapter({name: _added_up(pairs, name == EMBEDDING) for name, pairs in found.items()})


def _pairs(gguf: GGUFFile, model: GGUFFile, able: Collection[str] | None) -> dict[str, Pair]:
    alpha = _alpha(gguf, model)
    for name in gguf.tensors:
        if not name.endswith(HALVES):
            raise ModelFileError(gguf.path, f"tensor {printable(name)}", "is no half of a low-rank pair (.lora_a, .lora_b)")
    names = dict.fromkeys(name[:-7] for name in gguf.tensors)
    if not names:
        raise ModelFileError(gguf.path, "tensors", "there are none: an adapter without pairs")
    pairs = {}
    for name in names:
        for half in HALVES:
            if f"{name}{half}" not in gguf.tensors:
                raise ModelFileError(gguf.path, f"tensor {printable(name)}{half}", "is missing; the other half is there")
        _check(gguf, name, model, able)
        a, b = (_values(gguf, f"{name}{half}") for half in HALVES)
        rank = b.shape[1]
        pairs[name] = Pair(a, b, np.full(rank, alpha / rank if alpha else 1.0, np.float32))
    return pairs


def _alpha(gguf: GGUFFile, model: GGUFFile) -> float:
    """The file's alpha, 0 without; its other keys checked."""
    keys = gguf.metadata
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if keys.get(key) != wanted:
            shown = repr(printable(str(keys[key]))) if key in keys else "missing"
            raise ModelFileError(gguf.path, f"key {key}", f'is {shown}; a LoRA adapter says "{wanted}"')
    architecture = keys.get("general.architecture")
    if architecture != model.architecture:
        raise ModelFileError(
            gguf.path, "key general.architecture", f"is {printable(str(architecture))!r}, but the model is of {model.architecture!r}"
        )
    if any(key.startswith("adapter.alora.") for key in keys):
        raise ModelFileError(gguf.path, "key adapter.alora.invocation_tokens", "adapters that act from a token on are not supported")
    alpha = keys.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ModelFileError(gguf.path, "key adapter.lora.alpha", "is no number")
    return float(alpha)


def _check(gguf: GGUFFile, name: str, model: GGUFFile, able: Collection[str] | None) -> None:
    """Holds a pair's shapes against the model's matrix."""
    shown = printable(name)
    if name not in model.tensors:
        raise ModelFileError(gguf.path, f"tensor {shown}.lora_a", f"the model has no tensor {shown}: the adapter is for another one")
    whole = model.tensors[name].shape
    if len(whole) != 2 or (able is not None and name not in able):
        problem = f"adapters of {shown} are not supported: it is no plain matrix of a layer"
        raise ModelFileError(gguf.path, f"tensor {shown}.lora_a", problem)
    a, b = (gguf.tensors[f"{name}{half}"].shape for half in HALVES)
    rank = b[0] if b else 0
    wanted_a = (rank, whole[1]) if name == EMBEDDING else (whole[0], rank)
    wanted_b = (rank, whole[0]) if name == EMBEDDING else (rank, whole[1])
    for half, shape, wanted in ((".lora_a", a, wanted_a), (".lora_b", b, wanted_b)):
        if shape != wanted or not rank:
            problem = f"has the shape {list(shape)}; {shown} of the model is {list(whole)}, so it must be {list(wanted)}"
            raise ModelFileError(gguf.path, f"tensor {shown}{half}", problem)


def _values(gguf: GGUFFile, name: str) -> Floats:
    """float16 where the file keeps that, else float32; (rows, values of a row)."""
    info = gguf.tensors[name]
    n, rows = info.shape
    data = np.frombuffer(gguf.data(name), np.uint8)
    if info.type == F16:
        return data.view(np.float16).reshape(rows, n).copy()
    fmt = FORMATS[info.type]
    if info.type not in WEIGHT_TYPES:
        raise ModelFileError(gguf.path, f"tensor {printable(name)}", f"is of type {fmt.name}, which no matrix has")
    if n % fmt.block:
        raise ModelFileError(gguf.path, f"tensor {printable(name)}", f"rows of {n} values are no whole {fmt.name} blocks")
    packed = data.reshape(rows, fmt.row_bytes(n))
    return np.array(dequantize(info.type, packed, n), np.float32).reshape(rows, n)


def _added_up(pairs: list[Pair], embedding: bool) -> Pair:
    """B1 A1 + B2 A2 = [B1 B2] [A1; A2]."""
    if len(pairs) == 1:
        return pairs[0]
    kind = np.float16 if all(half.dtype == np.float16 for pair in pairs for half in (pair.a, pair.b)) else np.float32
    a = np.concatenate([pair.a.astype(kind) for pair in pairs], axis=1 if embedding else 0)
    b = np.concatenate([pair.b.astype(kind) for pair in pairs], axis=1)
    return Pair(a, b, np.concatenate([pair.scales for pair in pairs]))
