"""One request and its reply. Reads the body within its limits, runs the handler, writes what it says in the dialect's form, and watches
the connection: when the client goes, the handler is cancelled wherever it is, and what it holds is given back.

Knows the wire and the families' error shapes; knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from localrun.api import anthropic, fields, ollama, openai
from localrun.api.answer import new_id
from localrun.api.routes import Route
from localrun.errors import BadRequest, LocalrunError

if TYPE_CHECKING:
    from localrun.daemon.services import Services

log = logging.getLogger(__name__)
requests_log = logging.getLogger("localrun.requests")

MOST_BODY_BYTES = 64 << 20
SLOW_CLIENT_S = 60.0
"""A client that sends no byte of its body, or takes none of the reply, for so long is cut off."""

Framing = Literal["ndjson", "sse", "events"]
"""Lines; server-sent events that end with [DONE]; server-sent events that have names, their objects' `type`."""
_MEDIA = {"ndjson": "application/x-ndjson", "sse": "text/event-stream; charset=utf-8", "events": "text/event-stream; charset=utf-8"}

Handler = Callable[["Exchange", Any], Awaitable[None]]
encode = msgspec.json.Encoder().encode


class TooLarge(BadRequest):
    status = 413
    code = "too_large"


class TooSlow(BadRequest):
    status = 408
    code = "timeout"


class ShuttingDown(LocalrunError):
    status = 503
    code = "shutting_down"


class ClientGone(Exception):
    """Nobody is there any more to answer."""


class Exchange(Response):
    """What a handler works with. `stack` is closed when the exchange ends, however it ends: whatever a handler takes goes there."""

    def __init__(self, services: Services, route: Route, handler: Handler, request: Request) -> None:
        self.services = services
        self.route = route
        self.request = request
        self.id = new_id("req-")
        self.began = time.monotonic()
        self.load_s = 0.0
        """Time spent until the model was in memory."""
        self.stack = contextlib.AsyncExitStack()
        self.noted: dict[str, Any] = {}
        """What the request's line in the log says."""
        self.failing: Callable[[LocalrunError], list[dict[str, Any]]] = lambda error: [self._error_body(error)]
        """How an error is said once a stream has begun."""
        self.background = None
        self._handler = handler
        self._framing: Framing = "ndjson"
        self._status = 0
        self._finished = False
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        task = asyncio.current_task()
        assert task is not None
        watcher: asyncio.Task[None] | None = None
        try:
            async with self.stack:
                body = await self._read_body()
                if not self.route.raw:
                    watcher = asyncio.create_task(self._watch(task))
                await self._handler(self, body)
        except asyncio.CancelledError:
            # Either the client went, or the server ends and could not wait any longer.
            task.uncancel()
            if not self._gone:
                await self._fail(ShuttingDown("the server is shutting down"))
        except ClientGone:
            self._gone = True
        except LocalrunError as error:
            await self._fail(error)
        except Exception:
            log.exception("%s %s", self.route.method, self.route.path)
            await self._fail(LocalrunError("internal error; the server's log has the details"))
        finally:
            if watcher is not None:
                watcher.cancel()
            self._note()

    # ---- for handlers ----

    async def json(self, value: Any, status: int = 200) -> None:
        """The whole reply, as JSON."""
        await self._whole(status, "application/json; charset=utf-8", encode(value))

    async def text(self, value: str, status: int = 200) -> None:
        """The whole reply, as plain text."""
        await self._whole(status, "text/plain; charset=utf-8", value.encode())

    async def data(self, value: bytes, media: str) -> None:
        """The whole reply, of some other kind."""
        await self._whole(200, media, value)

    async def nothing(self, status: int = 200) -> None:
        """A reply without a body."""
        await self._whole(status, None, b"")

    async def begin(self, framing: Framing, headers: Mapping[str, str] | None = None) -> None:
        """Begins a streamed reply: from here on, errors are part of the stream."""
        self._framing = framing
        extra = {} if framing == "ndjson" else {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, _MEDIA[framing], {**extra, **(headers or {})})

    async def chunks(self, values: list[dict[str, Any]]) -> None:
        """Some objects of a streamed reply, sent together. Raises ClientGone when the client takes nothing for SLOW_CLIENT_S."""
        if values:
            await self._body(b"".join([self._frame(value) for value in values]), more=True)

    async def begin_bytes(self, media: str, length: int, headers: Mapping[str, str] | None = None) -> None:
        """Begins a reply of so many bytes. From here on an error can only break the connection off, which the client sees."""

        def broken(error: LocalrunError) -> list[dict[str, Any]]:
            raise ClientGone

        self.failing = broken
        await self._start(200, media, {"content-length": str(length), **(headers or {})})

    async def piece(self, data: bytes, *, last: bool = False) -> None:
        """Some bytes of a reply that begin_bytes began. Raises ClientGone when the client takes nothing for SLOW_CLIENT_S."""
        await self._body(data, more=not last)

    async def end(self) -> None:
        """Ends a streamed reply."""
        await self._body(b"data: [DONE]\n\n" if self._framing == "sse" else b"", more=False)

    async def raw_body(self) -> AsyncIterator[bytes]:
        """The request's body as it comes, unlimited. Raises ClientGone, TooSlow."""
        while True:
            message = await self._next_message()
            if message["body"]:
                yield message["body"]
            if not message["more_body"]:
                return

    @property
    def has_begun(self) -> bool:
        return self._status != 0

    # ---- the wire ----

    def _frame(self, value: dict[str, Any]) -> bytes:
        if self._framing == "ndjson":
            return encode(value) + b"\n"
        if self._framing == "events":
            return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), encode(value))
        return b"data: " + encode(value) + b"\n\n"

    async def _whole(self, status: int, media: str | None, body: bytes) -> None:
        await self._start(status, media, {"content-length": str(len(body))})
        await self._body(body, more=False)

    async def _start(self, status: int, media: str | None, headers: Mapping[str, str]) -> None:
        self._status = status
        pairs = {**({"content-type": media} if media else {}), "x-request-id": self.id, **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, *, more: bool) -> None:
        self._finished = not more
        try:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError):
            raise ClientGone from None

    async def _next_message(self) -> Any:
        try:
            async with asyncio.timeout(SLOW_CLIENT_S):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(f"no more of the request body came for {SLOW_CLIENT_S:g} seconds") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return {"body": message.get("body", b""), "more_body": message.get("more_body", False)}

    async def _read_body(self) -> Any:
        if self.route.raw:
            return None
        parts: list[bytes] = []
        size = 0
        async for part in self.raw_body():
            size += len(part)
            if size > MOST_BODY_BYTES:
                raise TooLarge(f"the request body is larger than {MOST_BODY_BYTES} bytes")
            parts.append(part)
        raw = b"".join(parts)
        if self.services.settings.log_requests and raw:
            requests_log.info("id=%s path=%s body=%s", self.id, self.request.url.path, _logged(raw.decode("utf-8", "replace")))
        return None if self.route.body is None else fields.parse(self.route.body, raw)

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
        if not self._finished:
            self._gone = True
            task.cancel()

    # ---- errors ----

    def _error_body(self, error: LocalrunError) -> dict[str, Any]:
        match self.route.family:
            case "anthropic":
                return anthropic.error_body(error, self.id)
            case "openai":
                return openai.error_body(error)
            case _:
                return ollama.error_body(error)

    async def _fail(self, error: LocalrunError) -> None:
        """Says the error: as the reply, or as the end of one that has begun."""
        self.noted["error"] = error.code
        self.services.metrics.failed(error.code)
        if error.status >= 500:
            log.warning("%s %s: %s", self.route.method, self.route.path, error)
        try:
            if not self.has_begun:
                headers = {"retry-after": "1"} if error.status == 503 else {}
                body = encode(self._error_body(error))
                await self._start(error.status, "application/json; charset=utf-8", {"content-length": str(len(body)), **headers})
                await self._body(body, more=False)
            elif not self._finished:
                await self.chunks(self.failing(error))
                await self.end()
        except ClientGone:
            self._gone = True

    def _note(self) -> None:
        line = {
            "id": self.id,
            "method": self.route.method,
            "path": self.request.url.path,
            "status": 499 if self._gone else self._status,
            "seconds": round(time.monotonic() - self.began, 4),
            **self.noted,
        }
        # Reading is what monitors and terminals do all the time; the log is for work.
        level = logging.DEBUG if self.route.method in ("GET", "HEAD") and self._status < 400 else logging.INFO
        requests_log.log(level, "%s", " ".join(f"{key}={_logged(value)}" for key, value in line.items()))


def _logged(value: Any) -> str:
    """A value in a line of key=value: in quotes where it could be taken for something else."""
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else encode(text).decode()
