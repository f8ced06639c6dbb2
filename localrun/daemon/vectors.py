"""The handlers of embeddings and ranking. Each checks its body against what the model can do, before the model is loaded, and asks its
runner one question. What is asked and how the answer is said is in api/vectors.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from localrun.api import vectors as dialect
from localrun.api.options import ModelDefaults, checked_options, keep_alive_seconds
from localrun.api.vectors_schema import EmbedBody, EmbeddingBody, EmbeddingsBody, RerankBody
from localrun.daemon.exchange import Exchange
from localrun.daemon.generation import hold
from localrun.daemon.loader import Resident
from localrun.errors import ContextOverflow, LocalrunError, ModelNotFound
from localrun.messages import Embed, Embedded, Ranked
from localrun.store import StoredModel

B = TypeVar("B", EmbedBody, EmbeddingsBody)


async def embed(x: Exchange, body: EmbedBody) -> None:
    """POST /api/embed."""
    embedded = await _embedded_for_ollama(x, body, dialect.embed_request)
    await x.json(dialect.embed_reply(body.model, embedded, time.monotonic() - x.began, x.load_s))


async def embeddings(x: Exchange, body: EmbeddingsBody) -> None:
    """POST /api/embeddings."""
    await x.json(dialect.embeddings_reply(await _embedded_for_ollama(x, body, dialect.embeddings_request)))


async def v1_embeddings(x: Exchange, body: EmbeddingBody) -> None:
    """POST /v1/embeddings."""
    stored = await x.services.stored(body.model)
    model = await x.services.defaults(stored, body.model)
    dialect.require_embedding(model)
    request = dialect.embedding_request(body, model, x.id)
    resident = await hold(x, stored, body.num_thread, keep_alive_seconds(body.keep_alive))
    await x.json(dialect.embedding_reply(body, await _embedded(x, resident, request)))


async def rerank(x: Exchange, body: RerankBody) -> None:
    """POST /v1/rerank, /rerank."""
    stored = await x.services.stored(body.model)
    model = await x.services.defaults(stored, body.model)
    dialect.require_rerank(model)
    request = dialect.rank_request(body, model, x.id)
    resident = await hold(x, stored, body.num_thread, keep_alive_seconds(body.keep_alive))
    await _take_slot(x, resident)
    ranked = await resident.runner.ask(x.id, request)
    if not isinstance(ranked, Ranked):
        raise LocalrunError(f"the runner answered a ranking with {type(ranked).__name__}")
    x.noted["prompt_tokens"] = sum(ranked.prompt_tokens)
    await x.json(dialect.rank_reply(body, request, ranked))


async def _embedded_for_ollama(x: Exchange, body: B, asked: Callable[[B, ModelDefaults, str], Embed | None]) -> Embedded | None:
    """What the runner says to what a body asks; None when it asks for nothing, which loads the model all the same."""
    options = checked_options(body.options)
    threads = {name: options[name] for name in ("num_thread_batch",) if name in options}
    stored = await _stored_for_ollama(x, body.model)
    model = await x.services.defaults(stored, body.model)
    dialect.require_embedding(model)
    request = asked(body, model, x.id)
    resident = await hold(x, stored, options.get("num_thread"), keep_alive_seconds(body.keep_alive), options=threads)
    return await _embedded(x, resident, request) if request is not None else None


async def _stored_for_ollama(x: Exchange, name: str) -> StoredModel:
    try:
        return await x.services.stored(name)
    except ModelNotFound:
        # Ollama's words differ from one endpoint to the next, and clients compare them
        raise ModelNotFound(f'model "{name}" not found, try pulling it first', param="model") from None


async def _embedded(x: Exchange, resident: Resident, request: Embed) -> Embedded:
    """The runner's answer. Raises what it reports; ContextOverflow in Ollama's words."""
    if resident.loaded is not None:
        dialect.check_dimensions(request, resident.loaded.n_embd)
    await _take_slot(x, resident)
    try:
        embedded = await resident.runner.ask(x.id, request)
    except ContextOverflow as error:
        raise dialect.too_long(error) from None
    if not isinstance(embedded, Embedded):
        raise LocalrunError(f"the runner answered an embedding with {type(embedded).__name__}")
    x.noted["prompt_tokens"] = sum(embedded.prompt_tokens)
    return embedded


async def _take_slot(x: Exchange, resident: Resident) -> None:
    if resident.slots is not None:
        await x.stack.enter_async_context(resident.slots)
