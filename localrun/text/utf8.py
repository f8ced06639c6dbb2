"""Bytes that are not UTF-8, read as llama.cpp reads them. A text on its way to a tokenizer is a str with such bytes as lone surrogates."""

from __future__ import annotations

REPLACEMENT = "\ufffd"


def to_text(data: str | bytes) -> str:
    """`data` with every byte that is no UTF-8 as a lone surrogate ("surrogateescape"); lone surrogates of a str count as such bytes too."""
    if isinstance(data, bytes):
        return data.decode("utf-8", "surrogateescape")
    try:
        data.encode("utf-8")
    except UnicodeEncodeError:
        return data.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    return data


def to_bytes(text: str) -> bytes:
    """What `to_text` was made from."""
    return text.encode("utf-8", "surrogateescape")


def code_points(text: str) -> str:
    """`text` with stray bytes read leniently: overlong forms and encoded surrogates are what they spell, any other byte is U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        data = to_bytes(text)
    out: list[str] = []
    at = 0
    while at < len(data):
        length = sequence_length(data[at])
        tail = data[at + 1 : at + length]
        if data[at] & 0xC0 == 0x80 or data[at] >= 0xF8 or len(tail) != length - 1 or any(byte & 0xC0 != 0x80 for byte in tail):
            out.append(REPLACEMENT)
            at += 1
            continue
        value = data[at] & (0x7F, 0x1F, 0x0F, 0x07)[length - 1]
        for byte in tail:
            value = value << 6 | byte & 0x3F
        if value > 0x10FFFF:
            out.append(REPLACEMENT)
            at += 1
            continue
        out.append(chr(value))
        at += length
    return "".join(out)


def sequence_length(lead: int) -> int:
    """Bytes of a UTF-8 sequence, by its first byte; 1 for bytes that begin none."""
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def raw_characters(text: str) -> list[str]:
    """`text` cut into the characters its lead bytes announce, whether or not what follows is valid; the last may be cut short."""
    try:
        text.encode("utf-8")
        return list(text)
    except UnicodeEncodeError:
        data = to_bytes(text)
    out: list[str] = []
    at = 0
    while at < len(data):
        end = at + sequence_length(data[at])
        out.append(data[at:end].decode("utf-8", "surrogateescape"))
        at = end
    return out
