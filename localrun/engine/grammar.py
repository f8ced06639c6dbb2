"""Answers of a given form: JSON, a JSON schema, a regular expression, a grammar. llguidance says which tokens may come next; here is what
is asked of it, and what its answers mean for a row of logits. Knows nothing of sampling or of where in the engine it is called.
"""

from __future__ import annotations

import threading
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from localrun.engine.llg import Matcher, Vocabulary
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.text.tokenizer import Tokenizer

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the parts of a JSON text: enough for any indentation, too little for a model that only wants to go on with blanks."""


def _made(tokenizer: Tokenizer, n_vocab: int) -> Vocabulary:
    pieces, special = [], []
    for token in range(n_vocab):
        piece = tokenizer.piece(token) if token < tokenizer.n_vocab else b""
        if not piece:
            special.append(token)
            piece = (tokenizer.piece(token, special=True) if token < tokenizer.n_vocab else b"") or b"<%d>" % token
        pieces.append(piece)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=False)

    return Vocabulary(pieces, special, sorted(tokenizer.eog_ids), encode)


class GrammarCompiler:
    """Of one model. The first use takes up to a second for a large vocabulary, later ones are quick; nothing else waits for it. Safe to use
    from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._made: Vocabulary | None = None

    def compile(self, wanted: str | dict[str, Any]) -> Constraint:
        """What `Generate.format` asks for: "json" (an object), a JSON schema, {"regex": ...}, or {"grammar": ...} in Lark's or llama.cpp's
        notation.

        Raises Unsupported for a keyword of a schema that is not implemented, BadRequest for what is no schema, regex or grammar.
        """
        grammar, kind = _grammar(wanted)
        return self._compiled(grammar, kind, "format")

    def compile_calls(self, lark: str) -> Constraint:
        """A reply that calls tools, as text/callgrammar.py writes it. Raises Unsupported for a keyword of a tool's schema that is not
        implemented, BadRequest for what is no schema."""
        return self._compiled(str(llguidance.LLMatcher.grammar_from_lark(lark)), "schema of a tool", "tools")

    def _compiled(self, grammar: str, kind: str, param: str) -> Constraint:
        vocabulary = self._vocabulary()
        complaint = vocabulary.complaint(grammar)
        if complaint is not None:
            complaint = _one_line(complaint)
            if "nimplemented" in complaint or "nknown format" in complaint or "not supported" in complaint:
                raise Unsupported(f"{param}: the {kind} asks for what is not supported: {complaint}", param=param)
            raise BadRequest(f"{param}: the {kind} is not valid: {complaint}", param=param)
        return Constraint(vocabulary.matcher(grammar), self._n_vocab)

    def _vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._made is None:
                if not self._tokenizer.eog_ids:
                    raise Unsupported("format: this model has no token that ends an answer, which structured output needs", param="format")
                self._made = _made(self._tokenizer, self._n_vocab)
            return self._made

    def prepare(self) -> None:
        """Makes what all grammars need, which the first `compile` would wait for."""
        if self._tokenizer.eog_ids:
            self._vocabulary()


class Constraint:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Matcher, n_vocab: int) -> None:
        self._matcher = matcher
        self.n_vocab = n_vocab
        self._bits = np.zeros(-(-n_vocab // 32), np.uint32)
        self._check(matcher.error is None)

    @property
    def complete(self) -> bool:
        """Nothing more can come: the answer is done without an end-of-turn token."""
        return self._matcher.stopped

    def allowed(self) -> NDArray[np.bool_]:
        """bool (n_vocab,): which tokens may come next. Raises LocalrunError when the grammar has become too much for its engine."""
        self._check(self._matcher.mask(self._bits))
        return np.unpackbits(self._bits.view(np.uint8), count=self.n_vocab, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """The token has been chosen."""
        self._check(self._matcher.consume(token))

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; mostly none."""
        return self._matcher.forced()

    def take_back(self, n: int) -> None:
        """The last n tokens have not been chosen after all."""
        self._check(not n or self._matcher.roll_back(n))

    def _check(self, went_well: bool) -> None:
        if not went_well:
            raise LocalrunError(f"structured output: {_one_line(self._matcher.error or 'the engine of grammars gave up')}")


def _grammar(wanted: str | dict[str, Any]) -> tuple[str, str]:
    """llguidance's form of it, and what to call it in an error."""
    try:
        if wanted == "json":
            return _from_schema({"type": "object"}), "JSON schema"
        if isinstance(wanted, str):
            raise BadRequest(f'format: "{wanted}" is none; expected "json" or a JSON schema', param="format")
        if wanted.keys() == {"regex"} and isinstance(wanted["regex"], str):
            return str(llguidance.LLMatcher.grammar_from_regex(wanted["regex"])), "regular expression"
        if wanted.keys() == {"grammar"} and isinstance(wanted["grammar"], str):
            return str(llguidance.LLMatcher.grammar_from_lark(any_to_lark(wanted["grammar"]))), "grammar"
        return _from_schema(wanted), "JSON schema"
    except (ValueError, GbnfToLarkError) as error:
        raise BadRequest(f"format: {_one_line(str(error))}", param="format") from None


def _from_schema(schema: dict[str, Any]) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE}))


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
