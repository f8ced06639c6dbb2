"""Carries out a plan: the checkpoint's tensors, reordered and shifted as the plan says, in the types of the new file.

Any type that `quantize` knows can be written directly. The result is checked as when a model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localrun.convert.checkpoint import Checkpoint, open_checkpoint
from localrun.convert.plan import Copied, Made
from localrun.convert.safetensors import Safetensors
from localrun.kernels_cpu.formats import BY_NAME, FORMATS, Format
from localrun.models.gguf import open_gguf
from localrun.models.gguf_write import OutTensor
from localrun.models.params import Keys
from localrun.models.registry import ARCHITECTURES, family_of
from localrun.quantize import mixes
from localrun.quantize.importance import Importance
from localrun.quantize.output import PIECE, Job, Told, encode, write_file


def convert(
    folder: Path, target: Path, name: str = "", *, n_threads: int, title: str = "", importance: Importance | None = None,
    told: Told = lambda done, total: None,
) -> list[str]:  # fmt: skip
    """Writes the checkpoint in `folder` as a GGUF file of type `name` ("Q4_K_M") to `target`, which appears when it is whole.

    name: empty takes 16 bits, BF16 where the checkpoint's matrices are BF16 and F16 otherwise. title: general.name. importance: which
    columns count how much. Returns what a person should know.

    Raises ModelFileError (the checkpoint is of a family that is not supported, damaged, or incomplete), ValueError (the type; weights that
    are no finite numbers; an importance matrix of another model), OSError.
    """
    with open_checkpoint(folder, title) as checkpoint:
        chosen = mixes.file_type(name) if name else _sixteen_bits(checkpoint)
        _write(checkpoint, target, chosen, importance, n_threads, told)
        notes = checkpoint.plan.notes
    try:
        _check(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return notes


def _sixteen_bits(checkpoint: Checkpoint) -> str:
    kinds = [info.dtype for info in checkpoint.tensors.tensors.values() if len(info.shape) > 1]
    return "BF16" if kinds.count("BF16") * 2 > len(kinds) else "F16"


def _write(checkpoint: Checkpoint, target: Path, name: str, importance: Importance | None, n_threads: int, told: Told) -> None:
    plan, tensors = checkpoint.plan, checkpoint.tensors
    values = {key: value for key, (_, value) in plan.keys.items()}
    kinds = {key: kind for key, (kind, _) in plan.keys.items()}
    values |= {"general.file_type": mixes.FILE_TYPES[name], "general.quantization_version": 2}
    kinds |= {"general.file_type": "uint32", "general.quantization_version": "uint32"}
    names = {one.name: one for one in plan.tensors}
    model = mixes.Shape.of(plan.architecture, values, names)
    out = []
    for one in plan.tensors:
        shape = shape_of(one, tensors)
        out.append(OutTensor(one.name, shape, mixes.type_of(one.name, shape, BY_NAME["F32"], name, model).id))
    if importance is not None:
        importance = importance.fitted({tensor.name: tensor.shape for tensor in out})
        values |= {"quantize.imatrix.file": importance.name, "quantize.imatrix.entries_count": len(importance.columns)}
        kinds |= {"quantize.imatrix.file": "string", "quantize.imatrix.entries_count": "int32"}

    def pieces(tensor: OutTensor) -> Iterator[Job]:
        return jobs(names[tensor.name], tensor, tensors, importance.of(tensor.name, 0) if importance else None)

    write_file(target, values, kinds, out, pieces, n_threads=n_threads, told=told)


def shape_of(one: Copied | Made, tensors: Safetensors) -> tuple[int, ...]:
    """The tensor's shape in the new file: ggml's, a row's length first. Raises ModelFileError for what is no vector or matrix of floats."""
    if isinstance(one, Made):
        return one.values.shape
    shape = tensors.tensors[one.source].shape
    if not shape or 0 in shape:
        raise tensors.fail(one.source, f"has the shape {list(shape)}, which holds no weights")
    if len(shape) > 2 or not tensors.is_float(one.source):
        kind = tensors.tensors[one.source].dtype
        raise tensors.fail(one.source, f"is of type {kind} and shape {list(shape)}; matrices of floats are expected")
    return tuple(reversed(shape))


def jobs(one: Copied | Made, out: OutTensor, tensors: Safetensors, weights: NDArray[np.float32] | None = None) -> Iterator[Job]:
    """The pieces of the tensor `one`, which becomes `out`. weights: of its columns. Raises ModelFileError."""
    target = FORMATS[out.type]
    if isinstance(one, Made):
        values = one.values
        yield lambda: encode(values, target, one.name), len(values)
        return
    rows = math.prod(out.shape[1:])
    order = pairs_of_halves(one, rows, out.shape[0] if len(out.shape) == 1 else 0, tensors) if one.heads else None
    if order is not None and len(out.shape) == 1:
        # a bias: its values are what rows are in a matrix
        values = tensors.rows(one.source)[0][order]
        yield lambda: encode(values, target, one.name), len(values)
        return
    step = max(1, PIECE // out.shape[0])
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield _Piece(tensors, one, first, count, order, target, weights), count * out.shape[0]


class _Piece:
    """Reads, changes and encodes some rows, in whatever thread calls it."""

    def __init__(
        self, tensors: Safetensors, one: Copied, first: int, count: int, order: NDArray[np.int64] | None, target: Format,
        weights: NDArray[np.float32] | None,
    ) -> None:  # fmt: skip
        self._what = tensors, one, first, count, order, target, weights

    def __call__(self) -> bytes:
        tensors, one, first, count, order, target, weights = self._what
        values = tensors.rows(one.source, first, count, order)
        return encode(values + np.float32(one.plus) if one.plus else values, target, one.name, weights)


def pairs_of_halves(one: Copied, rows: int, length: int, tensors: Safetensors) -> NDArray[np.int64]:
    """For each row of the new tensor, which row of the checkpoint's stands there: in every head, rows i and i + half become neighbours."""
    n = length or rows
    if n % (2 * one.heads):
        raise tensors.fail(one.source, f"has {n} rows, which {one.heads} heads do not divide into pairs")
    return np.arange(n).reshape(one.heads, 2, n // one.heads // 2).swapaxes(1, 2).reshape(-1)


def _check(path: Path) -> None:
    """As when the file is loaded: all tensors there, with the right shapes. Raises ModelFileError."""
    with open_gguf(path) as gguf:
        if gguf.architecture in ARCHITECTURES:
            family_of(gguf).read(Keys(gguf), gguf)
