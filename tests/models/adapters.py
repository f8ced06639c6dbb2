"""Random low-rank adapters as files, and the models they make when they are added to the weights: what results are held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.reference import dequantize
from localrun.models.gguf import GGUFFile, open_gguf
from localrun.models.gguf_write import OutTensor, alignment_of, header, write_data
from tests.models.build import Builder, Tensor

Floats = NDArray[np.float32]
EMBEDDING = "token_embd.weight"


def adapter_bytes(
    base: Path, names: Sequence[str], *, rank: int = 4, alpha: float | None = 8.0, seed: int = 0, kind: type = np.float32, size: float = 0.3
) -> bytes:
    """A LoRA file for those matrices of the model, random. size: about how large B A x is beside x."""
    rng = np.random.default_rng(seed)
    tensors = []
    with open_gguf(base) as model:
        for name in names:
            columns, rows = model.tensors[name].shape
            a_shape, b_shape = ((rank, rows), (rank, columns)) if name == EMBEDDING else ((columns, rank), (rank, rows))
            for half, shape in (("a", a_shape), ("b", b_shape)):
                values = (rng.normal(0, size, (shape[1], shape[0])) / np.sqrt(shape[0])).astype(kind)
                tensors.append(Tensor(f"{name}.lora_{half}", shape, 0 if kind is np.float32 else 1, values.tobytes()))
        says = {"general.architecture": model.architecture, "general.type": "adapter", "adapter.type": "lora"}
    keys: list[tuple[str | bytes, str, Any]] = [(key, "string", text) for key, text in says.items()]
    if alpha is not None:
        keys.append(("adapter.lora.alpha", "float32", alpha))
    return Builder(keys=keys, tensors=tensors).bytes()


def halves(adapter: bytes, folder: Path) -> tuple[dict[str, tuple[Floats, Floats]], float]:
    """a and b by matrix as float32, rows first, and alpha (0 without)."""
    path = folder / "halves.gguf"
    path.write_bytes(adapter)
    with open_gguf(path) as gguf:
        names = dict.fromkeys(name[:-7] for name in gguf.tensors)
        pairs = {name: (values(gguf, f"{name}.lora_a"), values(gguf, f"{name}.lora_b")) for name in names}
        return pairs, gguf.metadata.get("adapter.lora.alpha", 0.0)


def values(gguf: GGUFFile, name: str) -> Floats:
    """A tensor as float32, (rows, columns) or (n,)."""
    info = gguf.tensors[name]
    rows = int(np.prod(info.shape[1:]))
    data = np.frombuffer(gguf.data(name), np.uint8).reshape(rows, -1)
    return dequantize(info.type, data, info.shape[0]).reshape(info.shape[::-1])


def merged(base: Path, target: Path, adapters: Sequence[tuple[bytes, float]]) -> Path:
    """The model in F32 with scale * alpha / rank * B A added to its matrices, written to `target`. A tied output stays as it was."""
    with open_gguf(base) as gguf:
        tensors = {name: values(gguf, name) for name in gguf.tensors}
        if "output.weight" not in tensors:
            tensors["output.weight"] = tensors[EMBEDDING].copy()
        for data, scale in adapters:
            pairs, alpha = halves(data, target.parent)
            for name, (a, b) in pairs.items():
                factor = np.float64(scale * (alpha / b.shape[1] if alpha else 1.0))
                product = a.astype(np.float64) @ b.T if name == EMBEDDING else b.astype(np.float64) @ a
                tensors[name] = (tensors[name] + factor * product).astype(np.float32)
        outs = {name: OutTensor(name, v.shape[::-1], 0) for name, v in tensors.items()}
        with target.open("wb") as file:
            file.write(header(gguf.metadata, gguf.value_types, list(outs.values())))
            for name, out in outs.items():
                write_data(file, out, [np.ascontiguousarray(tensors[name]).tobytes()], alignment_of(gguf.metadata))
    return target
