"""The keys of a GGUF file. Long arrays are decoded by whoever asks for them first: a vocabulary is most of a header, and a process that
computes with a model, or asks how large it is, needs none of it.

What is here has been checked by gguf.py; decoding cannot fail.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Array:
    """n items as the file has them. code: the struct code of one; empty for strings, each behind its length u64."""

    n: int
    code: str
    data: bytes

    def items(self) -> list[Any]:
        """Bytes of strings that are not UTF-8 become lone surrogates, so `s.encode("utf-8", "surrogateescape")` gives back a token's very
        bytes.
        """
        if self.code:
            return list(struct.unpack(f"<{self.n}{self.code}", self.data))
        data, length_at, at = self.data, _LENGTH.unpack_from, 0
        strings = []
        for _ in range(self.n):
            start = at + 8
            at = start + length_at(data, at)[0]
            strings.append(data[start:at].decode("utf-8", "surrogateescape"))
        return strings


class Metadata(Mapping[str, Any]):
    """Value by key, in the file's order: int, float, bool, str, or a list of one of them."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        """Arrays come as Array, or decoded."""
        self._values[key] = value

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, Array):
            value = self._values[key] = value.items()
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def length(self, key: str) -> int:
        """Items of an array, decoded or not."""
        value = self._values[key]
        return value.n if isinstance(value, Array) else len(value)
