"""Embeddings and ranks: the bodies of four dialects to `messages.Embed` and `Rank`, the runner's answers to their objects.

Nothing is cut without being said: the indices of texts that lost their end are in `truncated`.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from localrun.api.answer import new_id
from localrun.api.options import ModelDefaults, checked_options, merged
from localrun.api.vectors_schema import Document, EmbedBody, EmbeddingBody, EmbeddingsBody, RerankBody
from localrun.errors import BadRequest, ContextOverflow, LocalrunError, Unsupported, from_wire
from localrun.messages import Embed, Embedded, Rank, Ranked

MOST_TEXTS = 2048
"""Of one request, as at OpenAI: an answer is held in memory as a whole."""


# ---- requests -----------------------------------------------------------------------------------------------------------------


def _refuse_adapters(model: ModelDefaults) -> None:
    if model.adapters:
        raise Unsupported(f'"{model.name}" has adapters, which are not supported in embeddings and ranking', param="model")


def require_embedding(model: ModelDefaults) -> None:
    """Raises Unsupported where the model gives no vectors: a reranker, for one."""
    if not {"embedding", "completion"} & model.capabilities:
        raise Unsupported(f'"{model.name}" does not support embeddings', param="model")
    _refuse_adapters(model)


def require_rerank(model: ModelDefaults) -> None:
    """Raises Unsupported for any model that was not trained to rank."""
    if "rerank" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support rerank', param="model")
    _refuse_adapters(model)


def embed_request(body: EmbedBody, model: ModelDefaults, request_id: str) -> Embed | None:
    """What /api/embed asks for; None: nothing but the model in memory. Raises BadRequest."""
    texts = [body.input] if isinstance(body.input, str) and body.input else list(body.input)
    _check_count(len(texts), "input")
    if not texts:
        return None
    return Embed(
        request_id=request_id,
        texts=texts,
        dimensions=body.dimensions,
        truncate=body.truncate,
        num_ctx=merged(checked_options(body.options), model)["num_ctx"],
        priority=body.priority,
    )


def embeddings_request(body: EmbeddingsBody, model: ModelDefaults, request_id: str) -> Embed | None:
    """What /api/embeddings asks for; None: nothing but the model in memory. Raises BadRequest."""
    if not body.prompt:
        return None
    num_ctx = merged(checked_options(body.options), model)["num_ctx"]
    return Embed(request_id=request_id, texts=[body.prompt], normalize=False, num_ctx=num_ctx)


def embedding_request(body: EmbeddingBody, model: ModelDefaults, request_id: str) -> Embed:
    """What /v1/embeddings asks for. Raises BadRequest for an empty input."""
    given = [body.input] if isinstance(body.input, str) else body.input
    if given and isinstance(given[0], int):
        given = [given]
    if not given or not all(given):
        raise BadRequest("input must not be empty, and hold no empty text", param="input")
    _check_count(len(given), "input")
    shared: dict[str, Any] = {
        "request_id": request_id,
        "dimensions": body.dimensions or 0,
        "truncate": body.truncate,
        "num_ctx": body.num_ctx or model.num_ctx,
        "priority": body.priority,
    }
    if isinstance(given[0], str):
        return Embed(texts=given, **shared)
    return Embed(tokens=given, **shared)  # type: ignore[arg-type]


def rank_request(body: RerankBody, model: ModelDefaults, request_id: str) -> Rank:
    """What /v1/rerank asks for. Raises BadRequest."""
    _check_count(len(body.documents), "documents")
    return Rank(
        request_id=request_id,
        query=body.query,
        documents=[document.text if isinstance(document, Document) else document for document in body.documents],
        truncate=body.truncate,
        num_ctx=body.num_ctx or model.num_ctx,
        priority=body.priority,
    )


def check_dimensions(request: Embed, width: int) -> None:
    """Raises BadRequest where more values are asked for than the model's vectors have. width 0: not known."""
    if width and request.dimensions > width:
        raise BadRequest(f"dimensions: the model's vectors have {width} values, {request.dimensions} were asked for", param="dimensions")


def too_long(error: ContextOverflow) -> LocalrunError:
    """The error for a text that does not fit, in the words that Ollama's clients look for."""
    return from_wire(error.code, f"the input length exceeds the context length: {error}", error.param or "input")


def _check_count(count: int, param: str) -> None:
    if count > MOST_TEXTS:
        raise BadRequest(f"{param}: at most {MOST_TEXTS} are taken at a time, there are {count}", param=param)


# ---- replies ------------------------------------------------------------------------------------------------------------------


def vectors_of(embedded: Embedded) -> list[list[float]]:
    """n lists of `width` values. Raises LocalrunError for a runner's answer that is not of that size."""
    return [_floats(row).tolist() for row in _rows(embedded)]


def _rows(embedded: Embedded) -> list[bytes]:
    size = 4 * embedded.width
    if len(embedded.data) != embedded.n * size:
        raise LocalrunError(f"the runner sent {len(embedded.data)} bytes for {embedded.n} vectors of {embedded.width} values")
    return [embedded.data[start : start + size] for start in range(0, len(embedded.data), size)]


def _floats(row: bytes) -> array[float]:
    values = array("f")
    values.frombytes(row)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _truncated(indices: Sequence[int]) -> dict[str, Any]:
    return {"truncated": list(indices)} if indices else {}


def embed_reply(model: str, embedded: Embedded | None, total_s: float, load_s: float) -> dict[str, Any]:
    """/api/embed's; times in seconds. embedded None: nothing was asked for."""
    return {
        "model": model,
        "embeddings": vectors_of(embedded) if embedded else [],
        "total_duration": round(total_s * 1e9),
        "load_duration": round(load_s * 1e9),
        "prompt_eval_count": sum(embedded.prompt_tokens) if embedded else 0,
        **_truncated(embedded.truncated if embedded else ()),
    }


def embeddings_reply(embedded: Embedded | None) -> dict[str, Any]:
    """/api/embeddings'."""
    if embedded is None:
        return {"embedding": []}
    return {"embedding": vectors_of(embedded)[0], **_truncated(embedded.truncated)}


def embedding_reply(body: EmbeddingBody, embedded: Embedded) -> dict[str, Any]:
    """/v1/embeddings': values, or base64 of float32, little-endian."""
    coded: list[Any]
    if body.encoding_format == "base64":
        coded = [base64.b64encode(row).decode("ascii") for row in _rows(embedded)]
    else:
        coded = vectors_of(embedded)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(coded)],
        "model": body.model,
        "usage": _usage(embedded.prompt_tokens),
        **_truncated(embedded.truncated),
    }


def rank_reply(body: RerankBody, request: Rank, ranked: Ranked) -> dict[str, Any]:
    """/v1/rerank's: the best first, equal ones in the order given."""
    if len(ranked.scores) != len(request.documents):
        raise LocalrunError(f"the runner sent {len(ranked.scores)} scores for {len(request.documents)} documents")
    order = sorted(range(len(ranked.scores)), key=lambda index: -ranked.scores[index])[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": ranked.scores[index]}
        if body.return_documents:
            result["document"] = {"text": request.documents[index]}
        results.append(result)
    return {
        "id": new_id("rerank-"),
        "object": "list",
        "model": body.model,
        "results": results,
        "usage": _usage(ranked.prompt_tokens),
        **_truncated(ranked.truncated),
    }


def _usage(prompt_tokens: Sequence[int]) -> dict[str, int]:
    total = sum(prompt_tokens)
    return {"prompt_tokens": total, "total_tokens": total}
