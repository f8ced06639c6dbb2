"""SentencePiece's 'llama' model: characters are merged into pieces, best score first, until none is left; what is no piece becomes bytes.

Merges never reach across a place where no piece of the vocabulary has those two neighbouring characters. Before a word (U+2581 stands for
the space) that is nearly always so, which lets a text be cut into words that are merged, and remembered, one by one with the same result.
"""

from __future__ import annotations

import re

from localrun.text.merging import WordCache, merge
from localrun.text.utf8 import is_utf8, raw_characters, to_bytes
from localrun.text.vocab import SPACE, Vocab, neighbours_of_space


class SentencePieceEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocab: Vocab) -> None:
        self._ids = vocab.ids
        self._scores = vocab.scores
        self._unknown = [] if vocab.unk is None else [vocab.unk]
        self._space_prefix = vocab.add_space_prefix
        joined = neighbours_of_space(vocab.tokens)
        self._cut = re.compile(f"(?<=[^{SPACE}{re.escape(joined)}])(?={SPACE})")
        self._words = WordCache(self._encode_word)

    def encode(self, text: str, *, after_special: bool = True) -> list[int]:
        """Ids of `text`, whose bytes that are no UTF-8 are lone surrogates.

        after_special: the text stands at the beginning or after a special token, where vocabularies with add_space_prefix put a space.
        """
        if self._space_prefix and after_special:
            text = " " + text
        text = text.replace(" ", SPACE)
        # A byte that is no UTF-8 may announce a character that takes in a space, so then there are no safe cuts.
        words = self._cut.split(text) if is_utf8(text) else [text]
        return self._words.encode(words)

    def _encode_word(self, word: str) -> list[int]:
        out: list[int] = []
        for symbol in merge(raw_characters(word), self._cost):
            token = self._ids.get(symbol)
            if token is None:
                for byte in to_bytes(symbol):
                    token = self._ids.get(f"<0x{byte:02X}>")
                    if token is None:
                        token = self._ids.get(chr(byte))
                    out += self._unknown if token is None else [token]
            else:
                out.append(token)
        return out

    def _cost(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]
