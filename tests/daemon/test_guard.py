"""Who may talk to the daemon: Host and Origin headers, API keys, CORS."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from localrun.daemon.guard import Guard, own_addresses
from localrun.daemon.services import Activity
from localrun.settings import Settings
from tests.daemon import serving
from tests.daemon.serving import Daemon


async def nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError("not reached")


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost",
        "LOCALHOST:11434",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:80",
        "127.8.9.1",
        "[::1]",
        "[::1]:11434",
        "0.0.0.0:11434",
        "10.1.2.3",
        "192.168.0.7:11434",
        "172.16.0.1",
        "[fe80::1]",
        "app.localhost",
        "mybox.local",
        "svc.internal",
        socket.gethostname(),
    ],
)
def test_hosts_that_are_this_machine(host: str) -> None:
    assert Guard(nothing, Settings(), Activity()).may_be_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "8.8.8.8",
        "8.8.8.8:11434",
        "evil.example:11434",
        "local",
        "a@localhost",
        "localhost/x",
        "localhost:99999999",
        "[::1",
        "2001:4860:4860::8888",
    ],
)
def test_hosts_that_are_not(host: str) -> None:
    assert not Guard(nothing, Settings(), Activity()).may_be_host(host)


def test_the_name_it_is_bound_to_is_its_own() -> None:
    assert Guard(nothing, Settings(host="models.example"), Activity()).may_be_host("models.example:11434")
    assert "127.0.0.1" in own_addresses()
    named = Guard(nothing, Settings(hosts=("models.example", "*.lan")), Activity())
    assert all(map(named.may_be_host, ("Models.example:443", "box.lan")))
    assert not any(map(named.may_be_host, ("evil.example", "xmodels.example", "lan")))


def test_rebinding_is_refused_over_http(daemon: Daemon) -> None:
    response = daemon.http.get("/api/tags", headers={"host": "evil.example"})
    assert response.status_code == 403 and "evil.example" in response.json()["error"]
    answer = daemon.http.post("/v1/chat/completions", json={}, headers={"host": "evil.example"})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:3000",
        "https://127.0.0.1:8443",
        "http://0.0.0.0",
        "app://obsidian.md",
        "tauri://localhost",
        "vscode-webview://abc",
        "file://",
        "http://[::1]:5173",
    ],
)
def test_own_origins_get_cors_headers(daemon: Daemon, origin: str) -> None:
    response = daemon.http.get("/api/version", headers={"origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin and response.headers["vary"] == "Origin"
    preflight = daemon.http.options(
        "/api/chat", headers={"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    )
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost.evil.example", "http://evil.example#localhost", "null", "chrome-extension://x"]
)
def test_foreign_pages_are_refused(daemon: Daemon, origin: str) -> None:
    for response in (
        daemon.http.post("/api/generate", content=b"{}", headers={"origin": origin}),
        daemon.http.options("/api/generate", headers={"origin": origin}),
    ):
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving.daemon(tmp_path_factory.mktemp("locked"), api_keys=("one", "two"), origins=("https://*.example.org",)) as running:
        yield running


def test_keys(locked: Daemon) -> None:
    assert locked.http.get("/api/tags").status_code == 401
    assert locked.http.get("/").status_code == 200
    for key in ("one", "two"):
        assert locked.http.get("/api/tags", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert locked.http.get("/api/tags", headers={"x-api-key": key}).status_code == 200
    for wrong in ("Bearer three", "Bearer on", "Basic one", "Bearer", "Bearer \u00e9"):
        response = locked.http.get("/v1/models", headers=[(b"authorization", wrong.encode("latin-1"))])
        assert response.status_code == 401 and "Bearer KEY" in response.json()["error"]["message"]


def test_origins_of_the_settings(locked: Daemon) -> None:
    headers = {"authorization": "Bearer one"}
    assert locked.http.get("/api/tags", headers=headers | {"origin": "https://a.example.org"}).status_code == 200
    assert locked.http.get("/api/tags", headers=headers | {"origin": "https://example.com"}).status_code == 403
    # a preflight carries no key
    assert locked.http.options("/api/tags", headers={"origin": "https://a.example.org"}).status_code == 204


def test_limits(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    from localrun.daemon import exchange

    monkeypatch.setattr(exchange, "MOST_BODY_BYTES", 1000)
    assert daemon.http.post("/api/generate", content=b'{"model": "tiny", "prompt": "' + b"x" * 2000 + b'"}').status_code == 413
    many = {f"x-{i}": "1" for i in range(120)}
    assert daemon.http.get("/api/version", headers=many).status_code == 431
    deep = b'{"model": "tiny", "options": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}"
    monkeypatch.setattr(exchange, "MOST_BODY_BYTES", 1 << 20)
    response = daemon.http.post("/api/generate", content=deep)
    assert response.status_code == 400 and "recursion" in response.json()["error"]


def test_a_client_that_sends_its_body_too_slowly(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    from localrun.daemon import exchange

    monkeypatch.setattr(exchange, "SLOW_CLIENT_S", 0.2)
    port = int(daemon.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        client.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
