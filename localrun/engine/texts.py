"""From an Embed or Rank message to a batch: tokenizes the texts, puts pairs together as the model was trained to read them, cuts what does
not fit. Runs beside the engine's loop.
"""

from __future__ import annotations

import re

from localrun.engine.parts import Parts
from localrun.engine.selection import Floats
from localrun.engine.vectors import Batch, embedded, ranked
from localrun.errors import BadRequest, ContextOverflow, Unsupported
from localrun.messages import Embed, Embedded, Rank, Ranked

_BLANK = re.compile(r"\{(query|document)\}")


class TextIntake:
    """`pool_tokens`: what the KV pool holds in all."""

    def __init__(self, parts: Parts, pool_tokens: int) -> None:
        info = parts.model.info
        self._tokenizer = parts.tokenizer
        self._info = info
        self._pair_template = parts.pair_template
        self._most_tokens = min(info.n_ctx_train or pool_tokens, pool_tokens)

    def embedding(self, message: Embed) -> Batch:
        """Raises BadRequest, ContextOverflow, Unsupported."""
        info = self._info
        if info.pooling == "rank" or not info.n_embd:
            raise Unsupported("this model gives no vectors" + ("; it ranks documents" if info.pooling == "rank" else ""))
        if (message.texts is None) == (message.tokens is None):
            raise BadRequest("exactly one of texts and tokens must be given", param="input")
        if not 0 <= message.dimensions <= info.n_embd:
            raise BadRequest(f"dimensions must be from 1 to {info.n_embd}, it is {message.dimensions}", param="dimensions")
        limit = self._limit(message.num_ctx)
        if message.texts is not None:
            behind = self._tokenizer.around()[1]
            rows = [self._tokenizer.encode(text) for text in message.texts]
        else:
            behind = []
            rows = [self._checked(row) for row in message.tokens or []]
        truncated = []
        for i, row in enumerate(rows):
            if not row:
                raise BadRequest(f"input {i} is empty", param="input")
            if len(row) > limit:
                if not message.truncate:
                    raise ContextOverflow(len(row), limit)
                rows[i] = _cut(row, behind, limit)
                truncated.append(i)
        lengths = [len(row) for row in rows]

        def answer(vectors: Floats) -> Embedded:
            return embedded(message, vectors, lengths, truncated)

        return Batch(message.request_id, rows, answer, info.whole, message.priority)

    def ranking(self, message: Rank) -> Batch:
        """Raises BadRequest, ContextOverflow, Unsupported."""
        if self._info.pooling != "rank":
            raise Unsupported("this model does not rank documents: it has no classification head")
        limit = self._limit(message.num_ctx)
        rows, truncated = [], []
        for i, document in enumerate(message.documents):
            row = self._pair(message.query, document)
            if len(row) > limit:
                if not message.truncate:
                    raise ContextOverflow(len(row), limit)
                row = self._cut_pair(message.query, document, len(row), limit)
                truncated.append(i)
            rows.append(row)
        lengths = [len(row) for row in rows]

        def answer(scores: Floats) -> Ranked:
            return ranked(message, scores, lengths, truncated)

        return Batch(message.request_id, rows, answer, self._info.whole, message.priority)

    def _limit(self, num_ctx: int) -> int:
        if num_ctx < 0:
            raise BadRequest(f"num_ctx must not be negative, it is {num_ctx}", param="num_ctx")
        return min(num_ctx, self._most_tokens) if num_ctx else self._most_tokens

    def _pair(self, query: str, document: str) -> list[int]:
        """Query and document as the model reads them: in the file's template, or one behind the other with what separates texts."""
        if self._pair_template:
            blanks = {"query": query, "document": document}
            return self._tokenizer.encode(_BLANK.sub(lambda blank: blanks[blank[1]], self._pair_template), add_special=False)
        before, behind = self._tokenizer.around()
        return [*before, *self._plain(query), *self._tokenizer.between(), *self._plain(document), *behind]

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def _cut_pair(self, query: str, document: str, needed: int, limit: int) -> list[int]:
        """The pair with so much of the document as fits. Raises ContextOverflow when the query alone does not."""
        tokens = self._plain(document)
        keep = len(tokens)
        while needed > limit:
            keep -= needed - limit
            if keep <= 0:
                raise ContextOverflow(needed, limit)
            row = self._pair(query, self._tokenizer.decode(tokens[:keep]).decode("utf-8", "ignore"))
            needed = len(row)
        return row

    def _checked(self, ids: list[int]) -> list[int]:
        for token in ids:
            if not 0 <= token < self._info.n_vocab:
                raise BadRequest(f"input: {token} is no token of this model, which has {self._info.n_vocab}", param="input")
        return list(ids)


def _cut(row: list[int], behind: list[int], limit: int) -> list[int]:
    """The first `limit` tokens, what belongs behind a text being kept at the end."""
    kept = max(0, limit - len(behind))
    return row[:kept] + behind[: limit - kept]
