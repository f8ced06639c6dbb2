"""A web server on loopback that answers as Hugging Face does, as far as it is documented: lists of files, and files by ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Context manager. `files`: path -> bytes in the one repository, org/tiny-GGUF; `plain`: path -> bytes elsewhere."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.plain: dict[str, bytes] = {}
        self.token = ""
        """Where set, the repository is private."""
        self.page = 1000
        """Files on a page of the list."""
        self.ranges = True
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.sent = 0
        """Bytes of files."""
        self.damage: set[str] = set()
        """Paths whose bytes are not those that the list promises."""
        self._storage = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(storage=True))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(storage=False))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._threads = []
        for server in (self._server, self._storage):
            server.daemon_threads = True
            self._threads.append(threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True))
            self._threads[-1].start()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *exception: object) -> None:
        for server, thread in zip((self._server, self._storage), self._threads):
            server.shutdown()
            server.server_close()
            thread.join(10)

    def asked(self, part: str) -> list[dict[str, str]]:
        return [headers for path, headers in self.requests if part in path]

    def _handler(self, *, storage: bool) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                headers = {key.lower(): value for key, value in self.headers.items()}
                hub.requests.append((("storage" if storage else "") + self.path, headers))
                url = urlsplit(self.path)
                path = unquote(url.path)
                if path in hub.plain:
                    self._file(hub.plain[path], headers.get("range", ""))
                elif storage:
                    self._file(hub.files[path.removeprefix("/")], headers.get("range", ""))
                elif hub.token and headers.get("authorization") != f"Bearer {hub.token}":
                    self._answer(401, b'{"error":"Invalid username or password."}', {"X-Error-Message": "Invalid username or password."})
                elif path == "/api/models/org/tiny-GGUF/tree/main":
                    self._list(int(url.query.rpartition("cursor=")[2]) if "cursor=" in url.query else 0)
                elif path.startswith("/org/tiny-GGUF/resolve/main/") and (name := path.split("/main/", 1)[1]) in hub.files:
                    digest = hashlib.sha256(hub.files[name]).hexdigest()
                    where = f"http://127.0.0.1:{hub._storage.server_address[1]}/{name}"
                    self._answer(302, b"", {"Location": where, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(hub.files[name]))})
                else:
                    self._answer(404, b'{"error":"Entry not found"}', {})

            def _list(self, start: int) -> None:
                entries: list[dict[str, Any]] = [{"type": "directory", "path": "sub", "size": 0, "oid": "0" * 40}]
                for name, data in hub.files.items():
                    digest = hashlib.sha256(data + (b"x" if name in hub.damage else b"")).hexdigest()
                    lfs = {"oid": digest, "size": len(data), "pointerSize": 130}
                    entries.append({"type": "file", "path": name, "size": len(data), "oid": "0" * 40, "lfs": lfs})
                more = {}
                if start + hub.page < len(entries):
                    more["Link"] = f'<{hub.url}/api/models/org/tiny-GGUF/tree/main?recursive=true&cursor={start + hub.page}>; rel="next"'
                self._answer(200, json.dumps(entries[start : start + hub.page]).encode(), more)

            def _file(self, data: bytes, wanted: str) -> None:
                status, more = 200, {"ETag": f'"{len(data)}"'}
                if wanted and hub.ranges:
                    first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                    more["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
                    status, data = 206, data[first : last + 1]
                self._answer(status, data, more)

            def _answer(self, status: int, data: bytes, more: dict[str, str]) -> None:
                self.send_response(status)
                for key, value in more.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                try:
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True
                else:
                    hub.sent += len(data) if status in (200, 206) else 0

        return Handler
