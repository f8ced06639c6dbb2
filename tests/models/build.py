"""Writes small GGUF files byte by byte, so that a test can make any of them wrong in exactly one place."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

CODES = {
    "uint8": (0, "B"),
    "int8": (1, "b"),
    "uint16": (2, "H"),
    "int16": (3, "h"),
    "uint32": (4, "I"),
    "int32": (5, "i"),
    "float32": (6, "f"),
    "bool": (7, "B"),
    "string": (8, ""),
    "uint64": (10, "Q"),
    "int64": (11, "q"),
    "float64": (12, "d"),
}


def string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content: Any) -> bytes:
    """`content` as GGUF writes it, its type before it; kind "array[uint8]" and so on for lists."""
    if kind.startswith("array["):
        item = kind[6:-1]
        number, code = CODES[item]
        body = b"".join(string(c) if item == "string" else struct.pack("<" + code, c) for c in content)
        return struct.pack("<IIQ", 9, number, len(content)) + body
    number, code = CODES[kind]
    return struct.pack("<I", number) + (string(content) if kind == "string" else struct.pack("<" + code, content))


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None
    """None: right after the tensor before it."""


@dataclass
class Builder:
    """keys: name, type and content of each; bytes() is the whole file."""

    keys: list[tuple[str | bytes, str, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32

    def bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        for name, kind, content in self.keys:
            head += string(name) + value(kind, content)
        data = b""
        for tensor in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            dims = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
            head += string(tensor.name) + struct.pack("<I", len(tensor.shape)) + dims + struct.pack("<IQ", tensor.type, offset)
            data += tensor.data
        return head + b"\0" * (-len(head) % self.alignment) + data
