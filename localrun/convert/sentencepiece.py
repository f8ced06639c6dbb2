"""Reads tokenizer.model, SentencePiece's file: pieces with scores and kinds, and how text is prepared.

The file is a protocol buffer (the wire format is public: a key is a varint of field number and wire type, then the value). Fields of
ModelProto that matter here:

    1 pieces, repeated   1 piece string | 2 score f32 | 3 type: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
    2 trainer_spec       3 model_type: 1 unigram, 2 BPE, 3 word, 4 char
    3 normalizer_spec    2 precompiled_charsmap bytes | 3 add_dummy_prefix bool | 4 remove_extra_whitespaces bool

GGUF's token types are the same numbers. Every length is checked before use.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localrun.models.errors import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Pieces:
    """By token id."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    add_dummy_prefix: bool
    """A text is begun with a space."""


def read_pieces(path: Path) -> Pieces:
    """Raises ModelFileError: no such file, another format, a model that is not BPE or that normalizes text by rules of its own."""

    def fail(field: str, problem: str) -> ModelFileError:
        return ModelFileError(path, field, problem)

    try:
        if path.stat().st_size > MAX_BYTES:
            raise fail("", f"has more than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise fail("", f"cannot be read: {error.strerror}") from error
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    kind, prefix = 1, True
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(_part(value)))
                texts.append(_part(piece[1]).decode("utf-8"))
                scores.append(struct.unpack("<f", _part(piece.get(2, bytes(4))))[0])
                types.append(_number(piece.get(3, NORMAL)))
            elif field == 2:
                kind = _number(dict(_fields(_part(value))).get(3, 1))
            elif field == 3:
                spec = dict(_fields(_part(value)))
                prefix = bool(_number(spec.get(3, 1)))
                if spec.get(2):
                    raise fail("normalizer_spec", "normalizes text by rules of its own, which is not supported for this family")
    except (ValueError, KeyError, struct.error) as error:
        raise fail("", f"is no SentencePiece model: {error}") from None
    if not texts:
        raise fail("", "is no SentencePiece model: it has no pieces")
    if kind != BPE:
        raise fail("trainer_spec.model_type", f"is {kind}; BPE (2) is supported for this family")
    if not all(map(math.isfinite, scores)) or not all(NORMAL <= one <= BYTE for one in types):
        raise fail("pieces", "have scores that are no numbers, or types that do not exist")
    return Pieces(texts, scores, types, prefix)


def _part(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number stands where bytes should")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes stand where a number should")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value, in order: an int for varints, bytes for everything else. Raises ValueError where the data ends too early."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = _varint(data, at)
        elif not length:
            raise ValueError(f"wire type {wire} at byte {at} does not exist")
        if length > len(data) - at:
            raise ValueError(f"a field of {length} bytes at byte {at} runs past the end")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"a number at byte {at} does not end")
