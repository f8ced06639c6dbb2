"""A GGUF file in another type. Knows files and what may be a source; types are chosen in mixes.py, pieces are put together in output.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats import FORMATS, Format
from localrun.kernels_cpu.reference import dequantize
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo, open_gguf
from localrun.models.gguf_write import OutTensor
from localrun.quantize import mixes
from localrun.quantize.importance import Importance
from localrun.quantize.output import FLOATS, PIECE, Job, Told, encode, write_file


def quantize_file(
    source: Path, target: Path, name: str, *, n_threads: int, again: bool = False, importance: Importance | None = None,
    told: Told = lambda done, total: None,
) -> None:  # fmt: skip
    """Writes `source` as a file of type `name` ("Q4_K_M") to `target`, which appears when it is whole.

    again: a file that is quantized already may be the source, at the price of both errors. importance: which columns count how much.
    Raises ValueError (the type; a source that is quantized; weights that are no finite numbers; an importance matrix of another model),
    ModelFileError, OSError.
    """
    name = mixes.file_type(name)
    with open_gguf(source) as gguf:
        shape = mixes.Shape.of(gguf.architecture, gguf.metadata, gguf.tensors)
        types = {info.name: mixes.type_of(info.name, info.shape, FORMATS[info.type], name, shape) for info in gguf.tensors.values()}
        for info in gguf.tensors.values():
            _check(gguf, info, types[info.name], again)
        metadata = {key: value for key, value in gguf.metadata.items() if not key.startswith("split.")}
        if importance is not None:
            importance = importance.fitted({info.name: info.shape for info in gguf.tensors.values()})
            metadata |= {"quantize.imatrix.file": importance.name, "quantize.imatrix.entries_count": len(importance.columns)}
        metadata |= {"general.file_type": mixes.FILE_TYPES[name], "general.quantization_version": 2}
        kinds = gguf.value_types | {"general.file_type": "uint32", "general.quantization_version": "uint32"}
        kinds |= {"quantize.imatrix.file": "string", "quantize.imatrix.entries_count": "int32"}
        tensors = [OutTensor(info.name, info.shape, types[info.name].id) for info in gguf.tensors.values()]
        write_file(target, metadata, kinds, tensors, partial(_jobs, gguf, importance), n_threads=n_threads, told=told)


def _check(gguf: GGUFFile, info: TensorInfo, target: Format, again: bool) -> None:
    now = FORMATS[info.type]
    if now is target or now.name in FLOATS:
        return
    if not again:
        raise ValueError(
            f"quantization is only supported for F16, BF16 and F32 models: tensor {info.name} is {now.name}; start from the unquantized "
            "model, or allow requantizing, which adds both errors"
        )
    if now.name.startswith("I") and now.name[1:].isdigit():
        raise ModelFileError(gguf.path, f"tensor {info.name}", f"is of type {now.name}, which holds no weights")


def _jobs(gguf: GGUFFile, importance: Importance | None, tensor: OutTensor) -> Iterator[Job]:
    """The tensor's bytes in its new type, in order, with the number of values in each piece."""
    info = gguf.tensors[tensor.name]
    now, target = FORMATS[info.type], FORMATS[tensor.type]
    row = info.shape[0] if info.shape else 1
    rows = math.prod(info.shape[1:])
    if now is target:
        yield partial(bytes, gguf.data(tensor.name)), row * rows
        return
    data = np.frombuffer(gguf.data(tensor.name), np.uint8).reshape(rows, now.row_bytes(row))
    step = max(1, PIECE // row)
    each = info.shape[1] if len(info.shape) > 2 else rows
    for matrix in range(rows // each):
        weights = importance.of(tensor.name, matrix) if importance else None
        for first in range(matrix * each, (matrix + 1) * each, step):
            part = data[first : min(first + step, (matrix + 1) * each)]
            yield partial(_converted, part, now, target, row, tensor.name, weights), len(part) * row
    # the last pieces, which may still be computed, read theirs again
    gguf.drop_pages(tensor.name)


def _converted(
    part: NDArray[np.uint8], now: Format, target: Format, row: int, name: str, weights: NDArray[np.float32] | None
) -> bytes:
    return encode(dequantize(now.id, part, row), target, name, weights)
