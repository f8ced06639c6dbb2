"""What handlers share: the settings, the store, the loaded models, and what is remembered of files. One for each daemon."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from localrun.api.models import LONGEST_ARRAY, FileFacts, capabilities
from localrun.api.options import ModelDefaults, model_options
from localrun.daemon.loader import Loader, Wanted
from localrun.daemon.metrics import Metrics
from localrun.errors import ModelFileRejected
from localrun.messages import Message, ToolCall
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.settings import Settings
from localrun.store import Store, StoredModel
from localrun.store.create import is_go_template

T = TypeVar("T")

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
        self._facts: dict[str, FileFacts] = {}
        self._short = ThreadPoolExecutor(8, thread_name_prefix="files")
        self._long = ThreadPoolExecutor(LONG_JOBS, thread_name_prefix="transfers")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Work of milliseconds that waits for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    def long_job(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Work that may take minutes; it is expected to look at what cancels it."""
        return asyncio.get_running_loop().run_in_executor(self._long, work)

    async def stored(self, name: str) -> StoredModel:
        """The model of that name. Raises what Store.get raises."""
        return await self.in_thread(lambda: self.store.get(name))

    async def facts(self, stored: StoredModel) -> FileFacts:
        """What the model's file says of itself, read once. Raises ModelFileRejected."""
        known = self._facts.get(stored.model_digest)
        if known is None:
            known = await self.in_thread(lambda: read_facts(stored))
            self._facts[stored.model_digest] = known
        return known

    async def defaults(self, stored: StoredModel, asked_for: str) -> ModelDefaults:
        """What the stored model brings to a request that called it `asked_for`. Raises ModelFileRejected."""
        facts = await self.facts(stored)
        template = stored.template
        if template is not None and facts.chat_template and is_go_template(template):
            # A model of Ollama's: its template is Go's, and the file carries the one that its authors wrote.
            template = None
        return ModelDefaults(
            name=asked_for,
            params=stored.params,
            system=stored.system,
            template=template,
            messages=tuple(_message(one) for one in stored.messages),
            capabilities=frozenset(capabilities(facts, template)),
            num_ctx=self.settings.context_length,
        )

    async def close(self) -> None:
        """Ends everything that runs: transfers are told to stop, runners are stopped."""
        self.closing.set()
        await self.loader.close()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def wanted(stored: StoredModel, num_thread: int | None) -> Wanted:
    """The model as the loader wants it described. num_thread: the request's; else the model's own, if it has one."""
    threads = num_thread if num_thread is not None else model_options(stored.params).get("num_thread", 0)
    return Wanted(name=stored.name, path=stored.model_path, digest=stored.model_digest, num_thread=threads)


def read_facts(stored: StoredModel) -> FileFacts:
    """Opens the file. Raises ModelFileRejected."""
    try:
        with open_gguf(stored.model_path) as gguf:
            long = {key for key, value in gguf.metadata.items() if isinstance(value, list) and len(value) > LONGEST_ARRAY}
            template = gguf.metadata.get("tokenizer.chat_template")
            return FileFacts(
                metadata={key: value for key, value in gguf.metadata.items() if key not in long},
                long_arrays=frozenset(long),
                parameter_count=sum(_product(tensor.shape) for tensor in gguf.tensors.values()),
                chat_template=template if isinstance(template, str) else None,
                tensors=[{"name": name, "type": tensor.type, "shape": list(tensor.shape)} for name, tensor in gguf.tensors.items()],
            )
    except ModelFileError as error:
        raise ModelFileRejected(str(error)) from error


def read_long_arrays(stored: StoredModel) -> dict[str, Any]:
    """The arrays that facts leave out. Raises ModelFileRejected."""
    try:
        with open_gguf(stored.model_path) as gguf:
            return {key: list(value) for key, value in gguf.metadata.items() if isinstance(value, list) and len(value) > LONGEST_ARRAY}
    except ModelFileError as error:
        raise ModelFileRejected(str(error)) from error


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _message(stored: dict[str, Any]) -> Message:
    """A MESSAGE of a Modelfile as it lies in the store, in Ollama's shape."""
    calls = [
        ToolCall(id=str(call.get("id", "")), name=str(call["function"]["name"]), arguments=call["function"].get("arguments", {}))
        for call in stored.get("tool_calls") or []
    ]
    return Message(role=str(stored.get("role", "user")), content=str(stored.get("content", "")), tool_calls=calls or None)
