"""WordPiece, the vocabulary of BERT: words and marks are separated, then each word is cut into the longest pieces from its front.

(Schuster and Nakajima 2012; Devlin et al. 2019, arXiv:1810.04805.) In GGUF files the piece that begins a word carries U+2581 in front
instead of the others carrying "##". The normalization is BERT's "uncased" one unless the file says otherwise.
"""

from __future__ import annotations

import unicodedata

from localrun.text.utf8 import WHITESPACE, code_points
from localrun.text.vocab import SPACE, Vocab

_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
"""Each of these is a word of its own. The sixth range begins at 2B920 where 2B820 was meant, in BERT's code and all that follow it."""


class WordPieceEncoder:
    """Text without special tokens to ids."""

    def __init__(self, vocab: Vocab) -> None:
        self._ids = vocab.ids
        self._longest = max(map(len, vocab.tokens))
        self._unknown = [] if vocab.unk is None else [vocab.unk]
        self._lowercase = vocab.lowercase
        self._strip_accents = vocab.strip_accents

    def encode(self, text: str, *, after_special: bool = True) -> list[int]:
        """Ids of `text`. after_special: not used by this kind."""
        out: list[int] = []
        for word in self._words(code_points(text)):
            out += self._encode_word(SPACE + word) or self._unknown
        return out

    def _encode_word(self, word: str) -> list[int]:
        """The longest pieces from the front; nothing if some part is no piece."""
        out: list[int] = []
        at = 0
        while at < len(word):
            for end in range(min(len(word), at + self._longest), at, -1):
                token = self._ids.get(word[at:end])
                if token is not None:
                    out.append(token)
                    at = end
                    break
            else:
                return []
        return out

    def _words(self, text: str) -> list[str]:
        words: list[str] = []
        word: list[str] = []

        def close() -> None:
            if word:
                words.append("".join(word))
                word.clear()

        for character in text:
            if self._strip_accents:
                # Only the first character of the decomposition is kept, as in the reference; what follows it is nearly always an accent.
                character = unicodedata.normalize("NFD", character)[0]
            if character in WHITESPACE:
                close()
                continue
            category = unicodedata.category(character)
            if character in "\0\ufffd" or (category[0] == "C" and category != "Cn") or (self._strip_accents and category[0] == "M"):
                continue
            single = category[0] == "P" or (category[0] == "S" and character < "\x7f") or _is_ideograph(ord(character))
            if self._lowercase:
                character = character.lower()[0]
            if single:
                close()
                words.append(character)
            else:
                word.append(character)
        close()
        return words


def _is_ideograph(code: int) -> bool:
    return code >= 0x3400 and any(first <= code <= last for first, last in _IDEOGRAPHS)
