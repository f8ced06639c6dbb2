"""Byte-pair encoding as GPT-2 style vocabularies use it: cut into words, write bytes as characters, merge.

The cuts are found by the `tokenizers` package's regex engine (see pretokenizers.py); the merging is done here. Building that package's
own BPE model takes 0.3 s for 150,000 tokens and needs every merge to be made of tokens, which files do not promise; two dictionaries take
0.05 s.
"""

from __future__ import annotations

from itertools import repeat
from typing import Final

from localrun.models.errors import ModelFileError
from localrun.models.gguf import printable
from localrun.text.merging import WordCache, merge
from localrun.text.pretokenizers import Family, Splitter
from localrun.text.utf8 import WHITESPACE, code_points
from localrun.text.vocab import SPACE, Vocab


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's way of writing bytes as printable characters: those that are printable stand for themselves, the rest follow from U+0100."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = (byte for byte in range(256) if byte not in shown)
    return {byte: chr(byte) for byte in sorted(shown)} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}


BYTE_TO_CHARACTER: Final = _byte_alphabet()
CHARACTER_TO_BYTE: Final = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


class BytePairEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocab: Vocab, family: Family, merges: list[str]) -> None:
        """merges: pairs "left right", best first. Raises ModelFileError when one is no pair."""
        self._ids = vocab.ids
        self._family = family
        self._escape_spaces = vocab.escape_spaces
        self._lowercase = family.drop_spaces and vocab.lowercase
        self._splitter = Splitter(family.steps)
        self._ranks = dict(zip(merges, range(len(merges))))
        if len(self._ranks) != len(merges):  # of equal pairs the first counts
            self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1)))
        # The parts hold no space themselves, being written in byte-level BPE's alphabet; a first character may be one.
        for i, space in enumerate(map(str.find, merges, repeat(" "), repeat(1))):
            if space < 0:
                problem = f"item {i} is {printable(repr(merges[i]))}, not two parts with a space between"
                raise ModelFileError(vocab.path, "tokenizer.ggml.merges", problem)
        self._words = WordCache(self._encode_word)

    def encode(self, text: str, *, after_special: bool = True) -> list[int]:
        """Ids of `text`, whose bytes that are no UTF-8 are lone surrogates. after_special: not used by this kind."""
        text = code_points(text)
        if self._escape_spaces:
            text = text.replace(" ", SPACE)
        words = self._splitter.split(text.lower() if self._lowercase else text)
        if self._family.drop_spaces:
            words = [word for word in words if word[0] not in WHITESPACE]
        elif self._family.space_before_words:
            words = _with_space_before(words)
        return self._words.encode(words)

    def _encode_word(self, word: str) -> list[int]:
        ids, family = self._ids, self._family
        if family.byte_level:
            word = word.encode("utf-8", "surrogatepass").decode("latin-1").translate(BYTE_TO_CHARACTER)
        if family.ignore_merges or (family.whole_line_breaks and not word.strip("\n")):
            whole = ids.get(word)
            if whole is not None:
                return [whole]
        out: list[int] = []
        for symbol in merge(list(word), self._rank):
            token = ids.get(symbol)
            if token is not None:
                out.append(token)
            elif family.byte_level:
                out += [ids[character] for character in symbol if character.isascii() and character in ids]
            else:
                names = (f"<0x{byte:02X}>" for byte in symbol.encode("utf-8", "surrogatepass"))
                out += [ids[name] for name in names if name in ids]
        return out

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")


def _with_space_before(lines: list[str]) -> list[str]:
    """Lines cut into words that begin with U+2581; one that a line lacks is put in front. Line breaks stay as they are."""
    words: list[str] = []
    for line in lines:
        first, *rest = line.split(SPACE)
        if first:
            words.append(first if first[0] == "\n" else SPACE + first)
        words += [SPACE + word for word in rest]
    return words


def decode_bytes(text: str) -> bytes:
    """The bytes that a token's text stands for in GPT-2's alphabet. A character outside it is kept as it is, in UTF-8."""
    try:
        return bytes([CHARACTER_TO_BYTE[character] for character in text])
    except KeyError:
        out = bytearray()
        for character in text:
            byte = CHARACTER_TO_BYTE.get(character)
            if byte is None:
                out += character.encode("utf-8", "surrogateescape")
            else:
                out.append(byte)
        return bytes(out)
