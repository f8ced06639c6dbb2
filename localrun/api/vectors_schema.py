"""Request bodies of the endpoints that give vectors or ranks: Ollama's, OpenAI's, and the one that Jina and Cohere share. A sentence for
each field; see fields.py for what the three words mean."""

from __future__ import annotations

from typing import Any, Literal

from localrun.api.fields import Body, accepted, honoured, refused

KeepAlive = int | float | str

_KEEP_ALIVE = "How long the model stays loaded: seconds or a duration; below 0: for ever."
_THREADS = "Extra: threads of the model."
_PRIORITY = "Extra: lower goes first; each level counts as much as 30 seconds of waiting."


class EmbedBody(Body):
    """POST /api/embed: a vector of length 1 for each text."""

    model: str = honoured(..., "Name of the model.")
    input: str | list[str] = honoured("", "A text, or several, which are read together. Without any: loads the model.")
    truncate: bool = honoured(True, "false: a text longer than the context is an error; else it loses its end, and `truncated` says so.")
    dimensions: int = honoured(0, "Only the first so many values of each vector; 0: all.", ge=0)
    keep_alive: KeepAlive | None = honoured(None, _KEEP_ALIVE)
    options: dict[str, Any] = honoured({}, "num_ctx, num_thread, num_thread_batch; the others are checked, and no vector depends on them.")
    priority: int = honoured(0, "localrun's own: lower goes first; each level counts as much as 30 seconds of waiting.")


class EmbeddingsBody(Body):
    """POST /api/embeddings: Ollama's older form, one text. The vector is as the model gives it, of no particular length."""

    model: str = honoured(..., "Name of the model.")
    prompt: str = honoured("", "The text. Without it: loads the model.")
    keep_alive: KeepAlive | None = honoured(None, _KEEP_ALIVE)
    options: dict[str, Any] = honoured({}, "num_ctx, num_thread, num_thread_batch; the others are checked, and no vector depends on them.")


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    model: str = honoured(..., "Name of the model.")
    input: str | list[str] | list[int] | list[list[int]] = honoured(..., "Text or token ids, or a list of either, read together.")
    encoding_format: Literal["float", "base64"] = honoured("float", "base64: float32 values, little-endian.")
    dimensions: int | None = honoured(None, "Only the first so many values of each vector.", ge=1)
    user: str = accepted("", "Without effect: names your user to a provider.")
    truncate: bool = honoured(False, "Extra: true: a text longer than the context loses its end; else it is an error.")
    num_ctx: int = honoured(0, "Extra: most tokens of a text; 0: as many as fit.", ge=0)
    num_thread: int | None = honoured(None, _THREADS, ge=0, le=1024)
    keep_alive: KeepAlive | None = honoured(None, "Extra: how long the model stays loaded after the request.")
    priority: int = honoured(0, _PRIORITY)


class Document(Body):
    """A document as an object."""

    text: str = honoured(..., "Its text.")


class RerankBody(Body):
    """POST /v1/rerank: how well documents answer a query, by a model that was trained to say so."""

    model: str = honoured(..., "Name of the model.")
    query: str = honoured(..., "What is asked.", min_length=1)
    documents: list[str | Document] = honoured(..., "Texts, or objects with a `text`.", min_length=1)
    top_n: int | None = honoured(None, "Only the best so many; else all.", ge=1)
    return_documents: bool = honoured(False, "Repeat each document's text beside its score.")
    truncate: bool = honoured(True, "Extra: false: a document that does not fit beside the query is an error; else it loses its end.")
    num_ctx: int = honoured(0, "Extra: most tokens of a query and a document; 0: as many as fit.", ge=0)
    num_thread: int | None = honoured(None, _THREADS, ge=0, le=1024)
    keep_alive: KeepAlive | None = honoured(None, "Extra: how long the model stays loaded after the request.")
    priority: int = honoured(0, _PRIORITY)
    max_tokens_per_doc: int | None = refused("Cutting documents to a length of one's own; num_ctx bounds query and document together.")
    max_chunks_per_doc: int | None = refused("Ranking documents in pieces.", harmless=(1,))
    rank_fields: list[str] | None = refused("Documents with fields.", harmless=(["text"],))
