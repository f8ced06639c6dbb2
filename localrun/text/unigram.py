"""SentencePiece's unigram model (T5 and others): of all ways to cut a text into pieces, the one with the best sum of log-probabilities.

(Kudo 2018, arXiv:1804.10959.) Found by dynamic programming from left to right. Before that the text is normalized with the rules in the
file: a table of replacements stored as a double array, in which walking from byte to byte finds the longest replaceable prefix
(Kanda 2018, "Space- and Time-Efficient String Dictionaries").
"""

from __future__ import annotations

import re
import struct

from localrun.models.errors import ModelFileError
from localrun.text.utf8 import REPLACEMENT, lenient_length, to_bytes
from localrun.text.vocab import NORMAL, SPACE, UNUSED, USER_DEFINED, Vocab, neighbours_of_space

_UNKNOWN_PENALTY = 10.0
_CACHED_WORDS = 50_000
_NOT_NORMAL = re.compile(b"[^\\x%02x]" % NORMAL)
_REPLACEMENT = REPLACEMENT.encode()


class UnigramEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocab: Vocab) -> None:
        """Raises ModelFileError when there are no scores, no unknown token, or the normalization rules are damaged."""
        if not vocab.scores:
            raise ModelFileError(vocab.path, "tokenizer.ggml.scores", "is missing; a 't5' vocabulary chooses pieces by score")
        if vocab.unk is None:
            raise ModelFileError(vocab.path, "tokenizer.ggml.unknown_token_id", "is missing; a 't5' vocabulary needs one")
        self._unknown = vocab.unk
        self._pieces = vocab.ids
        self._scores = list(vocab.scores)
        normal_scores = list(vocab.scores)
        user_defined: list[str] = []
        for match in _NOT_NORMAL.finditer(vocab.attrs):
            token = match.start()
            text, attr = vocab.tokens[token], vocab.attrs[token]
            if not attr & NORMAL:
                normal_scores[token] = float("inf")
            if not attr & (NORMAL | USER_DEFINED | UNUSED):
                if self._pieces is vocab.ids:
                    self._pieces = dict(vocab.ids)
                del self._pieces[text]
            if attr & USER_DEFINED:
                self._scores[token] = 0.0
                user_defined.append(text)
        self._unknown_score = _float32(min(normal_scores) - _UNKNOWN_PENALTY)
        self._longest = {text[0]: len(text) for text in sorted(self._pieces, key=len)}
        self._normalizer = _Normalizer(vocab, user_defined)
        crossing = neighbours_of_space(vocab.tokens)
        self._cut = re.compile(f"(?<=[^{SPACE}{re.escape(crossing)}])(?={SPACE})")
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str, *, after_special: bool = True) -> list[int]:
        """Ids of `text`; neighbouring unknown characters are one token. after_special: not used by this kind."""
        normalized = self._normalizer.normalize(to_bytes(text))
        out: list[int] = []
        if not normalized:
            return out
        # No piece reaches across these cuts, so the best cutting of the whole is made of the best of each part.
        for word in self._cut.split(normalized):
            ids = self._known.get(word)
            if ids is None:
                if len(self._known) >= _CACHED_WORDS:
                    self._known.clear()
                ids = self._known[word] = self._best(word)
            if ids[0] == self._unknown and out[-1:] == [self._unknown]:
                ids = ids[1:]
            out += ids
        return out

    def _best(self, text: str) -> list[int]:
        n = len(text)
        best = [-float("inf")] * (n + 1)
        best[0] = 0.0
        came_from = [0] * (n + 1)
        by_token = [self._unknown] * (n + 1)
        for start in range(n):
            base = best[start]
            single = False
            for end in range(start + 1, min(n, start + self._longest.get(text[start], 0)) + 1):
                token = self._pieces.get(text[start:end])
                if token is None:
                    continue
                single = single or end == start + 1
                score = base + self._scores[token]
                if score > best[end]:
                    best[end] = score
                    came_from[end] = start
                    by_token[end] = token
            if not single and base + self._unknown_score > best[start + 1]:
                best[start + 1] = base + self._unknown_score
                came_from[start + 1] = start
                by_token[start + 1] = self._unknown
        out: list[int] = []
        at = n
        while at:
            token = by_token[at]
            if not (token == self._unknown and out[-1:] == [token]):
                out.append(token)
            at = came_from[at]
        out.reverse()
        return out


class _Normalizer:
    """Replaces what the rules in the file name, and writes spaces as U+2581."""

    def __init__(self, vocab: Vocab, user_defined: list[str]) -> None:
        self._prefix = vocab.add_space_prefix
        self._merge_spaces = vocab.remove_extra_whitespaces
        self._kept = {text[:length].encode() for text in user_defined for length in range(1, len(text) + 1)}
        self._units: tuple[int, ...] = ()
        self._replacements = b""
        if vocab.charsmap:
            size = int.from_bytes(vocab.charsmap[:4], "little")
            if len(vocab.charsmap) < 4 or size % 4 or size + 4 >= len(vocab.charsmap) or not vocab.charsmap.endswith(b"\0"):
                raise ModelFileError(vocab.path, "tokenizer.ggml.precompiled_charsmap", "is damaged: its parts do not fit its length")
            self._units = struct.unpack_from(f"<{size // 4}I", vocab.charsmap, 4)
            self._replacements = vocab.charsmap[4 + size :]
        self._path = vocab.path

    def normalize(self, data: bytes) -> str:
        out: list[str] = []
        in_word = prefixed = False
        for piece in self._replaced(data):
            for character in piece.decode("utf-8", "replace"):
                if character == " ":
                    in_word = False
                    if not self._merge_spaces:
                        out.append(SPACE)
                    continue
                if not in_word:
                    in_word = True
                    if (self._prefix and not prefixed) or self._merge_spaces:
                        out.append(SPACE)
                        prefixed = True
                out.append(character)
        return "".join(out)

    def _replaced(self, data: bytes) -> list[bytes]:
        out: list[bytes] = []
        at = 0
        while at < len(data):
            end = at
            while data[at : end + 1] in self._kept and end < len(data):
                end += 1
            if end > at:
                out.append(data[at:end])
                at = end
                continue
            length, replacement = self._longest_rule(data, at)
            if not length:
                length = lenient_length(data, at)
                replacement = data[at : at + length] if length else _REPLACEMENT
            out.append(replacement)
            at += length or 1
        return out

    def _longest_rule(self, data: bytes, at: int) -> tuple[int, bytes]:
        """Bytes that the longest rule matching at `at` takes in, and what it puts there; (0, b"") if none matches."""
        if not self._units:
            return 0, b""
        units = self._units
        found = offset = 0
        try:
            node = _base(units[0])
            for end in range(at, len(data)):
                byte = data[end]
                if not byte:
                    break
                node ^= byte
                unit = units[node]
                if unit & 0x800000FF != byte:
                    break
                node ^= _base(unit)
                if unit >> 8 & 1:
                    found = end + 1 - at
                    offset = units[node] & 0x7FFFFFFF
        except IndexError:
            raise ModelFileError(self._path, "tokenizer.ggml.precompiled_charsmap", "is damaged: it points outside itself") from None
        if not found:
            return 0, b""
        if offset >= len(self._replacements):
            raise ModelFileError(self._path, "tokenizer.ggml.precompiled_charsmap", "is damaged: it points outside itself")
        return found, self._replacements[offset : self._replacements.index(b"\0", offset)]


def _base(unit: int) -> int:
    """Where the children of a double array's node lie, relative to it."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
