"""What handlers share: the settings, the store, the loaded models, and what is remembered of files. One for each daemon."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from localrun.api.infill import infill_of
from localrun.api.models import LONGEST_ARRAY, FileFacts
from localrun.api.options import ModelDefaults, model_options
from localrun.daemon.loader import Draft, Loader, Wanted
from localrun.daemon.metrics import Metrics
from localrun.errors import BadRequest, LocalrunError, ModelFileRejected
from localrun.messages import Message, ToolCall
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf
from localrun.models.pooling import ability
from localrun.settings import Settings
from localrun.store import Store, StoredModel
from localrun.store.facts import facts_of
from localrun.store.projectors import usable

T = TypeVar("T")

log = logging.getLogger(__name__)

LONG_JOBS = 16
"""Pulls, creates and uploads at a time; one more waits."""


@dataclass
class Activity:
    """Whether anybody is there."""

    open: int = 0
    """Requests being answered."""
    last: float = field(default_factory=time.monotonic)
    """When the latest one began or ended."""


class Services:
    """Made inside the event loop that serves; `close` it there."""

    def __init__(self, settings: Settings, store: Store, loader: Loader, activity: Activity) -> None:
        self.settings = settings
        self.store = store
        self.loader = loader
        self.activity = activity
        self.metrics = Metrics()
        loader.on_loaded = self.metrics.load_took
        self.metrics.watch(lambda: sum(one.loaded is not None for one in loader.residents()))
        self.closing = threading.Event()
        self._facts: dict[tuple[str, str | None, tuple[Path, ...]], FileFacts] = {}
        self._short = ThreadPoolExecutor(8, thread_name_prefix="files")
        self._long = ThreadPoolExecutor(LONG_JOBS, thread_name_prefix="transfers")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Work of milliseconds that waits for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    def long_job(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Work that may take minutes; it is expected to look at what cancels it. How it ended is whoever's who waits for it: where nobody
        does any more, because the client went, nobody is told."""
        job = asyncio.get_running_loop().run_in_executor(self._long, work)
        job.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return job

    async def stored(self, name: str) -> StoredModel:
        """The model of that name. Raises what Store.get raises."""
        return await self.in_thread(lambda: self.store.get(name))

    async def facts(self, stored: StoredModel, template: str | None = None) -> FileFacts:
        """What the model's file says of itself, and can do with the template that holds, read once. Raises ModelFileRejected.

        template: in place of the Modelfile's.
        """
        override = template if template is not None else stored.template
        key = (stored.model_digest, override, tuple(stored.projectors))
        known = self._facts.get(key)
        if known is None:
            known = await self.in_thread(lambda: read_facts(stored, override))
            self._facts[key] = known
        return known

    async def draft(self, stored: StoredModel, asked_for: str | None) -> Draft | None:
        """The model that guesses ahead for a stored one: the request's, else its own, if it has one; empty: none. Raises what Store.get
        raises, ModelFileRejected."""
        name = asked_for if asked_for is not None else str(model_options(stored.params).get("draft", ""))
        if not name:
            return None
        found = await self.stored(name)
        if found.model_path == stored.model_path:
            raise BadRequest(f'draft: "{name}" is the model itself; a draft model must be a smaller one', param="draft")
        return Draft(found.name, found.model_path, found.model_digest, (await self.facts(found)).memory)

    async def defaults(self, stored: StoredModel, asked_for: str) -> ModelDefaults:
        """What the stored model brings to a request that called it `asked_for`. Raises ModelFileRejected."""
        facts = await self.facts(stored)
        return ModelDefaults(
            name=asked_for,
            params=stored.params,
            system=stored.system,
            template=stored.template,
            messages=tuple(_message(one) for one in stored.messages),
            capabilities=frozenset(facts.capabilities),
            fill=facts.fill,
            num_ctx=self.settings.context_length,
            adapters=tuple(str(path) for path in stored.adapters),
        )

    def prune(self) -> None:
        """Removes blobs that no model needs. What goes wrong is for the log: nobody asked for it."""
        try:
            for digest in self.store.prune():
                log.info("removed blob %s, which no model needs", digest)
        except LocalrunError as error:
            log.warning("blobs that no model needs stay: %s", error)

    async def close(self) -> None:
        """Ends everything that runs: transfers are told to stop, runners are stopped."""
        self.closing.set()
        await self.loader.close()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def wanted(
    stored: StoredModel,
    facts: FileFacts,
    num_thread: int | None,
    draft: Draft | None = None,
    asked: Mapping[str, Any] = MappingProxyType({}),
) -> Wanted:
    """The model as the loader wants it described. num_thread, and what `asked` says: the request's; else the model's own, if it has one."""
    own = model_options(stored.params)
    given = {**own, **asked}
    return Wanted(
        name=stored.name,
        path=stored.model_path,
        digest=stored.model_digest,
        num_thread=num_thread if num_thread is not None else own.get("num_thread", 0),
        num_thread_batch=given.get("num_thread_batch", 0),
        memory=facts.memory,
        draft=draft,
        projector=facts.projector,
        gpu_layers=_gpu_layers(stored, own, asked),
        kv_cache_type=given.get("kv_cache_type", ""),
        rope_context=given.get("num_ctx", 0),
        rope_limit=_rope_limit(facts),
    )


def _gpu_layers(stored: StoredModel, own: Mapping[str, Any], asked: Mapping[str, Any]) -> int | None:
    """See Wanted. Adapters act on the CPU only."""
    if stored.adapters:
        return 0
    values = (options[name] for options in (asked, own) for name in ("num_gpu", "gpu_layers") if name in options)
    return next(values, None)


def _rope_limit(facts: FileFacts) -> int:
    """See Wanted."""
    if not any(tensor["name"] == "rope_factors_long.weight" for tensor in facts.tensors):
        return 0
    limit = facts.metadata.get(f"{facts.architecture}.rope.scaling.original_context_length", 0)
    return limit if isinstance(limit, int) else 0


def read_facts(stored: StoredModel, override: str | None) -> FileFacts:
    """Opens the file. override: the template in place of its own. Raises ModelFileRejected."""
    try:
        with open_gguf(stored.model_path) as gguf:
            long = {key for key, value in gguf.metadata.items() if isinstance(value, list) and len(value) > LONGEST_ARRAY}
            template = gguf.metadata.get("tokenizer.chat_template")
            can, fill = _abilities(gguf, override)
            projector = usable(stored.projectors, gguf) if "completion" in can else None
            return FileFacts(
                metadata={key: value for key, value in gguf.metadata.items() if key not in long},
                long_arrays=frozenset(long),
                parameter_count=sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
                chat_template=template if isinstance(template, str) else None,
                capabilities=(*can, "vision") if projector is not None else can,
                projector=projector,
                fill=fill,
                memory=facts_of(gguf),
                tensors=[{"name": name, "type": tensor.type, "shape": list(tensor.shape)} for name, tensor in gguf.tensors.items()],
            )
    except ModelFileError as error:
        raise _rejected(error, stored) from error


def _abilities(gguf: GGUFFile, override: str | None) -> tuple[tuple[str, ...], Callable[[str, str], str] | None]:
    """What a model can do, and how a text is filled into the middle. The import is here: it brings the template language."""
    from localrun.text.gochat import GoChatTemplate
    from localrun.text.template import TemplateError, chat_template_for

    able = ability(gguf.metadata)
    if able != "completion":
        return (able,), None
    infill = infill_of(gguf.metadata)
    fill: Callable[[str, str], str] | None = infill.fill if infill else None
    try:
        template = chat_template_for(gguf, override)
    except TemplateError:
        return ("completion", *(["insert"] if fill else [])), fill  # whoever chats with it is told what is wrong
    if isinstance(template, GoChatTemplate) and template.supports_suffix:
        fill = template.fill
    found = {"tools": template.supports_tools, "thinking": template.supports_thinking, "insert": fill is not None}
    return ("completion", *(name for name, has in found.items() if has)), fill


def read_long_arrays(stored: StoredModel) -> dict[str, Any]:
    """The arrays that facts leave out. Raises ModelFileRejected."""
    try:
        with open_gguf(stored.model_path) as gguf:
            return {key: list(value) for key, value in gguf.metadata.items() if isinstance(value, list) and len(value) > LONGEST_ARRAY}
    except ModelFileError as error:
        raise _rejected(error, stored) from error


def _rejected(error: ModelFileError, stored: StoredModel) -> ModelFileRejected:
    """Where the file lies is nothing to a client, who knows it by its model's name."""
    return ModelFileRejected(str(error).replace(str(stored.model_path), stored.name))


def _message(stored: dict[str, Any]) -> Message:
    """A MESSAGE of a Modelfile as it lies in the store, in Ollama's shape."""
    calls = [
        ToolCall(id=str(call.get("id", "")), name=str(call["function"]["name"]), arguments=call["function"].get("arguments", {}))
        for call in stored.get("tool_calls") or []
    ]
    return Message(role=str(stored.get("role", "user")), content=str(stored.get("content", "")), tool_calls=calls or None)
