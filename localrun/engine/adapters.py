"""Adapters that requests name, by their files: read once, in the model for as long as requests hold them, and some while after.

Reading is done by whoever takes requests in, so that it holds up nobody's answer; what happens to the model is done between two passes, by
the engine's thread. Knows neither tokens nor blocks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from localrun.errors import Busy, ModelFileRejected
from localrun.models.errors import ModelFileError
from localrun.models.lora import Adapter
from localrun.models.model import MAX_ADAPTERS, Model

IDLE_BYTES = 1 << 30
"""Of adapters that nobody holds, so much stays in memory; the least recently used ones go first."""


@dataclass(eq=False)
class LoadedAdapter:
    """The adapters of some files, added up."""

    paths: tuple[str, ...]
    serial: int
    """Never given twice: what K/V computed with it are known by."""
    read: Adapter | None
    """Until it is in the model."""
    nbytes: int
    holders: int = 0
    number: int = 0
    """Of the model's; 0: not there yet."""
    used: int = 0


class AdapterShelf:
    """The adapters of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], LoadedAdapter] = {}
        self._serials = itertools.count(1)
        self._ticks = itertools.count(1)

    def __len__(self) -> int:
        return len(self._known)

    def take(self, paths: Sequence[str]) -> LoadedAdapter | None:
        """The adapter of those files, held once more: give it back with `release`. None without files.

        For one thread at a time. Raises ModelFileRejected for files that are no adapters of this model.
        """
        if not paths:
            return None
        key = tuple(paths)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                known.holders += 1
                return known
        try:
            read = self._model.read_adapter(paths)
        except ModelFileError as error:
            which = "the adapter" if len(paths) == 1 else f"adapter {1 + [str(path) for path in paths].index(error.path)}"
            # where it lies is nothing to a client
            raise ModelFileRejected(str(error).replace(error.path, which)) from error
        with self._lock:
            self._known[key] = LoadedAdapter(key, next(self._serials), read, read.nbytes, holders=1)
            return self._known[key]

    def bring_in(self, adapter: LoadedAdapter) -> None:
        """Has it in the model. For the engine's thread. Raises Busy when as many as can be are held by requests."""
        with self._lock:
            if adapter.number:
                return
            present = [one for one in self._known.values() if one.number]
            if len(present) >= MAX_ADAPTERS:
                idle = [one for one in present if not one.holders]
                if not idle:
                    raise Busy(f"{MAX_ADAPTERS} adapters are in use; no more are possible at a time")
                self._drop(min(idle, key=lambda one: one.used))
        assert adapter.read is not None
        adapter.number = self._model.add_adapter(adapter.read)
        adapter.read = None

    def release(self, adapter: LoadedAdapter | None) -> None:
        """One who held it does no longer. For the engine's thread; None is fine."""
        if adapter is None:
            return
        with self._lock:
            adapter.holders -= 1
            adapter.used = next(self._ticks)
            idle = sorted((one for one in self._known.values() if not one.holders), key=lambda one: one.used)
            excess = sum(one.nbytes for one in idle) - IDLE_BYTES
            for one in idle:
                if excess <= 0:
                    break
                excess -= one.nbytes
                self._drop(one)

    def _drop(self, adapter: LoadedAdapter) -> None:
        self._model.remove_adapter(adapter.number)
        del self._known[adapter.paths]
