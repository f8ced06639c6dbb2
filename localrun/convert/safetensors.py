"""Reads safetensors files: the header is checked whole before any of it is used, tensor data stays in the mapped file.

    header length u64 | header, JSON | tensor data
    header:  {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}

Little-endian; offsets count from the end of the header; shapes are C's (the last one varies fastest). By the specification the tensors fill
the data without gap or overlap; a file where they do not is refused. Knows bytes, not meanings.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats.floats import values_bf16
from localrun.models.errors import ModelFileError
from localrun.models.gguf import printable

MAX_HEADER = 100_000_000
"""Bytes, as in the format's own library."""
MAX_TENSORS = 1 << 18
MAX_DIMS = 8

# Bytes of one value; those with a NumPy type can be read.
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """shape: as the file has it, the dimension that varies fastest last. begin: bytes from the start of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    path: Path


class Safetensors:
    """Open safetensors files, one or the shards of one model. A context manager."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises ModelFileError: a file is missing, malformed, or has a tensor that another one has too."""
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Safetensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for mapped in self._maps.values():
            # an array still held by someone keeps its mapping alive; it goes with the last one
            with contextlib.suppress(BufferError):
                mapped.close()

    def fail(self, name: str, problem: str) -> ModelFileError:
        """An error about one tensor."""
        return ModelFileError(self.tensors[name].path, f"tensor {printable(name)}", problem)

    def rows(self, name: str, first: int = 0, count: int | None = None, order: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """`count` rows (None: all) of a tensor from row `first` on, as float32 of shape (count, values of a row). A row is what one index
        of the first dimension selects; a vector is one row. order: for each row, which one of the file stands there.

        Raises ModelFileError for a tensor that holds no floats.
        """
        info = self.tensors[name]
        if info.dtype not in _FLOATS:
            raise self.fail(name, f"is of type {info.dtype}; weights in F32, F16, BF16 and F64 can be converted")
        length = math.prod(info.shape[1:]) if len(info.shape) > 1 else math.prod(info.shape)
        n_rows = info.shape[0] if len(info.shape) > 1 else 1
        flat = np.frombuffer(self._maps[info.path], _FLOATS[info.dtype], n_rows * length, info.begin).reshape(n_rows, length)
        last = n_rows if count is None else first + count
        part = flat[first:last] if order is None else flat[order[first:last]]
        if info.dtype == "BF16":
            return values_bf16(part.view(np.uint8))
        return part.astype(np.float32, copy=False)

    def is_float(self, name: str) -> bool:
        return self.tensors[name].dtype in _FLOATS

    # ---- the header ----

    def _open(self, path: Path) -> None:
        def fail(field: str, problem: str) -> ModelFileError:
            return ModelFileError(path, printable(field), problem)

        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise fail("", f"has {size} bytes; this is no safetensors file")
                mapped = self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise fail("", f"cannot be opened: {error.strerror or error}") from error
        length: int = struct.unpack_from("<Q", mapped)[0]
        if length > size - 8 or length > MAX_HEADER:
            raise fail("header", f"claims {length} bytes, and the file has {size}: it is damaged, incomplete or no safetensors file")
        header = _json(mapped[8 : 8 + length], fail)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise fail("__metadata__", "is no object of strings")
        self.metadata |= metadata
        if len(header) > MAX_TENSORS:
            raise fail("header", f"names {len(header)} tensors, more than the {MAX_TENSORS} that are supported")
        found = sorted(
            (_tensor(path, name, entry, 8 + length, size, fail) for name, entry in header.items()), key=lambda one: (one.begin, one.nbytes)
        )
        expected = 8 + length
        for one in found:
            if one.begin != expected:
                what = "overlaps the one before it" if one.begin < expected else "leaves a gap after the one before it"
                raise fail(f"tensor {one.name}", f"begins at byte {one.begin} instead of {expected}: it {what}")
            expected += one.nbytes
            if one.name in self.tensors:
                raise fail(f"tensor {one.name}", f"is in {self.tensors[one.name].path.name} too")
            self.tensors[one.name] = one
        if expected != size:
            raise fail("tensor data", f"ends at byte {expected}, and the file has {size}")


def _json(raw: bytes, fail: Any) -> dict[str, Any]:
    """The header's object. A name that is there twice would have been read differently by others: it is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            raise fail("header", f"has the name {next(name for name in names if names.count(name) > 1)[:60]!r} twice")
        return made

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise fail("header", f"is no JSON: {str(error)[:100]}") from None
    if not isinstance(header, dict):
        raise fail("header", "is no JSON object")
    return header


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _tensor(path: Path, name: str, entry: object, start: int, size: int, fail: Any) -> StoredTensor:
    field = f"tensor {name}"
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail(field, "is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise fail(field, f"has the unknown type {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_whole, shape)):
        raise fail(field, f"has the shape {str(shape)[:60]}, which is none")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)) or offsets[0] > offsets[1]:
        raise fail(field, f"has the offsets {str(offsets)[:60]}, which are none")
    begin, end = offsets
    if start + end > size:
        raise fail(field, f"ends at byte {start + end}, and the file has {size}: it is incomplete, download it again")
    if end - begin != math.prod(shape) * _SIZES[dtype]:
        raise fail(field, f"has {end - begin} bytes, and its shape {shape} of {dtype} needs {math.prod(shape) * _SIZES[dtype]}")
    return StoredTensor(name, dtype, tuple(shape), start + begin, end - begin, path)
