"""RWKV's World vocabulary: at each place the longest token that fits. Tokens are byte strings, written in the file with escapes."""

from __future__ import annotations

from localrun.text.utf8 import to_bytes
from localrun.text.vocab import Vocab

_ESCAPES = {"t": b"\t", "n": b"\n", "r": b"\r"}


class RwkvEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocab: Vocab) -> None:
        self._ids = {unescape(text): token for token, text in enumerate(vocab.tokens)}
        self._unknown = [] if vocab.unk is None else [vocab.unk]
        self._longest: dict[bytes, int] = {}
        for token in self._ids:
            start = token[:2]
            self._longest[start] = max(self._longest.get(start, 0), len(token))

    def encode(self, text: str, *, after_special: bool = True) -> list[int]:
        """Ids of `text`, whose bytes that are no UTF-8 are lone surrogates. after_special: not used by this kind."""
        data = to_bytes(text)
        out: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest.get(data[at : at + 2], 1), len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    out.append(token)
                    at += length
                    break
            else:
                out += self._unknown
                at += 1
        return out


def unescape(text: str) -> bytes:
    r"""The bytes of a token that is written with \t, \n, \r, \xHH and a backslash before anything else that is meant literally."""
    if "\\" not in text:
        return to_bytes(text)
    out = bytearray()
    at = 0
    while at < len(text):
        character = text[at]
        if character != "\\" or at + 1 == len(text):
            out += to_bytes(character)
            at += 1
            continue
        following = text[at + 1]
        if following == "x":
            try:
                out.append(int(text[at + 2 : at + 4], 16))
            except ValueError:
                out += to_bytes(text[at : at + 4])
            at += 4
        else:
            out += _ESCAPES.get(following) or to_bytes(following)
            at += 2
    return bytes(out)
