"""Writes GGUF files: a header made of keys and tensor infos, then the tensors' bytes one after the other.

Layout as in gguf.py, version 3. Keys come with the types that the reader names ("uint32", "array[string]"), so what was read can be written
back. Knows bytes, not meanings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.gguf import DEFAULT_ALIGNMENT

_CODES = {
    "uint8": (0, "B"),
    "int8": (1, "b"),
    "uint16": (2, "H"),
    "int16": (3, "h"),
    "uint32": (4, "I"),
    "int32": (5, "i"),
    "float32": (6, "f"),
    "bool": (7, "?"),
    "uint64": (10, "Q"),
    "int64": (11, "q"),
    "float64": (12, "d"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written. shape: ne0 first, as TensorInfo has it; type: ggml type id."""

    name: str
    shape: tuple[int, ...]
    type: int

    @property
    def nbytes(self) -> int:
        """Raises ValueError when a row is no whole number of blocks."""
        return FORMATS[self.type].row_bytes(self.shape[0] if self.shape else 1) * math.prod(self.shape[1:])


def header(metadata: Mapping[str, Any], types: Mapping[str, str], tensors: Sequence[OutTensor]) -> bytes:
    """Everything before the tensors' data, padded to the alignment that the keys name. Strings in arrays may hold lone surrogates, which
    stand for bytes that are no UTF-8."""
    alignment = alignment_of(metadata)
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out += [_string(key), _value(types[key], value)]
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        out += [_string(tensor.name), struct.pack("<I", len(tensor.shape)), dims, struct.pack("<IQ", tensor.type, offset)]
        offset += tensor.nbytes + -tensor.nbytes % alignment
    data = b"".join(out)
    return data + bytes(-len(data) % alignment)


def alignment_of(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))


def write_data(file: BinaryIO, tensor: OutTensor, pieces: Iterable[bytes | memoryview], alignment: int) -> None:
    """Appends one tensor's bytes, and zeros up to the alignment. Tensors come in the header's order. Raises ValueError for another size."""
    written = 0
    for piece in pieces:
        file.write(piece)
        written += len(piece)
    if written != tensor.nbytes:
        raise ValueError(f"tensor {tensor.name}: {written} bytes were given where {tensor.nbytes} are announced")
    file.write(bytes(-written % alignment))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: str, value: Any) -> bytes:
    if kind.startswith("array["):
        item = kind[6:-1]
        if item == "string":
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
        number, code = _CODES[item]
        return struct.pack("<IIQ", _ARRAY, number, len(value)) + struct.pack(f"<{len(value)}{code}", *value)
    if kind == "string":
        return struct.pack("<I", _STRING) + _string(value)
    number, code = _CODES[kind]
    return struct.pack("<I", number) + struct.pack("<" + code, value)
