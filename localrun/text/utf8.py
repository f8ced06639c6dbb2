"""Characters and bytes: what is no UTF-8 is read as llama.cpp reads it. A text for a tokenizer is a str with such bytes as lone surrogates.
"""

from __future__ import annotations

REPLACEMENT = "\ufffd"
WIDE_SPACES = "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's white space beyond ASCII."""
WHITESPACE = frozenset("\t\n\v\f\r " + WIDE_SPACES)


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


def is_utf8(text: str) -> bool:
    """Whether `text` stands for bytes that are all UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def code_points(text: str) -> str:
    """`text` with stray bytes read leniently: overlong forms and encoded surrogates are what they spell, any other byte is U+FFFD."""
    if is_utf8(text):
        return text
    data = to_bytes(text)
    out: list[str] = []
    at = 0
    while at < len(data):
        length = lenient_length(data, at)
        value = ord(REPLACEMENT)
        if length:
            value = data[at] & (0x7F, 0x1F, 0x0F, 0x07)[length - 1]
            for byte in data[at + 1 : at + length]:
                value = value << 6 | byte & 0x3F
        if value > 0x10FFFF:
            value, length = ord(REPLACEMENT), 1
        out.append(chr(value))
        at += length or 1
    return "".join(out)


def lenient_length(data: bytes, at: int) -> int:
    """Bytes of the character at `at` if its bytes have the form of one, whatever they spell; 0 if they have not."""
    length = sequence_length(data[at])
    tail = data[at + 1 : at + length]
    formed = data[at] & 0xC0 != 0x80 and data[at] < 0xF8 and len(tail) == length - 1 and all(byte & 0xC0 == 0x80 for byte in tail)
    return length if formed else 0


def sequence_length(lead: int) -> int:
    """Bytes of a UTF-8 sequence, by its first byte; 1 for bytes that begin none."""
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def raw_characters(text: str) -> list[str]:
    """`text` cut into the characters its lead bytes announce, whether or not what follows is valid; the last may be cut short."""
    if is_utf8(text):
        return list(text)
    data = to_bytes(text)
    out: list[str] = []
    at = 0
    while at < len(data):
        end = at + sequence_length(data[at])
        out.append(data[at:end].decode("utf-8", "surrogateescape"))
        at = end
    return out
