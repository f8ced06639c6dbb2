"""Importance matrices: for each matrix of a model, how strongly each of its columns was driven by a calibration text. Read only.

Errors of a weight matter as much as the values that it is multiplied with: with E[x_j^2] as the weight of column j, the weighted squared
error of the weights is the expected squared error of the products (for inputs that are not correlated).
Two forms of file, both llama.cpp's:

    *.dat    entries i32 | per entry: name length i32, name, passes i32, values i32, f32 x values: the sum over passes of E[x^2]
             then, in newer ones, passes in all and the text's name
    *.gguf   general.type = "imatrix"; per matrix NAME.in_sum2 f32 (columns, experts): sums of x^2, and NAME.counts f32 (1, experts)

Nothing of the file is believed: counts and lengths are compared with what is there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, TensorInfo, open_gguf, printable

MAX_BYTES = 1 << 30
MAX_ENTRIES = 1 << 18
_SUMS, _COUNTS = ".in_sum2", ".counts"
LEAST = 1e-4
"""Of the mean: a column that the text never drove counts for a little all the same."""


@dataclass(frozen=True)
class Importance:
    """name: of the file. columns: by name of a matrix, float32 (experts or 1, columns), above 0, with mean 1."""

    name: str
    columns: dict[str, NDArray[np.float32]]

    def fitted(self, shapes: Mapping[str, tuple[int, ...]]) -> Importance:
        """For a model with these tensors: shape by name, a row's length first. In the older form experts stand in one row.

        Raises ValueError when the file was made for another model: a matrix is missing there or has another size.
        """
        columns = {}
        for name, weights in self.columns.items():
            shape = shapes.get(name)
            if shape is None:
                raise ValueError(f"{self.name} weighs {printable(name)}, which the model does not have: it was made for another one")
            if len(shape) < 2 or weights.size != shape[0] * math.prod(shape[2:]):
                text = f"{self.name} has {weights.size} values for {printable(name)}, whose shape is {list(shape)}"
                raise ValueError(f"{text}: it was made for another model")
            each = weights.reshape(-1, shape[0])
            columns[name] = np.maximum(each / each.mean(1, keepdims=True), np.float32(LEAST))
        return Importance(self.name, columns)

    def of(self, name: str, matrix: int) -> NDArray[np.float32] | None:
        """Weights of the columns of one matrix of the tensor `name`; None: all count alike."""
        found = self.columns.get(name)
        return None if found is None else found[matrix]


def read_importance(path: Path) -> Importance:
    """Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            size = file.seek(0, 2)
    except OSError as error:
        raise ModelFileError(path, "", f"cannot be opened: {error.strerror or error}") from error
    if size > MAX_BYTES:
        raise ModelFileError(path, "", f"has more than {MAX_BYTES >> 20} MiB; this is no importance matrix")
    if magic == b"GGUF":
        with open_gguf(path) as gguf:
            columns = _of_gguf(gguf)
    else:
        columns = _of_dat(path, path.read_bytes())
    if not columns:
        raise ModelFileError(path, "", "holds no importance of any matrix")
    return Importance(path.name, columns)


def _scaled(path: Path, name: str, sums: NDArray[np.float64]) -> NDArray[np.float32] | None:
    """(experts, columns), each with mean 1; None where nothing was seen at all."""
    if not np.isfinite(sums).all() or (sums < 0).any():
        raise ModelFileError(path, printable(name), "has an importance that is negative or no finite number; the file is damaged")
    means = sums.mean(1, keepdims=True)
    if not (means > 0).any():
        return None
    even = np.where(means > 0, sums / np.where(means > 0, means, 1.0), 1.0)
    return np.maximum(even, LEAST).astype(np.float32)


def _of_gguf(gguf: GGUFFile) -> dict[str, NDArray[np.float32]]:
    if gguf.metadata.get("general.type") != "imatrix":
        raise ModelFileError(gguf.path, "general.type", 'is not "imatrix"; this is another kind of GGUF file')
    columns = {}
    for full in gguf.tensors:
        if not full.endswith(_SUMS):
            continue
        name = full.removesuffix(_SUMS)
        counted = gguf.tensors.get(name + _COUNTS)
        info = gguf.tensors[full]
        experts = math.prod(info.shape[1:])
        if counted is None or math.prod(counted.shape) != experts:
            raise ModelFileError(gguf.path, f"tensor {printable(name)}{_COUNTS}", f"is missing or does not have {experts} values")
        sums, counts = _floats(gguf, info).reshape(experts, info.shape[0]), _floats(gguf, counted)
        # an expert that was never chosen has no sums
        made = _scaled(Path(gguf.path), name, sums / np.where(counts > 0, counts, 1.0)[:, None])
        if made is not None:
            columns[name] = made
    return columns


def _floats(gguf: GGUFFile, info: TensorInfo) -> NDArray[np.float64]:
    if info.type != 0:
        raise ModelFileError(gguf.path, f"tensor {printable(info.name)}", "is not F32")
    return np.frombuffer(bytes(gguf.data(info.name)), "<f4").astype(np.float64)


def _of_dat(path: Path, data: bytes) -> dict[str, NDArray[np.float32]]:
    at = 0

    def number(what: str, most: int) -> int:
        nonlocal at
        if at + 4 > len(data):
            raise ModelFileError(path, what, "the file ends inside it; this is no importance matrix, or an incomplete one")
        value: int = struct.unpack_from("<i", data, at)[0]
        at += 4
        if not 0 <= value <= most:
            raise ModelFileError(path, what, f"is {value}; this is no importance matrix")
        return value

    columns = {}
    for _ in range(number("entries", MAX_ENTRIES)):
        length = number("length of a name", 1024)
        name = data[at : at + length].decode("utf-8", "replace")
        at += length
        number(f"passes of {printable(name)}", 2**31 - 1)
        count = number(f"values of {printable(name)}", 2**31 - 1)
        if 4 * count > len(data) - at:
            raise ModelFileError(path, printable(name), f"claims {count} values, and {len(data) - at} bytes are left")
        if not name or not count or name in columns:
            raise ModelFileError(path, printable(name), "has no values or is there twice")
        # what they are divided by, the passes, is the same for all columns
        made = _scaled(path, name, np.frombuffer(data, "<f4", count, at).astype(np.float64).reshape(1, -1))
        at += 4 * count
        if made is not None:
            columns[name] = made
    return columns
