"""A daemon of the standard library that says what a test tells it to say, in the shapes of the wire. For what the real daemon does not do
on purpose: break off, stall, answer nonsense."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
WHEN = "2026-01-02T03:04:05.123456789Z"


def model(name: str, **more: Any) -> Json:
    return {
        "name": name, "model": name, "modified_at": WHEN, "size": 98_362_432, "digest": "0123456789abcdef" * 4,
        "details": {"family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1"}, "capabilities": ["completion"], **more,
    }  # fmt: skip


SHOWN: Json = {
    "details": {"family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1"},
    "model_info": {"general.architecture": "llama", "llama.context_length": 8192, "llama.embedding_length": 576},
    "capabilities": ["completion"], "parameters": 'stop                           "<|im_end|>"', "template": "{{ messages }}",
    "license": "Apache License\nVersion 2.0\nJanuary 2004", "system": "You are a test.", "modelfile": "FROM /a/b\n",
}  # fmt: skip


class FakeDaemon:
    """Context manager. `answers` maps the last user message to pieces; anything else is answered by saying it back, word by word."""

    def __init__(self) -> None:
        self.models: dict[str, Json] = {"smollm2": model("smollm2:latest")}
        self.loaded: list[Json] = []
        self.answers: dict[str, list[Any]] = {}
        self.requests: list[tuple[str, str, Json]] = []
        self.broken = threading.Event()
        """Set when a client went away in the middle of an answer."""
        self.pause = 0.0
        self.raw: dict[str, tuple[int, bytes]] = {}
        """Path to a whole answer, whatever it is."""
        self.routes: dict[tuple[str, str], Callable[[Json], Json | Iterator[Any]]] = {
            ("GET", "/api/version"): lambda body: {"version": "0.1.0", "server": "localrun"},
            ("GET", "/api/tags"): lambda body: {"models": list(self.models.values())},
            ("GET", "/api/ps"): lambda body: {"models": self.loaded},
            ("POST", "/api/show"): self._show,
            ("POST", "/api/chat"): self._chat,
            ("POST", "/api/generate"): lambda body: self._known(body, {"done": True, "done_reason": "unload"}),
            ("POST", "/api/pull"): self._pull,
            ("POST", "/api/create"): lambda body: iter([{"status": "writing manifest"}, {"status": "success"}]),
            ("POST", "/api/copy"): lambda body: self._known({"model": body["source"]}, {}),
            ("DELETE", "/api/delete"): lambda body: self._delete(body),
        }
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def bodies(self, path: str) -> list[Json]:
        """What was sent to a path, in order."""
        return [body for _, at, body in self.requests if at == path]

    def _known(self, body: Json, answer: Json | None = None) -> Json:
        """`answer`, if the body names a model that is here."""
        name = body.get("model", "")
        if name not in self.models:
            raise Refusal(404, f"model '{name}' not found")
        return answer or {}

    def _delete(self, body: Json) -> Json:
        self._known(body)
        del self.models[body["model"]]
        return {}

    def _show(self, body: Json) -> Json:
        self._known(body)
        return {**SHOWN, **self.models[body["model"]].get("shown", {})}

    def _pull(self, body: Json) -> Iterator[Any]:
        if not body["model"].startswith("smol"):
            yield {"status": "pulling manifest"}
            yield {"error": "pull model manifest: file does not exist"}
            return
        yield {"status": "pulling manifest"}
        for part in range(5):
            yield {"status": "pulling b179c9523d0e", "digest": "sha256:b179", "total": 4_000_000, "completed": part * 1_000_000}
        self.models[body["model"]] = model(body["model"])
        yield {"status": "success"}

    def _chat(self, body: Json) -> Iterator[Any]:
        self._known(body)
        if not body["messages"]:
            nothing = {"role": "assistant", "content": ""}
            yield {"message": nothing, "done": False, "status": "compiling kernels", "completed": 1, "total": 2}
            yield {"message": nothing, "done": True, "done_reason": "load"}
            return
        said = body["messages"][-1]["content"]
        for piece in self.answers.get(said, [word + " " for word in said.split(" ")]):
            time.sleep(self.pause)
            if isinstance(piece, str):
                yield {"message": {"role": "assistant", "content": piece}, "done": False}
            else:
                yield piece
                if isinstance(piece, dict) and piece.get("done"):
                    return
        yield {
            "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop", "total_duration": 2 * 10**9,
            "load_duration": 10**8, "prompt_eval_count": 20, "prompt_eval_duration": 10**8, "eval_count": 10, "eval_duration": 10**9,
            "seed": 7,
        }  # fmt: skip


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _handler(fake: FakeDaemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            fake.requests.append((self.command, self.path, body))
            if self.path in fake.raw:
                self._whole(*fake.raw[self.path])
                return
            route = fake.routes.get((self.command, self.path))
            try:
                if route is None:
                    raise Refusal(404, "404 page not found")
                answer = route(body)
                first = None if isinstance(answer, dict) else next(answer)
            except Refusal as refusal:
                self._whole(refusal.status, json.dumps({"error": str(refusal)}).encode())
                return
            if isinstance(answer, dict):
                self._whole(200, json.dumps(answer).encode())
            else:
                self._stream(first, answer)

        def _whole(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, first: Any, rest: Iterator[Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                self._chunk(first)
                for item in rest:
                    if item is None:  # break off without the end that the protocol asks for
                        self.close_connection = True
                        return
                    self._chunk(item)
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                fake.broken.set()
                self.close_connection = True

        def _chunk(self, item: Any) -> None:
            data = item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        do_GET = do_POST = do_DELETE = do_HEAD = _answer

    return Handler


if __name__ == "__main__":
    with FakeDaemon() as fake:
        fake.pause = 0.03
        print(f"export LOCALRUN_HOST={fake.host}", flush=True)  # noqa: T201
        while True:
            time.sleep(60)
