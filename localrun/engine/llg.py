"""llguidance's C interface (llguidance.h, which its Python module's library carries): what its Python classes do, without holding the
interpreter meanwhile. A vocabulary takes up to a second to be made, and streams go on beside that.

Knows bytes, token ids and grammars in llguidance's own form; nothing of requests. The interface is made to last: a structure says its size,
or is filled in by the library.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPECIAL = b"\xff"
"""Begins the name of a token that is no text."""
_MESSAGE_BYTES = 4096
_MOST_FORCED = 1024
_INIT_BYTES = 1024
"""More than LlgConstraintInit has, or will have: the library writes its defaults there."""
_LOG_LEVELS_AT = 8
"""Where it says, in two uint32, how much is logged."""
_TOKENIZE = ctypes.CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_size_t, POINTER(c_uint32), c_size_t)


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", c_size_t), ("vocab_size", c_uint32), ("tok_eos", c_uint32), ("token_lens", c_void_p), ("token_bytes", c_void_p),
        ("tokenizer_json", c_char_p), ("tokenize_assumes_string", c_bool), ("tokenize_fn", _TOKENIZE),
        ("use_approximate_greedy_tokenize_fn", c_bool), ("tokenize_user_data", c_void_p), ("slices", c_void_p),
        ("tok_eos_extra", c_void_p), ("tok_eos_extra_count", c_uint32),
    )  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llg_new_tokenizer_v2": (c_void_p, (POINTER(_TokenizerInit), c_char_p, c_size_t)),
    "llg_free_tokenizer": (None, (c_void_p,)),
    "llg_constraint_init_set_defaults": (None, (c_void_p, c_void_p)),
    "llg_validate_grammar": (c_int32, (c_void_p, c_char_p, c_char_p, c_char_p, c_size_t)),
    "llg_new_matcher": (c_void_p, (c_void_p, c_char_p, c_char_p)),
    "llg_free_matcher": (None, (c_void_p,)),
    "llg_matcher_compute_mask_into": (c_int32, (c_void_p, c_void_p, c_size_t)),
    "llg_matcher_consume_token": (c_int32, (c_void_p, c_uint32)),
    "llg_matcher_compute_ff_tokens": (c_int32, (c_void_p, c_void_p, c_size_t)),
    "llg_matcher_rollback": (c_int32, (c_void_p, c_size_t)),
    "llg_matcher_is_stopped": (c_bool, (c_void_p,)),
    "llg_matcher_is_error": (c_bool, (c_void_p,)),
    "llg_matcher_get_error": (c_char_p, (c_void_p,)),
}
_KIND = b"llguidance"


def _opened() -> ctypes.CDLL:
    import llguidance._lib

    library = ctypes.CDLL(llguidance._lib.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_library: ctypes.CDLL | None = None
_opening = threading.Lock()


def _lib() -> ctypes.CDLL:
    global _library
    with _opening:
        if _library is None:
            _library = _opened()
        return _library


class Vocabulary:
    """pieces: the bytes of each token, of those in `special` a name; eos: what ends an answer; encode: the tokens of a text.

    Raises ValueError for what the library refuses. Any thread may make one.
    """

    def __init__(self, pieces: Sequence[bytes], special: Iterable[int], eos: Sequence[int], encode: Callable[[str], list[int]]) -> None:
        self._lib = _lib()
        self.n = len(pieces)
        named = list(pieces)
        for token in special:
            named[token] = _SPECIAL + named[token]
        lengths = np.array([len(piece) for piece in named], np.uint32)
        content = b"".join(named)
        ends = np.array(eos[1:], np.uint32)
        self._tokenize = _TOKENIZE(lambda _, at, size, out, room: _written(encode(ctypes.string_at(at, size).decode()), out, room))
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit), vocab_size=self.n, tok_eos=eos[0], token_lens=lengths.ctypes.data,
            token_bytes=ctypes.cast(c_char_p(content), c_void_p), tokenize_assumes_string=True, tokenize_fn=self._tokenize,
            tok_eos_extra=ends.ctypes.data, tok_eos_extra_count=len(ends),
        )  # fmt: skip
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._address = self._lib.llg_new_tokenizer_v2(init, message, len(message))
        if not self._address:
            raise ValueError(message.value.decode("utf-8", "replace"))
        weakref.finalize(self, self._lib.llg_free_tokenizer, self._address)
        self._init = ctypes.create_string_buffer(_INIT_BYTES)
        self._lib.llg_constraint_init_set_defaults(self._init, self._address)
        ctypes.memset(ctypes.addressof(self._init) + _LOG_LEVELS_AT, 0, 8)

    def complaint(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None if nothing is."""
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        wrong: int = self._lib.llg_validate_grammar(self._init, _KIND, grammar.encode(), message, len(message))
        return (message.value.decode("utf-8", "replace") or "it is not valid") if wrong < 0 else None

    def matcher(self, grammar: str) -> Matcher:
        """At the grammar's beginning; see Matcher.error."""
        return Matcher(self, self._lib, self._lib.llg_new_matcher(self._init, _KIND, grammar.encode()))


class Matcher:
    """Where an answer is in its grammar. One thread at a time."""

    def __init__(self, vocabulary: Vocabulary, library: ctypes.CDLL, address: int) -> None:
        self._vocabulary = vocabulary  # must outlive it
        self._lib, self._address = library, address
        weakref.finalize(self, library.llg_free_matcher, address)

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None if it can."""
        if not self._lib.llg_matcher_is_error(self._address):
            return None
        said: bytes | None = self._lib.llg_matcher_get_error(self._address)
        return (said or b"unknown").decode("utf-8", "replace")

    @property
    def stopped(self) -> bool:
        """Nothing but an end can come."""
        return bool(self._lib.llg_matcher_is_stopped(self._address))

    def mask(self, bits: NDArray[np.uint32]) -> bool:
        """Fills uint32 (ceil(n / 32),): a bit for each token that may come next. False: see `error`."""
        return bool(self._lib.llg_matcher_compute_mask_into(self._address, bits.ctypes.data, bits.nbytes) == 0)

    def consume(self, token: int) -> bool:
        """The token has come. False: see `error`."""
        return bool(self._lib.llg_matcher_consume_token(self._address, token) == 0)

    def forced(self) -> list[int]:
        """The tokens that must come next; mostly none."""
        out = np.empty(_MOST_FORCED, np.uint32)
        n: int = self._lib.llg_matcher_compute_ff_tokens(self._address, out.ctypes.data, len(out))
        return [int(token) for token in out[: max(0, n)]]

    def roll_back(self, n: int) -> bool:
        """The last n tokens have not come after all. False: see `error`."""
        return bool(self._lib.llg_matcher_rollback(self._address, n) == 0)


def _written(tokens: list[int], out: Any, room: int) -> int:
    for i, token in enumerate(tokens[:room]):
        out[i] = token
    return len(tokens)
