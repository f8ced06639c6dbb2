"""The handlers of localrun's own endpoints about models on disk: plans, pushes, bundles, the state of the store. Knows the store's
operations and how long ones are run; what is said is in api/storage.py."""

from __future__ import annotations

import asyncio
import io
import queue
import threading
from pathlib import Path

import psutil

from localrun.api import storage as said
from localrun.api.schema import PushBody
from localrun.api.storage import CheckBody, ExportBody, PartialsBody, PlanBody
from localrun.daemon import cards
from localrun.daemon.exchange import Exchange
from localrun.daemon.management import PARTS_WAITING, is_here, parts_end, transfer
from localrun.engine.bandwidth import bandwidth
from localrun.engine.memory import available_memory
from localrun.errors import BadRequest
from localrun.store import header
from localrun.store.bundle import Bundle, import_bundle
from localrun.store.check import Report, drop_partials
from localrun.store.check import check as check_store
from localrun.store.names import check_digest
from localrun.store.plan import cards_plan
from localrun.store.plan import plan as plan_of
from localrun.store.progress import Cancelled, Progress

_AHEAD = 8
"""Megabyte pieces of an export that are read before the client has taken them."""


async def plan(x: Exchange, body: PlanBody) -> None:
    """POST /api/plan."""
    settings = x.services.settings
    local = is_here(x)
    if not local and Path(body.model).is_absolute():
        raise BadRequest("paths are taken from clients on this machine only", param="model")

    def work() -> dict[str, object]:
        found = header.find(x.services.store, body.model, local=local, insecure=body.insecure)
        threads = settings.num_thread or _cores()
        speed = bandwidth(settings.cache, threads)
        made = plan_of(
            found.facts,
            available=available_memory(),
            num_ctx=body.num_ctx or settings.context_length,
            users=body.users,
            kv_type=body.kv_cache_type or settings.kv_cache_type,
            bandwidth=speed,
        )
        reply = said.plan_reply(body.model, found, made, threads, speed)
        there = cards_plan(made, cards.cards(), settings.gpu_layers, cards.usable())
        return reply if there is None else reply | {"gpu": there}

    await x.json(await x.services.long_job(work))


def _cores() -> int:
    """Physical cores that this process may use: what a runner takes unless it is told."""
    process = psutil.Process()
    allowed = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


async def push(x: Exchange, body: PushBody) -> None:
    """POST /api/push."""
    name = body.model or body.name
    if not name:
        raise BadRequest("model is required", param="model")
    await transfer(x, body.stream, lambda progress, cancelled: x.services.store.push(name, progress, cancelled, insecure=body.insecure))


# ---- bundles --------------------------------------------------------------------------------------------------------------------


async def export(x: Exchange, body: ExportBody) -> None:
    """POST /api/export."""
    bundle = await x.services.in_thread(lambda: Bundle(x.services.store, body.models))
    if body.offset > bundle.size:
        raise BadRequest(f"offset: the bundle has {bundle.size} bytes", param="offset")
    pieces: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
    stop = threading.Event()
    x.stack.callback(stop.set)

    def read() -> None:
        try:
            for piece in bundle.chunks(body.offset):
                while not stop.is_set() and not x.services.closing.is_set():
                    try:
                        pieces.put(piece, timeout=0.2)
                        break
                    except queue.Full:
                        continue
                else:
                    return
        finally:
            _put_last(pieces, stop)

    job = x.services.long_job(read)
    await x.begin_bytes("application/x-tar", bundle.size - body.offset, {"x-localrun-bundle-size": str(bundle.size)})
    while True:
        piece = await _next(pieces, job)
        if piece is None:
            break
        await x.piece(piece)
    await job
    await x.piece(b"", last=True)


def _put_last(pieces: queue.Queue[bytes | None], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            pieces.put(None, timeout=0.2)
            return
        except queue.Full:
            continue


async def _next(pieces: queue.Queue[bytes | None], job: asyncio.Future[None]) -> bytes | None:
    while True:
        try:
            return pieces.get_nowait()
        except queue.Empty:
            if job.done():
                job.result()
            await asyncio.sleep(0.002)


class _Arriving(io.RawIOBase):
    """The request's body as a file, for a thread. None ends it; set `broken` and it ends with an error."""

    def __init__(self, broken: threading.Event) -> None:
        self.parts: queue.Queue[bytes | None] = queue.Queue(PARTS_WAITING)
        self._broken = broken
        self._rest = b""
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._rest and not self._ended:
            part = self.parts.get()
            self._ended = part is None
            self._rest = part or b""
        if self._broken.is_set():
            raise EOFError("the upload broke off")
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


async def import_models(x: Exchange, body: None) -> None:
    """POST /api/import: the body is a bundle's bytes; the answer comes when all of it is in the store."""
    broken = threading.Event()
    file = _Arriving(broken)
    x.stack.callback(parts_end, file.parts, broken)
    stream = io.BufferedReader(file, 1 << 20)
    job = x.services.long_job(lambda: import_bundle(x.services.store, stream, lambda line: None, x.services.closing.is_set))
    async for part in x.raw_body():
        if not await _taken(file.parts, part, job):
            break
    await _taken(file.parts, None, job)
    await x.json({"status": "success", "models": await job})


async def _taken(parts: queue.Queue[bytes | None], part: bytes | None, job: asyncio.Future[list[str]]) -> bool:
    """Hands a part over, waiting while too many wait; False when nobody reads any more."""
    while not job.done():
        try:
            parts.put_nowait(part)
        except queue.Full:
            await asyncio.sleep(0.005)
        else:
            return True
    job.result()
    return False


# ---- the state of the store -----------------------------------------------------------------------------------------------------


async def check(x: Exchange, body: CheckBody) -> None:
    """POST /api/check."""
    reports: list[Report] = []

    def work(progress: Progress, cancelled: Cancelled) -> None:
        reports.append(check_store(x.services.store, body.repair, progress, cancelled))

    await transfer(x, body.stream, work, lambda: said.report_reply(reports[0]))


async def partials(x: Exchange, body: None) -> None:
    """GET /api/partials."""
    await x.json(said.partials_reply(await x.services.in_thread(x.services.store.blobs.partials)))


async def remove_partials(x: Exchange, body: PartialsBody) -> None:
    """DELETE /api/partials."""
    digest = check_digest(body.digest) if body.digest else ""
    await x.json(said.partials_reply(await x.services.in_thread(lambda: drop_partials(x.services.store, digest))))
