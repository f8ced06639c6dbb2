"""Pulls from a registry on loopback that speaks the protocol, and that misbehaves as asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from localrun.errors import BadRequest, DownloadFailed, RequestCancelled
from localrun.store import PullProgress, Store, download
from localrun.store.blobs import DigestMismatch
from localrun.store.manifests import BadManifest
from tests.store.conftest import tiny_gguf

TOKEN = "a-token"


class Registry:
    """A registry, and on a port of its own the storage that it may redirect to."""

    def __init__(self) -> None:
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """Which server, path, headers with lower-case names."""
        self.wants_token = False
        self.realm = ""
        self.redirects = False
        self.ranges = True
        self.cut = 0
        """Connections to be cut in the middle of a blob."""
        self.status: dict[str, list[int]] = {}
        """By part of a path: statuses to answer with before the right answer."""
        self.hold = threading.Event()
        self.hold.set()
        self.halfway = threading.Event()
        self._lock = threading.Lock()
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(role)) for role in ("registry", "storage")]
        self.address, self.storage = (f"127.0.0.1:{server.server_address[1]}" for server in self._servers)
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in self._servers]
        for server, thread in zip(self._servers, self._threads):
            server.daemon_threads = True
            thread.start()

    def close(self) -> None:
        self.hold.set()
        for server, thread in zip(self._servers, self._threads):
            server.shutdown()
            server.server_close()
            thread.join(10)

    def add(self, name: str, blobs: dict[str, bytes]) -> bytes:
        """Publishes a model made of these layers by kind; returns the manifest."""
        layers = []
        for kind, data in blobs.items():
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            self.blobs[digest] = data
            layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": len(data)})
        config = b'{"model_format":"gguf","model_family":"llama"}'
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        self.blobs[digest] = config
        kind = "application/vnd.docker.container.image.v1+json"
        body = {"schemaVersion": 2, "config": {"mediaType": kind, "digest": digest, "size": len(config)}, "layers": layers}
        self.manifests[name] = json.dumps(body, indent=1).encode()
        return self.manifests[name]

    def asked(self, part: str) -> list[dict[str, str]]:
        return [headers for _, path, headers in self.requests if part in path]

    def _handler(self, role: str) -> type[BaseHTTPRequestHandler]:
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                headers = {key.lower(): value for key, value in self.headers.items()}
                with registry._lock:
                    registry.requests.append((role, self.path, headers))
                    planned = next((statuses for part, statuses in registry.status.items() if part in self.path and statuses), None)
                    status = planned.pop(0) if planned else 0
                url = urlsplit(self.path)
                if status:
                    self._send(status, b"planned\ntrouble")
                elif url.path == "/token":
                    scope = parse_qs(url.query)["scope"][0]
                    self._send(200, json.dumps({"token": TOKEN} if scope == "repository:library/tiny:pull" else {}).encode())
                elif role == "registry" and registry.wants_token and headers.get("authorization") != f"Bearer {TOKEN}":
                    realm = registry.realm or f"http://{registry.address}/token"
                    challenge = f'Bearer realm="{realm}",service="{registry.address}",scope="repository:library/tiny:pull"'
                    self._send(401, b"{}", {"WWW-Authenticate": challenge})
                elif "/manifests/" in url.path:
                    body = registry.manifests.get(url.path.removeprefix("/v2/").replace("/manifests/", ":"))
                    self._send(404 if body is None else 200, body or b"{}")
                elif role == "registry" and registry.redirects:
                    self._send(307, b"", {"Location": f"http://{registry.storage}{self.path}?signature=x"})
                else:
                    self._blob(url.path.rpartition("/")[2], headers.get("range", ""))

            def _blob(self, digest: str, wanted: str) -> None:
                data = registry.blobs.get(digest)
                if data is None:
                    self._send(404, b"{}")
                    return
                status, more = 200, {}
                if wanted and registry.ranges:
                    first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                    more = {"Content-Range": f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"}
                    status, data = 206, data[first : last + 1]
                if len(data) > 100:
                    with registry._lock:
                        cut = registry.cut > 0
                        registry.cut -= cut
                    if cut or not registry.hold.is_set():
                        self._head(status, len(data), more)
                        self.wfile.write(data[: len(data) // 2])
                        self.wfile.flush()
                        registry.halfway.set()
                        registry.hold.wait(120)
                        if cut:
                            self.close_connection = True
                        else:
                            self.wfile.write(data[len(data) // 2 :])
                        return
                self._send(status, data, more)

            def _head(self, status: int, length: int, more: dict[str, str]) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                for key, value in more.items():
                    self.send_header(key, value)
                self.end_headers()

            def _send(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
                self._head(status, len(body), more or {})
                self.wfile.write(body)

            def handle(self) -> None:
                # a client that this test cut off, or that cut itself off
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    super().handle()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    found = Registry()
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    yield found
    found.close()


WEIGHTS = tiny_gguf("remote", padding=20_000)
LAYERS = {"model": WEIGHTS, "system": b"Be remote.", "params": b'{"top_k":7}', "license": b"free"}


def name_of(server: Registry, model: str = "tiny") -> str:
    return f"http://{server.address}/library/{model}:latest"


def pulled(store: Store, server: Registry, **options: Any) -> list[PullProgress]:
    lines: list[PullProgress] = []
    store.pull(name_of(server), lines.append, insecure=True, **options)
    return lines


def test_whole_model(store: Store, server: Registry) -> None:
    manifest = server.add("library/tiny:latest", LAYERS)
    lines = pulled(store, server)
    model = store.get(name_of(server))
    assert model.name == f"{server.address}/library/tiny:latest"
    assert model.digest == hashlib.sha256(manifest).hexdigest()
    assert store.manifests.path(model.full_name).read_bytes() == manifest
    assert (model.system, model.params, model.license) == ("Be remote.", {"top_k": 7}, ["free"])
    assert model.model_path.read_bytes() == WEIGHTS
    words = list(dict.fromkeys(line.status for line in lines))
    assert words[0] == "pulling manifest" and words[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    for digest, data in server.blobs.items():
        moving = [line for line in lines if line.digest == digest]
        assert moving[-1].completed == moving[-1].total == len(data) and moving[0].status == f"pulling {digest[7:19]}"
    assert store.blobs.partials() == [] and list(store.blobs.staging(model.model_digest).parent.iterdir()) == []
    assert {headers["accept-encoding"] for headers in server.asked("/v2/")} == {"identity"}
    before = len(server.requests)
    pulled(store, server)
    assert len(server.requests) == before + 1, "what is there is not fetched again"


def test_chunks_are_joined_in_order(store: Store, server: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 1000)
    server.add("library/tiny:latest", LAYERS)
    pulled(store, server)
    digest = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
    assert store.blobs.read(digest) == WEIGHTS
    ranges = [headers["range"] for headers in server.asked(digest)]
    starts = sorted(int(text.removeprefix("bytes=").split("-")[0]) for text in ranges if text != "bytes=0-0")
    assert starts == list(range(0, len(WEIGHTS), 1000))


def test_redirect_to_a_storage_without_the_token(store: Store, server: Registry) -> None:
    server.wants_token = server.redirects = True
    server.add("library/tiny:latest", LAYERS)
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS
    at_storage = [headers for role, _, headers in server.requests if role == "storage"]
    assert at_storage and not any("authorization" in headers for headers in at_storage)
    assert len(server.asked("/token")) == 1
    assert sum("authorization" not in headers for headers in server.asked("/v2/") if headers not in at_storage) == 1


def test_token_from_elsewhere_is_not_fetched(store: Store, server: Registry) -> None:
    server.wants_token = True
    server.realm = f"http://{server.storage}/token"
    server.add("library/tiny:latest", LAYERS)
    line = rf"^unauthorized: {server.address} wants a token from '{server.storage}', another host; that is refused$"
    with pytest.raises(DownloadFailed, match=line):
        pulled(store, server)
    assert not [role for role, _, _ in server.requests if role == "storage"] and store.list() == []


@pytest.mark.parametrize("status", [401, 403])
def test_no_access(store: Store, server: Registry, status: int) -> None:
    server.add("library/tiny:latest", LAYERS)
    server.status["/manifests/"] = [status] * 3
    with pytest.raises(DownloadFailed, match="unauthorized"):
        pulled(store, server)


def test_unknown_model(store: Store, server: Registry) -> None:
    with pytest.raises(DownloadFailed, match=rf"^pull model manifest: file does not exist: {server.address} has no "):
        pulled(store, server)
    assert store.list() == []


def test_blob_that_the_registry_lost(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", LAYERS)
    del server.blobs[f"sha256:{hashlib.sha256(b'free').hexdigest()}"]
    with pytest.raises(DownloadFailed, match=r"^pull of blob sha256:[0-9a-f]{12}: file does not exist"):
        pulled(store, server)
    assert store.list() == []


def test_cut_connections_go_on_where_they_were(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    server.cut = 4
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS
    ranges = [headers["range"] for headers in server.asked(hashlib.sha256(WEIGHTS).hexdigest())]
    firsts = [int(text.removeprefix("bytes=").split("-")[0]) for text in ranges if text != "bytes=0-0"]
    assert firsts == sorted(firsts) and len(set(firsts)) == len(firsts) >= 4, "no byte was asked for twice"


def test_servers_trouble_is_tried_again(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    server.status["/blobs/"] = [503, 429, 500]
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS


def test_trouble_without_end_is_given_up(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    server.status[hashlib.sha256(WEIGHTS).hexdigest()] = [503] * 100
    with pytest.raises(DownloadFailed, match=r"stopped sending sha256:[0-9a-f]{12}: 503: planned trouble; pull again to go on"):
        pulled(store, server)
    server.status["/manifests/"] = [502]
    with pytest.raises(DownloadFailed, match=r"^pull model manifest: \S+ answered 502: planned trouble; try again later$"):
        pulled(store, server)
    server.status["/manifests/"] = [418]
    with pytest.raises(DownloadFailed, match="answered 418: planned trouble"):
        pulled(store, server)


def test_nobody_listens(store: Store, server: Registry) -> None:
    server.close()
    with pytest.raises(DownloadFailed, match=r"^pull model manifest: \S+ could not be reached: no connection [^\n]+$"):
        pulled(store, server)


def test_server_without_ranges(store: Store, server: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 1000)
    server.ranges = False
    server.cut = 2
    server.add("library/tiny:latest", {"model": WEIGHTS})
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS


def test_another_content_than_promised(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    digest = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
    server.blobs[digest] = bad = b"x" * len(WEIGHTS)
    with pytest.raises(DigestMismatch) as caught:
        pulled(store, server)
    assert str(caught.value) == f'digest mismatch, expected "{digest}", got "sha256:{hashlib.sha256(bad).hexdigest()}"'
    assert store.list() == [] and not store.blobs.has(digest) and store.blobs.partials() == []
    server.blobs[digest] = WEIGHTS
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS


def test_damaged_beginning_is_fetched_again(store: Store, server: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 1000)
    server.add("library/tiny:latest", {"model": WEIGHTS})
    digest = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
    with store.blobs.receive(digest) as writer:
        writer.write(b"\0" * 5500)
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS


def test_shorter_than_promised(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    digest = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
    server.blobs[digest] = WEIGHTS[:-7]
    with pytest.raises((DownloadFailed, DigestMismatch)) as caught:
        pulled(store, server)
    assert "\n" not in str(caught.value) and store.list() == []


@pytest.mark.parametrize("digest", ["sha256:../../../../etc/passwd", "../../x", "SHA256:" + "a" * 64, "sha256:abc", ""])
def test_manifest_that_points_outside(store: Store, server: Registry, digest: str) -> None:
    body = json.loads(server.add("library/tiny:latest", LAYERS))
    body["layers"][0]["digest"] = digest
    server.manifests["library/tiny:latest"] = json.dumps(body).encode()
    with pytest.raises(BadManifest, match="invalid digest format"):
        pulled(store, server)
    assert not store.blobs.folder.exists() and not any("/blobs/" in path for _, path, _ in server.requests)


def test_endless_manifest(store: Store, server: Registry) -> None:
    server.manifests["library/tiny:latest"] = b" " * (5 << 20)
    with pytest.raises(DownloadFailed, match="sent more than 4194304 bytes"):
        pulled(store, server)


def test_plain_http_must_be_asked_for(store: Store, server: Registry) -> None:
    with pytest.raises(BadRequest, match="say insecure"):
        store.pull(name_of(server), lambda line: None)
    assert server.requests == []


def test_cancelled_at_once_while_the_server_is_silent(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    server.hold.clear()
    started = time.monotonic()
    with pytest.raises(RequestCancelled):
        pulled(store, server, cancelled=server.halfway.is_set)
    assert time.monotonic() - started < download.SILENCE_S / 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pull")]
    server.hold.set()
    pulled(store, server)
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS


def test_two_pulls_fetch_once(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    server.hold.clear()
    threads = [threading.Thread(target=pulled, args=(Store(store.root), server)) for _ in range(2)]
    threads[0].start()
    assert server.halfway.wait(120)
    threads[1].start()
    server.hold.set()
    for thread in threads:
        thread.join(120)
    asked = [headers for headers in server.asked(hashlib.sha256(WEIGHTS).hexdigest()) if headers["range"] != "bytes=0-0"]
    assert len(asked) == 1
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_pull_resumes(store: Store, server: Registry) -> None:
    server.add("library/tiny:latest", {"model": WEIGHTS})
    code = f"""
import os, signal
from pathlib import Path
from localrun.store import Store, download
download.CHUNK_BYTES = 1000
def progress(line):
    if line.total == {len(WEIGHTS)} and line.completed >= 8000:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
download.POLL_S = 0
Store(Path({str(store.root)!r})).pull({name_of(server)!r}, progress, insecure=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert store.list() == []
    digest = f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
    ((partial, had),) = store.blobs.partials()
    assert partial == digest and had > 0
    before = len(server.requests)
    registry_chunk, download.CHUNK_BYTES = download.CHUNK_BYTES, 1000
    try:
        pulled(store, server)
    finally:
        download.CHUNK_BYTES = registry_chunk
    assert store.get(name_of(server)).model_path.read_bytes() == WEIGHTS
    again = [headers["range"] for _, path, headers in server.requests[before:] if digest in path and headers["range"] != "bytes=0-0"]
    starts = [int(text.removeprefix("bytes=").split("-")[0]) for text in again]
    assert starts and min(starts) >= had // 1000 * 1000
