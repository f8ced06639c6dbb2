"""Answers of a given form: JSON, a JSON schema, a regular expression, a grammar. llguidance says which tokens may come next; here is what
is asked of it, and what its answers mean for a row of logits. Knows nothing of sampling or of where in the engine it is called.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.text.tokenizer import Tokenizer

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the parts of a JSON text: enough for any indentation, too little for a model that only wants to go on with blanks."""


class _Vocabulary:
    """A tokenizer in the shape that llguidance takes."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eog_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token in range(n_vocab):
            piece = tokenizer.piece(token) if token < tokenizer.n_vocab else b""
            if not piece:
                self.special_token_ids.append(token)
                piece = (tokenizer.piece(token, special=True) if token < tokenizer.n_vocab else b"") or b"<%d>" % token
            self.tokens.append(piece)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


class GrammarCompiler:
    """Of one model. The first use takes up to a second for a large vocabulary; later ones are quick. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._made: Any = None
        self._prepared = False

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
        is_error, complaints = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
        if is_error:
            complaint = _one_line(complaints[0] if complaints else "it is not valid")
            if "nimplemented" in complaint or "nknown format" in complaint or "not supported" in complaint:
                raise Unsupported(f"{param}: the {kind} asks for what is not supported: {complaint}", param=param)
            raise BadRequest(f"{param}: the {kind} is not valid: {complaint}", param=param)
        return Constraint(llguidance.LLMatcher(vocabulary, grammar, log_level=0), self._n_vocab)

    def _vocabulary(self) -> Any:
        with self._lock:
            if self._made is None:
                if not self._tokenizer.eog_ids:
                    raise Unsupported("format: this model has no token that ends an answer, which structured output needs", param="format")
                wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._n_vocab))
                self._made = llguidance.LLTokenizer(wrapped, eos_token=sorted(self._tokenizer.eog_ids), slices=[])
            return self._made

    def prepare(self) -> None:
        """Makes what all grammars need, and what makes strings in JSON quick: for a time when nobody waits, since it holds the interpreter
        for as long as it takes, up to two seconds for a large vocabulary. Without it, the first `compile` takes half of that.
        """
        if self._prepared or not self._tokenizer.eog_ids:
            return
        vocabulary = self._vocabulary().with_slices(llguidance.LLTokenizer.general_slices())
        with self._lock:
            self._made, self._prepared = vocabulary, True


class Constraint:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: Any, n_vocab: int) -> None:
        self._matcher = matcher
        self.n_vocab = n_vocab
        self._bits = llguidance.numpy.allocate_token_bitmask(1, n_vocab)

    @property
    def complete(self) -> bool:
        """Nothing more can come: the answer is done without an end-of-turn token."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """bool (n_vocab,): which tokens may come next. Raises LocalrunError when the grammar has become too much for its engine."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        self._check()
        return np.unpackbits(self._bits[0].view(np.uint8), count=self.n_vocab, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """The token has been chosen."""
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; mostly none."""
        tokens: Sequence[int] = self._matcher.compute_ff_tokens()
        return list(tokens)

    def take_back(self, n: int) -> None:
        """The last n tokens have not been chosen after all."""
        if n and not self._matcher.rollback(n):
            raise LocalrunError(f"structured output: {_one_line(self._matcher.get_error())}")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise LocalrunError(f"structured output: {_one_line(self._matcher.get_error())}")


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
