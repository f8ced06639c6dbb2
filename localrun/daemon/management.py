"""The handlers that tell of models and change the store. Knows the store's operations and who is loaded; knows no dialect's objects
(localrun.api.models) and no wire (exchange.py)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localrun import __version__
from localrun.api import models
from localrun.api.schema import CopyBody, CreateBody, ModelBody, PullBody, ShowBody
from localrun.daemon.exchange import Exchange
from localrun.daemon.guard import Unauthorized, own_addresses
from localrun.daemon.loader import Resident
from localrun.daemon.metrics import CONTENT_TYPE as METRICS_TYPE
from localrun.daemon.services import read_long_arrays
from localrun.errors import BadRequest, LocalrunError, ModelNotFound, NotFound, Unsupported
from localrun.messages import Inspect, Inspected
from localrun.rates import parse_rate
from localrun.store import CreateSpec, PullProgress, StoredModel, spec_from_modelfile
from localrun.store.adapters import adapter_sources
from localrun.store.blobs import Blobs, DigestMismatch
from localrun.store.names import Name, check_digest

API_VERSION = "0.12.11"
"""The version of Ollama's API that clients may expect; some switch features on by it."""

SERVER = "localrun"

INSPECTION_S = 1.0
"""How long a runner may take to say how it stands."""

PARTS_WAITING = 64
"""Of an upload that comes faster than the disk writes."""


async def root(x: Exchange, body: None) -> None:
    """GET /: the words by which Ollama's clients know that somebody is there."""
    await x.text("Ollama is running")


async def version(x: Exchange, body: None) -> None:
    """GET /api/version."""
    await x.json({"version": API_VERSION, "server": SERVER, "localrun": __version__})


async def health(x: Exchange, body: None) -> None:
    """GET /health: answered by the event loop that answers everything else, so that it does is the answer."""
    await x.json({"status": "ok"})


async def metrics(x: Exchange, body: None) -> None:
    """GET /metrics. Figures of a runner that does not say at once how it stands are left out."""
    ready = [one for one in x.services.loader.residents() if one.loaded is not None]
    x.services.metrics.forget(one.wanted.name for one in ready)
    for one, answer in (await inspected(x, ready)).items():
        x.services.metrics.inspected(one.wanted.name, answer)
    await x.data(x.services.metrics.text(), METRICS_TYPE)


async def inspected(x: Exchange, ready: Sequence[Resident]) -> dict[Resident, Inspected]:
    """How the runners stand, those that say so in time: one in the middle of a pass says it after the pass."""
    found: dict[Resident, Inspected] = {}

    async def ask(number: int, one: Resident) -> None:
        with contextlib.suppress(LocalrunError, TimeoutError):
            async with asyncio.timeout(INSPECTION_S):
                answer = await one.runner.ask(f"{x.id}-{number}", Inspect(request_id=f"{x.id}-{number}"))
            assert isinstance(answer, Inspected)
            found[one] = one.inspected = answer

    await asyncio.gather(*(ask(number, one) for number, one in enumerate(ready)))
    return found


async def not_there(x: Exchange, body: None) -> None:
    """An endpoint of a dialect that is not implemented."""
    raise Unsupported(f"{x.request.url.path} is not supported yet")


async def status(x: Exchange, body: None) -> None:
    """GET /api/status: Ollama's clients ask whether its cloud may be used."""
    await x.json({"cloud": {"disabled": True, "source": "none"}})


async def no_account(x: Exchange, body: None) -> None:
    """POST /api/me, /api/signout: accounts of Ollama's cloud."""
    raise Unauthorized("there are no accounts here: everything runs on this machine")


# ---- telling ------------------------------------------------------------------------------------------------------------------


async def tags(x: Exchange, body: None) -> None:
    """GET /api/tags."""
    stored = await x.services.in_thread(x.services.store.list)
    await x.json({"models": [models.tags_entry(one, await _capabilities(x, one)) for one in stored]})


async def ps(x: Exchange, body: None) -> None:
    """GET /api/ps: what is in memory, and what is on its way in (with `status`). Names of the same weights share a process (`pid`)."""
    entries = []
    residents = list(x.services.loader.residents())
    await inspected(x, [one for one in residents if one.loaded is not None])
    names = [(resident, tenant) for resident in residents for tenant in list(resident.tenants.values())]
    for resident, tenant in names:
        try:
            stored = await x.services.stored(tenant.wanted.name)
        except LocalrunError:
            continue  # deleted while loaded: it goes when its requests end
        loaded = resident.loaded
        extra: dict[str, Any] = {"requests": tenant.in_flight}
        if loaded is None:
            progress = resident.progress
            extra["status"] = progress.stage if progress else "loading"
            if progress:
                extra |= {"completed": progress.done, "total": progress.total}
        else:
            extra |= models.ps_detail(loaded, resident.inspected)
            extra |= {"pid": resident.runner.pid, "running": resident.runner.busy}
        size = stored.size
        if loaded:
            in_use = models.kv_in_use(loaded, resident.inspected) + models.state_in_use(loaded, resident.inspected)
            size = loaded.weight_bytes + loaded.gpu_bytes + in_use
        context = min(loaded.n_ctx_train, loaded.kv_tokens) if loaded else 0
        entries.append(models.ps_entry(stored, size=size, context_length=context, expires_at=tenant.expires_at, extra=extra))
    await x.json({"models": entries})


async def show(x: Exchange, body: ShowBody) -> None:
    """POST /api/show."""
    stored = await _stored(x, _name(body))
    facts = await x.services.facts(stored, body.template)
    arrays = await x.services.in_thread(lambda: read_long_arrays(stored)) if body.verbose else {}
    await x.json(models.show_reply(stored, facts, verbose=body.verbose, system=body.system, template=body.template, arrays=arrays))


async def v1_models(x: Exchange, body: None) -> None:
    """GET /v1/models."""
    stored = await x.services.in_thread(x.services.store.list)
    await x.json({"object": "list", "data": [models.openai_model(one) for one in stored]})


async def v1_model(x: Exchange, body: None) -> None:
    """GET /v1/models/{model}."""
    await x.json(models.openai_model(await x.services.stored(x.request.path_params["model"])))


# ---- changing -----------------------------------------------------------------------------------------------------------------


async def pull(x: Exchange, body: PullBody) -> None:
    """POST /api/pull."""
    name = _name(body)
    try:
        rate = parse_rate(body.rate) if body.rate else 0
    except ValueError as error:
        raise BadRequest(f"rate: {error}", param="rate") from None
    store = x.services.store
    await transfer(x, body.stream, lambda progress, cancelled: store.pull(name, progress, cancelled, insecure=body.insecure, rate=rate))


async def create(x: Exchange, body: CreateBody) -> None:
    """POST /api/create."""
    name = _name(body)
    Name.parse(name)
    spec = create_spec(body, local=is_here(x))
    await transfer(x, body.stream, lambda progress, cancelled: x.services.store.create(name, spec, progress, cancelled))


def create_spec(body: CreateBody, *, local: bool) -> CreateSpec:
    """What the body asks the store to make. local: the client runs on this machine, so that paths mean the same to both.

    Raises BadRequest and Unsupported, naming the field.
    """
    if body.modelfile:
        if body.from_:
            raise BadRequest("modelfile takes the place of from; send one of them", param="modelfile")
        if local and not Path(body.folder).is_absolute():
            raise BadRequest("folder: the absolute path of the Modelfile's folder is needed", param="folder")
        spec = spec_from_modelfile(body.modelfile, Path(body.folder) if local else None, files=body.files, adapters=body.adapters)
        origin: dict[str, Any] = {}
    else:
        spec = CreateSpec(adapters=adapter_sources(body.adapters))
        origin = _origin(body)
    if origin.get("path") is not None and not local:
        raise BadRequest("paths are taken from clients on this machine only; send the file to /api/blobs first", param="from")
    licenses = [body.license] if isinstance(body.license, str) else body.license
    return replace(
        spec,
        **origin,
        copy=body.copy_,
        insecure=body.insecure,
        quantize=body.quantize or body.quantization,
        template=body.template if body.template is not None else spec.template,
        system=body.system if body.system is not None else spec.system,
        parameters=spec.parameters | body.parameters,
        messages=spec.messages + [{"role": one.role, "content": one.content} for one in body.messages],
        license=spec.license + licenses,
    )


def _origin(body: CreateBody) -> dict[str, Any]:
    if body.files:
        return {"files": body.files, "from_name": body.from_ or None}
    path = Path(body.from_)
    if path.is_absolute() or body.from_.lower().endswith(".gguf"):
        if not path.is_absolute():
            raise BadRequest(f"from: {body.from_!r} is no absolute path", param="from")
        return {"path": path}
    return {"from_name": body.from_ or None}


def is_here(x: Exchange) -> bool:
    """Whether the client runs on this machine."""
    host = x.request.client.host if x.request.client else ""
    try:
        return ipaddress.ip_address(host).is_loopback or host in own_addresses()
    except ValueError:
        return False


async def copy(x: Exchange, body: CopyBody) -> None:
    """POST /api/copy."""
    if not body.source or not body.destination:
        raise BadRequest("source and destination are required", param="source" if not body.source else "destination")
    try:
        await x.services.in_thread(lambda: x.services.store.copy(body.source, body.destination))
    except ModelNotFound:
        raise ModelNotFound(f'model "{body.source}" not found', param="source") from None
    await x.nothing()


async def delete(x: Exchange, body: ModelBody) -> None:
    """DELETE /api/delete: unloads the model when no other name has its weights."""
    name = _name(body)
    stored: StoredModel | None = None
    try:
        stored = await x.services.stored(name)
    except ModelNotFound:
        raise
    except LocalrunError:
        pass  # a broken model can be deleted too
    await x.services.in_thread(lambda: x.services.store.delete(name))
    if stored is not None and not x.services.store.blobs.has(stored.model_digest):
        await x.services.loader.unload(stored.model_path)
    await x.nothing()


async def blob_exists(x: Exchange, body: None) -> None:
    """HEAD /api/blobs/{digest}."""
    digest = check_digest(x.request.path_params["digest"])
    if not await x.services.in_thread(lambda: x.services.store.blobs.has(digest)):
        raise NotFound(f"blob {digest} not found")
    await x.nothing()


async def blob_upload(x: Exchange, body: None) -> None:
    """POST /api/blobs/{digest}: 201, or 200 when it is there already. What came of a broken upload is dropped."""
    digest = check_digest(x.request.path_params["digest"])
    blobs = x.services.store.blobs
    if await x.services.in_thread(lambda: blobs.has(digest)):
        async for _ in x.raw_body():
            pass
        await x.nothing()
        return
    declared = x.request.headers.get("content-length", "")
    parts: queue.Queue[bytes | None] = queue.Queue(maxsize=PARTS_WAITING)
    broken = threading.Event()
    x.stack.callback(parts_end, parts, broken)
    job = x.services.long_job(lambda: _receive(blobs, digest, int(declared) if declared.isdigit() else 0, parts, broken))
    async for part in x.raw_body():
        await _feed(parts, part, job)
    await _feed(parts, None, job)
    await job
    await x.nothing(201)


def _receive(blobs: Blobs, digest: str, size: int, parts: queue.Queue[bytes | None], broken: threading.Event) -> None:
    """In one thread, since the lock belongs to a thread: writes the parts until None. What came of a broken upload is dropped."""
    blobs.require_space(size)
    with blobs.lock(digest):
        try:
            with blobs.receive(digest, fresh=True) as writer:
                while (part := parts.get()) is not None:
                    writer.write(part)
                if broken.is_set():
                    return
                try:
                    writer.commit()
                except DigestMismatch as error:
                    raise BadRequest(str(error), param="digest") from None
        finally:
            if broken.is_set():
                blobs.drop_partial(digest)


def parts_end(parts: queue.Queue[bytes | None], broken: threading.Event) -> None:
    """Lets the receiving thread go when the upload ended without its end: after one that ended well, there is nobody to hear it."""
    broken.set()
    while True:
        try:
            parts.put_nowait(None)
            return
        except queue.Full:
            parts.get_nowait()


async def _feed(parts: queue.Queue[bytes | None], part: bytes | None, job: asyncio.Future[None]) -> None:
    """Hands a part over, waiting while too many wait. Raises what the receiving thread raised."""
    while not job.done():
        try:
            parts.put_nowait(part)
            return
        except queue.Full:
            await asyncio.sleep(0.005)
    job.result()


# ---- parts --------------------------------------------------------------------------------------------------------------------

Report = Callable[[PullProgress], None]
Cancelled = Callable[[], bool]


async def transfer(
    x: Exchange, stream: bool, work: Callable[[Report, Cancelled], None], ending: Callable[[], dict[str, Any]] | None = None
) -> None:
    """Runs `work` in a thread and passes its progress on: a line each where `stream`, else only the last one. ending: makes one more
    object, which is the last one, when `work` is done.

    When the client goes, or the daemon ends, `work` is told by its second argument. Of progress that comes faster than the client reads,
    the latest of each step is sent.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    x.stack.callback(stop.set)
    waiting: list[PullProgress] = []
    news = asyncio.Event()

    def heard(progress: PullProgress) -> None:
        if waiting and (waiting[-1].status, waiting[-1].digest) == (progress.status, progress.digest):
            waiting[-1] = progress
        else:
            waiting.append(progress)
        news.set()

    def report(progress: PullProgress) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(heard, progress)

    job = x.services.long_job(lambda: work(report, lambda: stop.is_set() or x.services.closing.is_set()))
    job.add_done_callback(lambda _: news.set())
    last = PullProgress("success")
    while True:
        await news.wait()
        news.clear()
        ended = job.done()
        if waiting:
            lines, waiting[:] = list(waiting), []
            last = lines[-1]
            if stream:
                if not x.has_begun:
                    await x.begin("ndjson")
                await x.chunks([_line(one) for one in lines])
        if ended:
            break
    job.result()
    if stream:
        if not x.has_begun:
            await x.begin("ndjson")
        if ending is not None:
            await x.chunks([ending()])
        await x.end()
    else:
        await x.json(ending() if ending is not None else _line(last))


def _line(progress: PullProgress) -> dict[str, Any]:
    fields = {"status": progress.status, "digest": progress.digest, "total": progress.total, "completed": progress.completed}
    return {name: value for name, value in fields.items() if value is not None}


def _name(body: ModelBody) -> str:
    name = body.model or body.name
    if not name:
        raise BadRequest("model is required", param="model")
    return name


async def _stored(x: Exchange, name: str) -> StoredModel:
    try:
        return await x.services.stored(name)
    except ModelNotFound:
        # Ollama writes the whole name here, and the given one elsewhere; clients compare both.
        raise ModelNotFound(f"model '{Name.parse(name).short}' not found", param="model") from None


async def _capabilities(x: Exchange, stored: StoredModel) -> list[str]:
    try:
        return list((await x.services.facts(stored)).capabilities)
    except LocalrunError:
        return []  # the list must not fail for one bad file; show and run say what is wrong with it
