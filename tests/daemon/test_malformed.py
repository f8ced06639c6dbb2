"""Requests that are broken, endless, huge or slow: the right 4xx, soon, and the next client is served as if nothing had been."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon.serving import Daemon

GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False}


@pytest.fixture(autouse=True)
def the_next_is_served(daemon: Daemon) -> Iterator[None]:
    yield
    answer = daemon.http.post("/api/chat", json=GOOD).json()
    assert answer["message"]["content"] == 'You said "hi".'


def spoken(daemon: Daemon, *parts: bytes, half_close: bool = False) -> bytes:
    """What comes back for these bytes until the server closes the connection or says nothing more."""
    with socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2])), timeout=120) as client:
        for part in parts:
            client.sendall(part)
        if half_close:
            client.shutdown(socket.SHUT_WR)
        received = b""
        while part := client.recv(65536):
            received += part
            head, _, body = received.partition(b"\r\n\r\n")
            if b"content-length: %d\r\n" % len(body) in head + b"\r\n":
                break
        return received


BODIES: list[tuple[bytes, str]] = [
    (b"", "missing request body"),
    (b"   \n", "missing request body"),
    (b"{", "is not valid JSON"),
    (b'{"model": "tiny", "messages": [', "is not valid JSON"),
    (b'{"model": "tiny"} {"model": "tiny"}', "is not valid JSON"),
    (b'{"model": "t\xff\xfeny"}', "is not valid JSON"),
    (b'{"model": "\\ud800"}', "is not valid JSON"),
    (b"[" * 100_000, "is not valid JSON"),
    (b'{"model":' * 5_000, "is not valid JSON"),
    (b'{"model": "tiny", "options": {"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}}", "is not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b'"text"', "must be a JSON object"),
    (b'{"model": NaN}', ""),
    (b'{"model": "tiny", "options": {"temperature": 1e999}}', ""),
    (b'{"model": "tiny", "options": {"num_ctx": ' + b"9" * 400 + b"}}", ""),
    (b'{"model": "tiny", "messages": {}}', "messages"),
    (b'{"model": "' + b"a" * 1_000_000 + b'"}', ""),
    (b'{"model": "../../etc/passwd"}', ""),
    (b'{"model": "tiny\\u0000"}', ""),
]


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages", "/api/embed"])
@pytest.mark.parametrize(("body", "said"), BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_none(daemon: Daemon, path: str, body: bytes, said: str) -> None:
    reply = daemon.http.post(path, content=body)
    assert 400 <= reply.status_code < 500, reply.text[:300]
    error: Any = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message and "\n" not in message and len(message) < 3000
    if said and (said != "messages" or "messages" in path or "chat" in path):
        assert said in message


def test_a_body_that_breaks_off(daemon: Daemon) -> None:
    data = json.dumps(GOOD).encode()
    head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (len(data) + 100)
    assert b" 200 " not in spoken(daemon, head, data, half_close=True).partition(b"\r\n")[0]


def test_a_body_in_many_small_pieces_is_whole(daemon: Daemon) -> None:
    data = json.dumps(GOOD).encode()
    pieces = [b"1\r\n%c\r\n" % byte for byte in data]
    head = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"You said" in spoken(daemon, head, *pieces, b"0\r\n\r\n")


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_request(daemon: Daemon, raw: bytes) -> None:
    try:
        status = spoken(daemon, raw).partition(b"\r\n")[0]
    except (ConnectionResetError, BrokenPipeError):
        return  # closing is an answer too
    assert not status or status.split(b" ")[1].startswith(b"4"), status
