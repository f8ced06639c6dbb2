"""Pushes and pulls against a real registry (Debian's docker-registry, on loopback), and pushes against one that misbehaves as asked."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from localrun.errors import BadRequest, DownloadFailed, ModelNotFound, RequestCancelled, Unsupported
from localrun.store import CreateSpec, PullProgress, Store, download, push
from localrun.store.push import UploadFailed
from tests.ports import free_port
from tests.store.conftest import tiny_gguf

CONFIG = """
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {root}}}
http:
  addr: 127.0.0.1:{port}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """host:port of a registry of its own."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (Debian's package of that name)")
    port = free_port()
    config = tmp_path / "registry.yml"
    config.write_text(CONFIG.format(root=tmp_path / "registry", port=port))
    log = (tmp_path / "registry.log").open("wb")
    process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        last = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/v2/", trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None, (tmp_path / "registry.log").read_text()
                assert time.monotonic() < last, "the registry did not start"
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)
        log.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)


@pytest.fixture
def made(store: Store, tmp_path: Path) -> Store:
    """A store with the model m/base, large enough for several chunks, and m/derived made from it: names on no host yet."""
    path = tmp_path / "base.gguf"
    path.write_bytes(tiny_gguf("pushed", padding=200_000))
    store.create("base", CreateSpec(path=path, license=["free"]), lambda line: None)
    store.create("derived", CreateSpec(from_name="base", system="be brief"), lambda line: None)
    return store


def test_what_was_pushed_can_be_pulled(made: Store, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "CHUNK_BYTES", 50_000)
    name = f"{registry}/me/tiny:v1"
    made.copy("derived", name)
    lines: list[PullProgress] = []
    made.push(f"http://{name}", lines.append, insecure=True)
    statuses = [line.status for line in lines]
    assert statuses[0] == "retrieving manifest" and statuses[-2:] == ["pushing manifest", "success"]
    model = made.get(name)
    weights = [line for line in lines if line.digest == model.model_digest]
    assert weights[-1].completed == weights[-1].total == model.model_path.stat().st_size
    assert [line.completed or 0 for line in weights] == sorted(line.completed or 0 for line in weights)
    assert len({line.completed for line in weights}) > 4

    other = Store(tmp_path / "other")
    other.pull(f"http://{name}", lambda line: None, insecure=True)
    assert other.get(name).digest == model.digest and other.get(name).system == "be brief"
    assert other.get(name).model_path.read_bytes() == model.model_path.read_bytes()


def test_second_push_sends_nothing_and_another_repository_lends_its_blobs(made: Store, registry: str, tmp_path: Path) -> None:
    made.copy("base", f"{registry}/me/base")
    made.copy("derived", f"{registry}/me/derived")
    made.push(f"http://{registry}/me/base", lambda line: None, insecure=True)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "registry").rglob("data")}
    again: list[PullProgress] = []
    made.push(f"http://{registry}/me/base", again.append, insecure=True)
    assert again[-1].status == "success"
    lines: list[PullProgress] = []
    made.push(f"http://{registry}/me/derived", lines.append, insecure=True)
    digest = made.get("base").model_digest
    assert {line.completed for line in lines if line.digest == digest} == {0, made.get("base").model_path.stat().st_size}
    now = {path: path.stat().st_mtime_ns for path in (tmp_path / "registry").rglob("data")}
    assert stored.items() <= now.items() and len(now) == len(stored) + 3, "system, config and manifest are new"


@pytest.mark.parametrize("name", ["mine", "me/mine:1", "ollama.com/me/mine"])
def test_ollamas_own_registry_wants_signatures(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unsupported, match="takes models only with requests signed by an account's key, which is not supported"):
        Store(tmp_path / "models").push(name, lambda line: None)


def test_unknown_names(made: Store, registry: str) -> None:
    with pytest.raises(ModelNotFound):
        made.push(f"http://{registry}/me/nothing", lambda line: None, insecure=True)
    with pytest.raises(DownloadFailed, match="file does not exist"):
        made.pull(f"http://{registry}/me/nothing", lambda line: None, insecure=True)
    made.copy("base", "localhost:1/me/base")
    with pytest.raises(BadRequest, match="insecure"):
        made.push("http://localhost:1/me/base", lambda line: None)
    with pytest.raises(UploadFailed, match="could not be reached"):
        made.push("http://localhost:1/me/base", lambda line: None, insecure=True)


class Difficult:
    """A registry that takes pushes and makes trouble: connections cut in the middle of a chunk, tokens, refusals."""

    def __init__(self) -> None:
        self.cut = 0
        self.wants_token = False
        self.forbidden = False
        self.busy = 0
        self.uploads: dict[str, bytearray] = {}
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(10)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_any(self) -> None:
                registry.requests.append((self.command, self.path))
                url = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                if url.path == "/token":
                    self.answer(200, b'{"token":"t"}')
                    return
                if self.command == "PATCH" and registry.cut:
                    registry.cut -= 1
                    registry.uploads[url.path] += self.rfile.read(length // 2)
                    self.close_connection = True
                    return
                body = self.rfile.read(length)
                if registry.forbidden:
                    self.answer(403, b"no")
                elif registry.busy:
                    registry.busy -= 1
                    self.answer(503, b"busy")
                elif registry.wants_token and self.headers.get("Authorization") != "Bearer t":
                    scope = "repository:me/base:pull,push"
                    self.answer(401, b"", WWW_Authenticate=f'Bearer realm="http://{registry.address}/token",service="s",scope="{scope}"')
                else:
                    self.serve(url.path, parse_qs(url.query), body)

            def serve(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
                if self.command == "HEAD":
                    self.answer(200 if path.rpartition("/")[2] in registry.blobs else 404)
                elif self.command == "POST":
                    where = f"{path}{len(registry.uploads)}"
                    registry.uploads[where] = bytearray()
                    self.answer(202, Location=where + "?state=a")
                elif self.command == "PATCH":
                    start = int(self.headers["Content-Range"].partition("-")[0])
                    assert start == len(registry.uploads[path]), "a gap or an overlap"
                    registry.uploads[path] += body
                    self.answer(202, Location=path + "?state=b", Range=f"0-{len(registry.uploads[path]) - 1}")
                elif self.command == "GET":
                    self.answer(204, Range=f"0-{max(0, len(registry.uploads[path]) - 1)}", Location=path + "?state=c")
                elif "/manifests/" in path:
                    registry.manifests[path] = body
                    self.answer(201)
                else:
                    data = bytes(registry.uploads.pop(path))
                    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
                    assert query["digest"] == [digest]
                    registry.blobs[digest] = data
                    self.answer(201)

        for method in ("GET", "HEAD", "POST", "PATCH", "PUT"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        return Handler


@pytest.fixture
def difficult(made: Store) -> Iterator[Difficult]:
    server = Difficult()
    made.copy("base", f"{server.address}/me/base")
    yield server
    server.close()


def test_broken_connections_and_busy_answers_cost_no_blob(made: Store, difficult: Difficult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "CHUNK_BYTES", 60_000)
    difficult.cut, difficult.busy = 2, 2
    made.push(f"http://{difficult.address}/me/base", lambda line: None, insecure=True)
    model = made.get("base")
    assert difficult.blobs[model.model_digest] == model.model_path.read_bytes()
    assert hashlib.sha256(difficult.manifests["/v2/me/base/manifests/latest"]).hexdigest() == model.digest
    assert difficult.requests[-1] == ("PUT", "/v2/me/base/manifests/latest")


def test_token_and_refusal(made: Store, difficult: Difficult) -> None:
    difficult.wants_token = True
    made.push(f"http://{difficult.address}/me/base", lambda line: None, insecure=True)
    asked = [path for _, path in difficult.requests if path.startswith("/token")]
    assert asked == ["/token?service=s&scope=repository%3Ame%2Fbase%3Apull%2Cpush"]
    difficult.forbidden = True
    with pytest.raises(UploadFailed, match=r"unauthorized: .* does not let us write to me/base \(403\)"):
        made.push(f"http://{difficult.address}/me/base", lambda line: None, insecure=True)


def test_busy_for_ever_ends(made: Store, difficult: Difficult) -> None:
    difficult.busy = 1000
    with pytest.raises(UploadFailed, match="answered 503"):
        made.push(f"http://{difficult.address}/me/base", lambda line: None, insecure=True)
    assert len(difficult.requests) == download.TRIES


def test_cancelled(made: Store, difficult: Difficult) -> None:
    done: list[int] = []

    def heard(line: PullProgress) -> None:
        done.append(line.completed or 0)

    with pytest.raises(RequestCancelled):
        made.push(f"http://{difficult.address}/me/base", heard, lambda: max(done, default=0) > 0, insecure=True)
    assert difficult.manifests == {}
