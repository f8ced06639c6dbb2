"""Every way an answer can go wrong, as one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from localrun.cli import autostart
from localrun.cli.client import Client, CliError, DaemonError, Unreachable
from localrun.cli.environment import parse_address
from tests.cli.fake_daemon import FakeDaemon, Json


@pytest.fixture
def client(fake: FakeDaemon) -> Iterator[Client]:
    with Client(parse_address(fake.host)) as client:
        yield client


def chat(client: Client, text: str) -> list[Any]:
    with client.stream("/api/chat", {"model": "smollm2", "messages": [{"role": "user", "content": text}]}) as objects:
        return list(objects)


def test_objects_may_be_cut_anywhere(fake: FakeDaemon, client: Client) -> None:
    line = '{"message": {"content": "한국어"}, "done": false}\n'.encode()
    fake.answers["x"] = [line[:5], line[5:31], line[31:] + line, b"\n", line.strip() + b"\n"]
    assert [item["message"]["content"] for item in chat(client, "x")] == ["한국어", "한국어", "한국어", ""]


def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: nobody else takes the port meanwhile
        where = parse_address(f"127.0.0.1:{held.getsockname()[1]}")
        with Client(where) as client, pytest.raises(Unreachable, match="cannot reach localrun") as raised:
            client.get("/api/version")
    assert raised.value.refused


def test_a_daemon_that_stood_still_is_greeted_again(fake: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer in time because the whole machine did nothing; somebody who never answers is no daemon."""
    version = fake.routes["GET", "/api/version"]
    asked, again = [], threading.Event()

    def late(body: Json) -> Any:
        asked.append(body)
        if len(asked) == 1:
            assert again.wait(120)
        again.set()
        return version(body)

    fake.routes["GET", "/api/version"] = late
    monkeypatch.setattr(autostart, "GREETING_SECONDS", (0.05, 60.0))
    assert autostart._answers(client)
    assert len(asked) == 2


def test_error_status_carries_its_message(client: Client) -> None:
    with pytest.raises(DaemonError, match="model 'nope' not found") as raised:
        client.post("/api/show", {"model": "nope"})
    assert raised.value.status == 404


@pytest.mark.parametrize(
    ("status", "data", "message"),
    [
        (500, b'{"error": {"message": "inner", "type": "x"}}', "inner"),
        (502, b"<html>\nBad gateway", "HTTP 502 for GET /api/tags: <html>"),
        (500, b"", "HTTP 500 for GET /api/tags"),
        (404, b"[]", "HTTP 404 for GET /api/tags"),
        (200, b"hello", "is it localrun that listens there"),
        (200, b"[1]", "is it localrun that listens there"),
    ],
)
def test_answers_that_are_none(fake: FakeDaemon, client: Client, status: int, data: bytes, message: str) -> None:
    fake.raw["/api/tags"] = (status, data)
    with pytest.raises(CliError) as raised:
        client.get("/api/tags")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_error_in_the_middle(fake: FakeDaemon, client: Client) -> None:
    fake.answers["x"] = ["one", {"error": "the runner died"}]
    with pytest.raises(DaemonError, match="the runner died") as raised:
        chat(client, "x")
    assert raised.value.status == 200


def test_connection_breaks_in_the_middle(fake: FakeDaemon, client: Client) -> None:
    fake.answers["x"] = ["one", None]
    with pytest.raises(Unreachable, match="did the daemon stop"):
        chat(client, "x")


def test_line_that_is_no_object(fake: FakeDaemon, client: Client) -> None:
    fake.answers["x"] = [b"[1, 2]\n"]
    with pytest.raises(CliError, match="no JSON object"):
        chat(client, "x")


def test_leaving_early_closes_the_connection(fake: FakeDaemon, client: Client) -> None:
    fake.answers["x"] = ["word " * 1000] * 10_000
    with client.stream("/api/chat", {"model": "smollm2", "messages": [{"role": "user", "content": "x"}]}) as objects:
        next(objects)
    assert fake.broken.wait(120)


def test_key_is_sent(monkeypatch: pytest.MonkeyPatch, fake: FakeDaemon) -> None:
    import httpx

    monkeypatch.setenv("OLLAMA_API_KEY", "secret")
    seen = []
    transport = httpx.MockTransport(lambda request: seen.append(request.headers["authorization"]) or httpx.Response(200, json={}))  # type: ignore[func-returns-value]
    with Client(parse_address(fake.host), transport) as client:
        client.get("/api/version")
    assert seen == ["Bearer secret"]
