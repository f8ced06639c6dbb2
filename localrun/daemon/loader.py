"""Which models are in memory. Loads on demand, one load at a time for each file; keeps a model for its keep_alive after its last request.

When as many models are loaded as may be, or memory does not hold one more beside them, the idle one that was used least lately makes room;
while none is idle, the newcomer waits. One that memory does not hold alone is refused with the numbers. Models that share a weight file
share a runner: it stays for as long as one of their names does, each of which has a keep_alive of its own.

Runs in one event loop. Knows neither HTTP nor dialects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrun.daemon.runners import LoadHook, Progress, Runner
from localrun.durations import FOREVER
from localrun.engine.memory import available_memory
from localrun.errors import Busy, LoadFailed, LocalrunError, from_wire
from localrun.messages import Inspected, Load, Loaded, LoadProgress
from localrun.settings import Settings
from localrun.store.facts import Facts
from localrun.store.plan import LEAST_CONTEXT, plan, shortfall

log = logging.getLogger(__name__)

ROOM_TO_SEE = 256 << 20
"""Bytes that the encoder of images takes besides its weights."""
LEAST_BESIDE_WEIGHTS = 512 << 20
"""Bytes that a model of which only the file's size is known takes besides: a small KV cache, buffers, the interpreter."""


@dataclass(frozen=True)
class Draft:
    """A smaller model that guesses ahead for another."""

    name: str
    path: Path
    digest: str = ""
    memory: Facts | None = None


@dataclass(frozen=True)
class Wanted:
    """A model a request needs."""

    name: str
    path: Path
    digest: str = ""
    """Of the weight file."""
    num_thread: int = 0
    """0: whatever it runs with."""
    num_thread_batch: int = 0
    """0: whatever it runs with."""
    memory: Facts | None = None
    """What its header tells of the memory it takes; None: not known, the size of the file is taken for it."""
    draft: Draft | None = None
    """None: whatever it runs with."""
    gpu_layers: int | None = None
    """None: whatever it runs with, the setting's at first."""
    kv_cache_type: str = ""
    """Empty: whatever it runs with, the setting's at first."""
    rope_context: int = 0
    """Of a model with rotary factors for short and for long contexts: the context that is asked for; 0: whatever it runs with."""
    rope_limit: int = 0
    """Longest context that the short ones are for; 0: it has none."""
    projector: Path | None = None
    """The file with which it sees images; None: whatever it runs with."""


@dataclass
class Tenant:
    """One of the names that a runner answers to."""

    wanted: Wanted
    in_flight: int = 0
    keep_alive: float = 0.0
    until: float | None = None
    """Event loop time; None while requests hold it."""
    expires_at: float | None = None
    """Unix time; None while requests hold it or when it stays for ever."""
    leaving: bool = False
    """Goes when its requests end."""


@dataclass(eq=False)
class Resident:
    """A model in memory, or on its way in or out."""

    wanted: Wanted
    runner: Runner
    num_thread: int
    num_thread_batch: int
    ready: asyncio.Future[Loaded]
    kv_cache_type: str = "f16"
    projector: Path | None = None
    draft: Draft | None = None
    rope_context: int = 0
    gpu_layers: int = -1
    in_flight: int = 0
    """Requests that hold it, those that wait for it to load included."""
    tenants: dict[str, Tenant] = field(default_factory=dict)
    """By model name."""
    last_used: float = field(default_factory=time.monotonic)
    progress: LoadProgress | None = None
    listeners: list[Progress] = field(default_factory=list)
    token_texts: dict[int, str] = field(default_factory=dict)
    """Texts of tokens that somebody has asked for."""
    inspected: Inspected | None = None
    """How its engine stood when it last said so."""
    timer: asyncio.TimerHandle | None = None
    slots: asyncio.Semaphore | None = None
    """Taken by each exchange that has it answer; None: as many as the runner takes."""
    leaving: bool = False
    """Takes no new request: it is being stopped, or will be when the last one ends."""
    loading: asyncio.Task[None] | None = None
    stopping: asyncio.Task[None] | None = None

    @property
    def expires_at(self) -> float | None:
        """Unix time; None while requests hold it or when it stays for ever."""
        times = [one.expires_at for one in self.tenants.values()]
        return None if None in times else max((time for time in times if time is not None), default=None)

    @property
    def loaded(self) -> Loaded | None:
        done = self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None
        return self.ready.result() if done else None


def _difference(resident: Resident, wanted: Wanted) -> str:
    """What a request asks of the runner that it was not loaded with, in words; empty: nothing."""
    if wanted.num_thread not in (0, resident.num_thread):
        return f"{wanted.num_thread} threads"
    if wanted.num_thread_batch not in (0, resident.num_thread_batch):
        return f"{wanted.num_thread_batch} threads for prompts"
    if wanted.gpu_layers not in (None, resident.gpu_layers) and (resident.loaded is None or resident.loaded.cards):
        return f"{wanted.gpu_layers} layers on cards"
    if wanted.draft is not None and (resident.draft is None or wanted.draft.path != resident.draft.path):
        return f"the draft model {wanted.draft.name}"
    if wanted.projector is not None and wanted.projector != resident.projector:
        return "a projector for images"
    if wanted.kv_cache_type not in ("", resident.kv_cache_type):
        return f"a KV cache of {wanted.kv_cache_type}"
    if wanted.rope_limit and wanted.rope_context:
        is_long = not resident.rope_context or resident.rope_context > wanted.rope_limit
        if is_long != (wanted.rope_context > wanted.rope_limit):
            return f"the rotary factors for {'short' if is_long else 'long'} contexts"
    return ""


class Loader:
    """Made inside the event loop; `close` it there."""

    def __init__(
        self,
        settings: Settings,
        hook: LoadHook = None,
        make_runner: Callable[[LoadHook], Runner] = Runner,
        available: Callable[[], int] = available_memory,
    ) -> None:
        self._settings = settings
        self._available = available
        self._hook = hook
        self._make_runner = make_runner
        self._residents: dict[str, Resident] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._waiting = 0
        self._closed = False
        self.on_loaded: Callable[[str, float], None] = lambda name, seconds: None
        """Hears of every model that was loaded, and how long it took."""
        self._tasks: set[asyncio.Task[None]] = set()

    def residents(self) -> list[Resident]:
        """Everything in memory or on its way in, the ones that stay longest first."""
        present = [one for one in self._residents.values() if one.stopping is None]
        return sorted(present, key=lambda one: -(FOREVER if one.expires_at is None else one.expires_at))

    @property
    def in_use(self) -> bool:
        """Whether any request holds a model."""
        return any(one.in_flight for one in self._residents.values())

    @contextlib.asynccontextmanager
    async def use(self, wanted: Wanted, keep_alive: float | None = None, on_progress: Progress | None = None) -> AsyncIterator[Resident]:
        """Holds the model in memory for the length of the block, loading it first if need be.

        keep_alive: seconds it stays afterwards; None: as set. Raises Busy when too many wait, LoadFailed and what the runner reports.
        """
        resident = await self._claim(wanted)
        try:
            if on_progress is not None and not resident.ready.done():
                resident.listeners.append(on_progress)
            await asyncio.shield(resident.ready)
            yield resident
        finally:
            if on_progress in resident.listeners:
                resident.listeners.remove(on_progress)
            self._release(resident, wanted.name, self._settings.keep_alive if keep_alive is None else keep_alive)

    async def unload(self, path: Path, name: str | None = None) -> bool:
        """Gives a model up, after the requests it is answering. Returns at once; False when it is not in memory.

        name: only what is called so; its weights stay for as long as they have another name in memory.
        """
        resident = self._residents.get(str(path))
        if resident is None:
            return False
        if name is not None and resident.tenants.keys() - {name}:
            tenant = resident.tenants.get(name)
            if tenant is not None and tenant.in_flight:
                tenant.leaving = True
            elif tenant is not None:
                del resident.tenants[name]
            return tenant is not None
        resident.leaving = True
        if not resident.in_flight:
            self._stop(resident)
        return True

    async def close(self) -> None:
        """Stops every runner, whatever it is doing. Bounded by runners.STOP_S."""
        self._closed = True
        for resident in list(self._residents.values()):
            self._stop(resident)
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._notify()

    # ---- one model ----

    async def _claim(self, wanted: Wanted) -> Resident:
        """The resident for `wanted`, held once more. Waits for room, and for another configuration of the same model to end."""
        if self._waiting >= self._settings.max_queue:
            raise Busy()
        self._waiting += 1
        try:
            while True:
                if self._closed:
                    raise Busy("the server is shutting down")
                resident = self._residents.get(str(wanted.path))
                if resident is not None and resident.runner.gone.is_set():
                    self._stop(resident)
                if resident is None:
                    resident = self._begin(wanted) if self._make_room(wanted) else None
                elif not resident.leaving and (other := _difference(resident, wanted)):
                    log.info("%s: loading again with %s", wanted.name, other)
                    resident.leaving = True
                    if not resident.in_flight:
                        self._stop(resident)
                if resident is not None and not resident.leaving:
                    return self._hold(resident, wanted)
                await self._change()
        finally:
            self._waiting -= 1

    def _hold(self, resident: Resident, wanted: Wanted) -> Resident:
        if not resident.ready.done() and resident.in_flight >= self._settings.max_queue:
            raise Busy()
        resident.wanted = wanted
        resident.in_flight += 1
        tenant = resident.tenants.setdefault(wanted.name, Tenant(wanted))
        tenant.in_flight += 1
        tenant.until = tenant.expires_at = None
        tenant.leaving = False
        return resident

    def _release(self, resident: Resident, name: str, keep_alive: float) -> None:
        resident.in_flight -= 1
        resident.last_used = time.monotonic()
        tenant = resident.tenants[name]
        tenant.in_flight -= 1
        tenant.keep_alive = 0.0 if tenant.leaving else keep_alive
        if resident.stopping is None:
            if resident.leaving and not resident.in_flight:
                self._stop(resident)
            elif resident.ready.done() and not tenant.in_flight:
                self._rest(tenant)
                self._arm(resident)
        self._notify()

    @staticmethod
    def _rest(tenant: Tenant) -> None:
        """Starts the clock of a name that no request holds."""
        tenant.until = asyncio.get_running_loop().time() + tenant.keep_alive
        tenant.expires_at = None if tenant.keep_alive == FOREVER else time.time() + max(tenant.keep_alive, 0)

    def _arm(self, resident: Resident) -> None:
        """Lets go of the names whose time is over, of the model with the last one, and sees to it that this is looked at again."""
        if resident.stopping is not None:
            return
        if resident.timer is not None:
            resident.timer.cancel()
            resident.timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for name, tenant in list(resident.tenants.items()):
            if tenant.until is not None and tenant.until <= now:
                del resident.tenants[name]
        if not resident.tenants:
            self._stop(resident)
            return
        ends = [one.until for one in resident.tenants.values() if one.until is not None and one.keep_alive != FOREVER]
        if ends:
            resident.timer = loop.call_at(min(ends), self._arm, resident)

    def _make_room(self, wanted: Wanted) -> bool:
        """Whether one more model may be loaded now; if not, and one is idle, sends that one away.

        Raises LoadFailed, with the numbers, when the model would not fit alone (unless settings say to try all the same).
        """
        if not self._residents:
            lacking = self._lacking(wanted, self._available())
            if lacking and not self._settings.overcommit:
                raise LoadFailed(lacking)
            return True
        if len(self._residents) < self._settings.max_loaded_models and self._fits(wanted):
            return True
        idle = [one for one in self._residents.values() if not one.in_flight and one.ready.done() and one.stopping is None]
        if idle and not any(one.stopping is not None for one in self._residents.values()):
            self._stop(min(idle, key=lambda one: one.last_used))
        return False

    def _fits(self, wanted: Wanted) -> bool:
        """Whether memory holds the model beside the others, those included that have not taken theirs yet."""
        promised = sum(self._needs(one.wanted) for one in self._residents.values() if not one.ready.done())
        available = self._available() - promised
        if wanted.memory is not None:
            return not self._lacking(wanted, available)
        return self._needs(wanted) <= available

    def _lacking(self, wanted: Wanted, available: int) -> str:
        """Why the model does not fit into so much memory; empty when it does, or when nobody knows."""
        if wanted.memory is None:
            return ""
        beside = "" if wanted.draft is None else f" (beside its draft model {wanted.draft.name})"
        lacking = shortfall(wanted.memory, available - self._needs_beside(wanted), wanted.kv_cache_type or self._settings.kv_cache_type)
        return lacking and lacking.replace("model requires", f"model{beside} requires", 1)

    def _needs(self, wanted: Wanted) -> int:
        """Bytes that a model will take, at least."""
        return self._needs_alone(wanted, wanted.kv_cache_type) + self._needs_beside(wanted)

    def _needs_beside(self, wanted: Wanted) -> int:
        """Bytes that its draft model and its projector will take; 0 without."""
        needs = 0 if wanted.draft is None else self._needs_alone(wanted.draft, wanted.kv_cache_type)
        if wanted.projector is not None:
            with contextlib.suppress(OSError):
                needs += wanted.projector.stat().st_size + ROOM_TO_SEE
        return needs

    def _needs_alone(self, model: Wanted | Draft, kv_cache_type: str) -> int:
        if model.memory is not None:
            kv_type = kv_cache_type or self._settings.kv_cache_type
            return plan(model.memory, available=self._available(), num_ctx=LEAST_CONTEXT, kv_type=kv_type).total
        try:
            return model.path.stat().st_size + LEAST_BESIDE_WEIGHTS
        except OSError:
            return LEAST_BESIDE_WEIGHTS

    # ---- beginning and end ----

    def _begin(self, wanted: Wanted) -> Resident:
        num_thread = wanted.num_thread or self._settings.num_thread
        batch = wanted.num_thread_batch or self._settings.num_thread_batch
        resident = Resident(wanted, self._make_runner(self._hook), num_thread, batch, asyncio.get_running_loop().create_future())
        resident.kv_cache_type = wanted.kv_cache_type or self._settings.kv_cache_type
        resident.draft = wanted.draft
        resident.gpu_layers = self._settings.gpu_layers if wanted.gpu_layers is None else wanted.gpu_layers
        resident.rope_context = wanted.rope_context if wanted.rope_limit else 0
        resident.projector = wanted.projector
        if self._settings.num_parallel:
            resident.slots = asyncio.Semaphore(self._settings.num_parallel)
        self._residents[str(wanted.path)] = resident
        resident.loading = self._task(self._load(resident))
        return resident

    async def _load(self, resident: Resident) -> None:
        wanted = resident.wanted
        load = Load(
            path=str(wanted.path),
            cache_dir=str(self._settings.cache),
            digest=wanted.digest,
            num_thread=resident.num_thread,
            num_thread_batch=resident.num_thread_batch,
            tune=self._settings.tune,
            isa=self._settings.isa,
            kv_cache_type=resident.kv_cache_type,
            gpu_layers=resident.gpu_layers,
            num_ctx=resident.rope_context,
            max_queue=self._settings.max_queue,
            model_name=wanted.name,
            session_dir=str(self._settings.cache / "sessions"),
            session_bytes=self._settings.session_size << 20,
            projector=str(resident.projector) if resident.projector is not None else "",
            draft_path=str(resident.draft.path) if resident.draft is not None else "",
            draft_digest=resident.draft.digest if resident.draft is not None else "",
        )
        began = time.monotonic()
        try:
            loaded = await self._start(resident, load)
        except LocalrunError as error:
            log.warning("%s: not loaded: %s", wanted.name, error)
            # Where the file lies is nothing to a client, who knows it by its model's name.
            message = str(error).replace(str(wanted.path), wanted.name)
            if resident.projector is not None:
                message = message.replace(str(resident.projector), f"the projector of {wanted.name}")
            if resident.draft is not None:
                message = message.replace(str(resident.draft.path), resident.draft.name)
            self._settle(resident, from_wire(error.code, message, error.param))
        except Exception as error:
            log.exception("%s: not loaded", wanted.name)
            self._settle(resident, LoadFailed(f"{wanted.name} could not be loaded: {type(error).__name__}"))
        else:
            if resident.stopping is not None:
                return
            took = time.monotonic() - began
            text = "%s: loaded in %.2f s, %s, %d threads, %d tokens of KV cache"
            log.info(text, wanted.name, took, loaded.isa, loaded.num_thread, loaded.kv_tokens)
            where = f"{loaded.gpu_layers} of {loaded.n_layers} layers on cards"
            note = f"; {loaded.gpu_note}" if loaded.gpu_note else ""
            log.info("%s: %s%s", wanted.name, where if loaded.gpu_layers else "all layers on the CPU", note)
            self.on_loaded(wanted.name, took)
            resident.num_thread, resident.num_thread_batch = loaded.num_thread, loaded.num_thread_batch
            resident.ready.set_result(loaded)
            self._task(self._mourn(resident))
            for tenant in resident.tenants.values():
                if not tenant.in_flight:
                    self._rest(tenant)
            self._arm(resident)
            self._notify()

    async def _start(self, resident: Resident, load: Load) -> Loaded:
        """Raises LoadFailed when nothing has moved for `load_timeout`."""
        patience = self._settings.load_timeout or None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience) as limit:

                def heard(progress: LoadProgress) -> None:
                    resident.progress = progress
                    if patience is not None:
                        limit.reschedule(loop.time() + patience)
                    for listener in list(resident.listeners):
                        listener(progress)

                return await resident.runner.start(load, heard)
        except TimeoutError:
            raise LoadFailed(f"timed out waiting for {load.model_name} to load: no progress for {patience:g} seconds") from None

    def _settle(self, resident: Resident, error: LocalrunError) -> None:
        """A load failed: those who wait hear why, the process goes."""
        if not resident.ready.done():
            resident.ready.set_exception(error)
            resident.ready.exception()  # marks it as seen: there may be nobody waiting any more
        self._stop(resident)

    async def _mourn(self, resident: Resident) -> None:
        """Waits for the process to end; one that was not told to is no longer a place for requests."""
        await resident.runner.gone.wait()
        if resident.stopping is None:
            log.error("%s: its runner died", resident.wanted.name)
            self._stop(resident)

    def _stop(self, resident: Resident) -> None:
        """Begins the end of a model, once. It counts as present until its memory is free."""
        if resident.stopping is None:
            resident.leaving = True
            if resident.timer is not None:
                resident.timer.cancel()
            resident.stopping = self._task(self._end(resident))

    async def _end(self, resident: Resident) -> None:
        try:
            if not resident.ready.done():
                resident.ready.set_exception(LoadFailed(f"{resident.wanted.name} was unloaded while it was loading"))
                resident.ready.exception()
            await resident.runner.stop()
        finally:
            if self._residents.get(str(resident.wanted.path)) is resident:
                del self._residents[str(resident.wanted.path)]
            self._notify()

    # ---- bookkeeping ----

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _change(self) -> None:
        """Returns when anything has changed since it was called."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
