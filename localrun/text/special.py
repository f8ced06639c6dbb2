"""Finds special tokens in a text and cuts it at them. Knows token texts and where whitespace beside them goes; nothing of merging.

The order is the reference's: longer texts first, each searched for in all that is left, so where two overlap the longer one wins even if
it begins later. Searching for each of thousands of tokens in turn would be slow (Gemma has 6,400), so one pass finds those that occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from localrun.text.vocab import LSTRIP, RSTRIP

_WHITESPACE = " \t\n\v\f\r"


class SpecialTokens:
    """A set of special tokens to cut texts at."""

    def __init__(self, tokens: Iterable[tuple[str, int, int]]) -> None:
        """tokens: (text, id, attribute bits)."""
        self._by_text: dict[str, tuple[int, int]] = {text: (token, attr) for text, token, attr in tokens}
        self._single = [text for text in self._by_text if len(text) == 1]
        self._lengths: dict[str, list[int]] = {}
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            if len(text) > 1:
                lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(of_start) for start, of_start in lengths.items()}
        first = "".join(sorted({start[0] for start in lengths}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None

    def split(self, text: str) -> list[str | int]:
        """`text` as pieces of text and token ids between them; no piece is empty."""
        pieces: list[str | int] = [text] if text else []
        for special in self._occurring(text):
            token, attr = self._by_text[special]
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, str) and special in piece:
                    _cut(piece, special, token, attr, cut)
                else:
                    cut.append(piece)
            pieces = cut
        return pieces

    def _occurring(self, text: str) -> list[str]:
        """The tokens that `text` holds somewhere, longest (in bytes) first."""
        found = {single for single in self._single if single in text}
        if self._first is not None:
            lengths = {start: list(of_start) for start, of_start in self._lengths.items()}
            for match in self._first.finditer(text):
                at = match.start()
                of_start = lengths.get(text[at : at + 2])
                if of_start is None:
                    continue
                for length in of_start:
                    candidate = text[at : at + length]
                    if candidate in self._by_text:
                        found.add(candidate)
        return sorted(found, key=lambda special: (-len(special.encode("utf-8", "surrogateescape")), self._by_text[special][0]))


def _cut(piece: str, special: str, token: int, attr: int, out: list[str | int]) -> None:
    parts = piece.split(special)
    for i, part in enumerate(parts):
        if i:
            out.append(token)
            if attr & RSTRIP:
                part = part.lstrip(_WHITESPACE)
        if attr & LSTRIP and i + 1 < len(parts):
            part = part.rstrip(_WHITESPACE)
        if part:
            out.append(part)
