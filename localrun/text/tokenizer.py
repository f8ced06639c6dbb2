"""A model's tokenizer, built from the vocabulary in its file: text to token ids and back.

    tokenizer = load_tokenizer(gguf)
    ids = tokenizer.encode("Hello", add_special=True, parse_special=False)
    tokenizer.decode(ids)                                     # b"Hello"

What is common to all kinds of vocabulary is here: special tokens are cut out first, ids are put in front and behind as the file says, and
pieces are put together again. How plain text becomes tokens is in one file per kind. The format's reference for all of it is llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from localrun.models.gguf import GGUFFile, printable
from localrun.models.params import Keys
from localrun.text.bpe import BytePairEncoder, decode_bytes
from localrun.text.pretokenizers import PRE_TOKENIZERS, Family
from localrun.text.rwkv import RwkvEncoder, unescape
from localrun.text.special import SpecialTokens
from localrun.text.spm import SentencePieceEncoder
from localrun.text.unigram import UnigramEncoder
from localrun.text.utf8 import to_bytes, to_text
from localrun.text.vocab import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, Vocab, check_known_model, read_vocab
from localrun.text.wordpiece import WordPieceEncoder

_BEFORE_MARK = re.compile(rb" ([?!.,])")
_BEFORE_CONTRACTION = re.compile(rb" '(?=[sm]|re|ve)")


class Encoder(Protocol):
    """Plain text, without special tokens, to ids."""

    def encode(self, text: str, *, after_special: bool = True) -> list[int]: ...


class Tokenizer:
    """Text to ids and back. Immutable but for caches; safe to use from several threads."""

    def __init__(self, vocab: Vocab, encoder: Encoder) -> None:
        self.vocab = vocab
        self.n_vocab = len(vocab.tokens)
        self.bos_id = vocab.bos
        self.eos_id = vocab.eos
        self.eog_ids = vocab.eog
        self.add_bos = vocab.add_bos and vocab.bos is not None
        self.add_eos = vocab.add_eos and vocab.eos is not None
        self._encoder = encoder
        special = [(vocab.tokens[token], token, vocab.attr(token)) for token in vocab.special()]
        self._special = SpecialTokens(special)
        self._user_defined = SpecialTokens(entry for entry in special if not entry[2] & (CONTROL | UNKNOWN))
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special: put the ids in front and behind that the vocabulary asks for (BOS, EOS, SEP). parse_special: texts of control tokens in
        `text` become these tokens; otherwise they are plain text, and only user-defined tokens are recognised. Bytes that are no UTF-8 are
        accepted: byte fallback or U+FFFD, by kind of vocabulary.
        """
        matcher = self._special if parse_special else self._user_defined
        before, behind = self.around() if add_special else ([], [])
        ids = before
        after_special = True
        for piece in matcher.split(to_text(text)):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
            else:
                ids += self._encoder.encode(piece, after_special=after_special)
                after_special = False
        return ids + behind

    def between(self) -> list[int]:
        """Ids that stand between two texts that are read as one: what belongs behind the first, in RoBERTa's vocabularies twice (Liu et al.
        2019), or a separator where the vocabulary has no such thing.
        """
        behind = self.around()[1]
        if not behind:
            return [self.vocab.sep] if self.vocab.sep is not None else []
        return behind * 2 if self.vocab.tokens[behind[-1]] == "</s>" and self.around()[0] else behind

    def decode(
        self, ids: Iterable[int], *, remove_special: bool = False, unparse_special: bool = True, clean_spaces: bool | None = None
    ) -> bytes:
        """The text of `ids`, in bytes: it need not be valid UTF-8.

        remove_special: a BOS in front and an EOS behind that `encode` would have added are left out. unparse_special: control tokens are
        written as their texts; otherwise they are left out. clean_spaces: drop spaces before punctuation as some vocabularies ask; None: as
        the vocabulary says. Raises IndexError for an id outside the vocabulary.
        """
        ids = list(ids)
        strip_space = self.vocab.add_space_prefix
        if remove_special and self.add_bos and ids and ids[0] == self.bos_id:
            strip_space = False
            del ids[0]
        if remove_special and self.add_eos and ids and ids[-1] == self.eos_id:
            del ids[-1]
        pieces = [self.piece(token, special=unparse_special) for token in ids]
        if strip_space and pieces and pieces[0].startswith(b" "):
            pieces[0] = pieces[0][1:]
        text = b"".join(pieces)
        return _clean_spaces(text) if (self.vocab.clean_spaces if clean_spaces is None else clean_spaces) else text

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; nothing for control and unknown tokens unless `special`. Raises IndexError outside the vocabulary."""
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token id {token} is outside the vocabulary of {self.n_vocab}")
        if not special and self.vocab.attrs[token] & (CONTROL | UNKNOWN):
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def around(self) -> tuple[list[int], list[int]]:
        """Ids that belong in front of and behind a text."""
        vocab = self.vocab
        if vocab.model == "rwkv":
            return [], []
        if vocab.model == "bert":
            return [token for token in [vocab.bos] if token is not None], [token for token in [vocab.sep] if token is not None]
        before = [vocab.bos] if vocab.add_bos and vocab.bos is not None else []
        behind = [vocab.eos] if vocab.add_eos and vocab.eos is not None else []
        return before, behind

    def _read_piece(self, token: int) -> bytes:
        text, attr = self.vocab.tokens[token], self.vocab.attrs[token]
        if self.vocab.model == "rwkv":
            return unescape(text)
        if attr & (CONTROL | UNKNOWN | USER_DEFINED):
            return to_bytes(text)
        if attr & NORMAL:
            if self.vocab.model == "gpt2" and not self.vocab.escape_spaces:
                return decode_bytes(text)
            return to_bytes(text.replace(SPACE, " "))
        if attr & BYTE and text.startswith("<0x") and len(text) == 6:
            return bytes([int(text[3:5], 16)])
        return b""


_BPE_MODELS = ("gpt2", "gemma4", "whitespace")
_ENCODERS: dict[str, Callable[[Vocab], Encoder]] = {
    "llama": SentencePieceEncoder,
    "bert": WordPieceEncoder,
    "t5": UnigramEncoder,
    "rwkv": RwkvEncoder,
}


def load_tokenizer(gguf: GGUFFile, cache_dir: Path | None = None, digest: str = "") -> Tokenizer:
    """The tokenizer of an open model file. The file may be closed afterwards.

    cache_dir, digest: not used; no kind of vocabulary takes long enough to build that keeping it on disk would help.
    Raises ModelFileError: keys are missing or contradict each other, or the kind of tokenizer or pre-tokenizer is not supported.
    """
    model = check_known_model(gguf)
    if model in _BPE_MODELS:
        return _load_bpe(gguf, model)
    bert = model == "bert"
    vocab = read_vocab(gguf, add_bos=model in ("llama", "bert"), clean_spaces=bert, escape_spaces=True, add_sep=bert, no_bos=False)
    return Tokenizer(vocab, _ENCODERS[model](vocab))


def _load_bpe(gguf: GGUFFile, model: str) -> Tokenizer:
    keys = Keys(gguf)
    pre = "gemma4" if model == "gemma4" else keys.str("tokenizer.ggml.pre", "default")
    family: Family | None = PRE_TOKENIZERS.get(pre)
    if family is None:
        raise keys.error("tokenizer.ggml.pre", f"{printable(repr(pre))} is a pre-tokenizer that is not supported")
    vocab = read_vocab(
        gguf,
        add_bos=family.add_bos,
        clean_spaces=family.clean_spaces,
        escape_spaces=not family.byte_level and not family.drop_spaces,
        add_sep=family.add_sep,
        no_bos=family.no_bos,
    )
    if family.always_bos:
        vocab.add_bos = True
    # Kimi K2 joins by the tokens alone; its files need no merges.
    merges = keys.strings("tokenizer.ggml.merges", []) if pre == "kimi-k2" else keys.strings("tokenizer.ggml.merges")
    return Tokenizer(vocab, BytePairEncoder(vocab, family, merges))


def _clean_spaces(text: bytes) -> bytes:
    """Without the space before ?!., the spaces around a lone apostrophe and the one before 's 'm 're 've, in that order."""
    text = _BEFORE_MARK.sub(rb"\1", text)
    text = text.replace(b" ' ", b"'")
    return _BEFORE_CONTRACTION.sub(b"'", text)
