"""Detokenizing one token at a time: text is given out as soon as its characters are whole."""

from __future__ import annotations

import codecs
from collections.abc import Container

from localrun.text.tokenizer import Tokenizer


class StreamDecoder:
    """The text of a growing list of tokens.

    What `push` and `flush` return, joined, is the bytes of the tokens' pieces decoded as UTF-8 with U+FFFD for what is invalid, that is
    `tokenizer.decode(ids, clean_spaces=False)` of a text that goes on from another (the first token keeps its leading space).
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool | Container[int] = False) -> None:
        """special: control tokens that appear as their texts: none, all, or these; the others are left out."""
        self._tokenizer = tokenizer
        self._special: Container[int] = (range(tokenizer.n_vocab) if special else ()) if isinstance(special, bool) else special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes, which may be none. Raises IndexError for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.piece(token, special=token in self._special))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD if a character was begun. The decoder can be used again afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
