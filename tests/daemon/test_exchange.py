"""One request and its reply, with the wire in the test's hands: a client that stops reading, that goes at the worst moment, errors at
every stage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from localrun.api.ollama import OllamaReply
from localrun.api.routes import Route
from localrun.daemon import exchange
from localrun.daemon.exchange import Exchange
from localrun.daemon.generation import _answer
from localrun.daemon.metrics import Metrics
from localrun.daemon.runners import Stream
from localrun.errors import BadRequest, LocalrunError
from localrun.messages import Failed, Generate, Piece, Started

CHAT = Route("POST", "/api/chat", "chat", "ollama", None, "")
V1 = Route("POST", "/v1/chat/completions", "v1_chat", "openai", None, "")

Handler = Callable[[Exchange, Any], Awaitable[None]]


class Wire:
    """What stands for the connection. `taken`: messages the client took; it takes none while `open` is not set."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.gone = asyncio.Event()
        self._asked = False
        self.services: Any = SimpleNamespace(settings=SimpleNamespace(log_requests=False), metrics=Metrics())

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.open.wait()
        self.taken.append(message)

    async def run(self, handler: Handler, route: Route = CHAT) -> None:
        request = Request({"type": "http", "method": route.method, "path": route.path, "headers": [], "query_string": b""})
        await Exchange(self.services, route, handler, request)({"type": "http"}, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.taken[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.taken[1:])


async def test_a_client_that_takes_nothing_is_cut_off_and_what_was_held_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SLOW_CLIENT_S", 0.05)
    wire = Wire()
    given_back: list[str] = []

    async def handler(x: Exchange, body: Any) -> None:
        x.stack.callback(given_back.append, "model")
        await x.begin("ndjson")
        await x.chunks([{"a": 1}])
        wire.open.clear()
        for _ in range(1000):
            await x.chunks([{"a": 2}])
        given_back.append("never")

    await asyncio.wait_for(wire.run(handler), 120)
    assert given_back == ["model"]
    assert wire.body == b'{"a":1}\n'


@pytest.mark.parametrize("moment", ["before", "within"])
async def test_a_client_that_goes_ends_the_handler_where_it_is(moment: str) -> None:
    wire = Wire()
    given_back: list[str] = []

    async def handler(x: Exchange, body: Any) -> None:
        x.stack.callback(given_back.append, "model")
        if moment == "within":
            await x.begin("sse")
            await x.chunks([{"a": 1}])
        wire.gone.set()
        await asyncio.sleep(60)
        given_back.append("never")

    await asyncio.wait_for(wire.run(handler), 120)
    assert given_back == ["model"]
    current = asyncio.current_task()
    assert current is not None and current.cancelling() == 0  # nothing of it is left for whoever called


async def test_a_client_that_goes_after_the_last_byte_disturbs_nothing() -> None:
    wire = Wire()

    async def handler(x: Exchange, body: Any) -> None:
        await x.json({"fine": True})
        wire.gone.set()
        await asyncio.sleep(0.01)

    await wire.run(handler)
    assert json.loads(wire.body) == {"fine": True}


async def test_the_server_that_ends_says_so_in_the_stream() -> None:
    wire = Wire()

    async def handler(x: Exchange, body: Any) -> None:
        await x.begin("sse")
        await asyncio.sleep(60)

    task = asyncio.create_task(wire.run(handler, V1))
    while not wire.taken:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(task, 120)
    assert b"the server is shutting down" in wire.body and wire.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (BadRequest("no", param="x"), 400, "no"),
        (ValueError("/secret/path"), 500, "internal error; the server's log has the details"),
    ],
)
async def test_errors_before_the_first_chunk(error: Exception, status: int, text: str) -> None:
    async def handler(x: Exchange, body: Any) -> None:
        raise error

    for route in (CHAT, V1):
        wire = Wire()
        await wire.run(handler, route)
        assert wire.status == status
        found = json.loads(wire.body)["error"]
        assert (found["message"] if route is V1 else found) == text
        assert wire.taken[-1]["more_body"] is False


async def test_errors_after_the_first_chunk_end_the_stream_properly() -> None:
    async def handler(x: Exchange, body: Any) -> None:
        await x.begin("ndjson" if x.route is CHAT else "sse")
        await x.chunks([{"a": 1}])
        raise LocalrunError("broken")

    native, v1 = Wire(), Wire()
    await native.run(handler)
    await v1.run(handler, V1)
    assert native.body == b'{"a":1}\n{"error":"broken"}\n'
    *_, error, done, rest = v1.body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "broken"
    assert (done, rest) == (b"data: [DONE]", b"")
    assert native.taken[-1]["more_body"] is v1.taken[-1]["more_body"] is False


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("framing", ["ndjson", None])
async def test_what_came_before_an_error_is_sent_also_when_the_error_comes_with_it(together: bool, framing: Any) -> None:
    """As it does on a busy machine, where the daemon finds several events at once."""
    runner: Any = SimpleNamespace(cancel=lambda request_id: None)
    stream = Stream(runner, ["a"])
    resident: Any = SimpleNamespace(slots=None, runner=SimpleNamespace(open=lambda requests: stream))

    async def handler(x: Exchange, body: Any) -> None:
        x.noted["model"] = "tiny"
        await _answer(x, resident, [Generate(request_id="a", prompt="x")], OllamaReply("tiny", chat=True), framing)

    async def arrive() -> None:
        started = Started(request_id="a", prompt_tokens=1, cached_tokens=0, seed=1)
        for event in (started, Piece(request_id="a", text="so far"), Failed(request_id="a", code="deadline_exceeded", message="late")):
            stream.push(event)
            if not together:
                await asyncio.sleep(0.01)

    wire = Wire()
    await asyncio.gather(wire.run(handler), arrive())
    lines = [json.loads(line) for line in wire.body.splitlines()]
    if framing is None:
        assert wire.status == 504 and lines == [{"error": "late"}]
    else:
        assert wire.status == 200 and [line.get("message", {}).get("content") for line in lines] == ["so far", None]
        assert lines[-1] == {"error": "late"} and wire.taken[-1]["more_body"] is False
