"""The daemon as a program: who has the port, how it ends, and that nothing is left after it."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from localrun.daemon import guard, serve
from localrun.daemon.serve import PortTaken, listen
from localrun.daemon.services import Activity
from localrun.errors import LocalrunError
from localrun.settings import Settings
from tests.daemon.test_lifetimes import wait_until
from tests.fakes import FakeClock

ROOT = Path(__file__).resolve().parent.parent.parent
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


class Program:
    """A daemon in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.program", str(folder), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}"

    def begin_answer(self) -> socket.socket:
        """A connection on which an answer is coming."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        try:
            body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
            client.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            received = b""
            while b'"response":"w"' not in received:
                part = client.recv(4096)
                assert part, received
                received += part
        except BaseException:
            client.close()
            raise
        return client

    def family(self) -> list[psutil.Process]:
        """All processes below the daemon's."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def program(folder: Path, *arguments: str) -> Iterator[Program]:
    running = Program(folder, *arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate(timeout=120)


def gone(processes: list[psutil.Process]) -> bool:
    return not [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@posix
def test_kill_9_leaves_no_runner(tmp_path: Path) -> None:
    with program(tmp_path) as running:
        client = running.begin_answer()
        family = running.family()
        assert len(family) >= 2  # at least the process that runners start from, and a runner
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(120)
        wait_until(lambda: gone(family))
        client.close()


@posix
def test_kill_9_leaves_no_runner_that_is_loading(tmp_path: Path) -> None:
    """Such a runner says nothing for minutes, and so does not notice by itself that nobody listens."""
    with program(tmp_path, "loading") as running, socket.create_connection(("127.0.0.1", running.port), timeout=120) as client:
        body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
        client.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: any("load" in one.get("status", "") for one in ps(running)))
        wait_until(lambda: len(running.family()) >= 2)
        family = running.family()
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(120)
        wait_until(lambda: gone(family))


def ps(running: Program) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{running.url}/api/ps", timeout=120).json()["models"]
    return found


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_ends_with_0_in_bounded_time(tmp_path: Path, number: int) -> None:
    with program(tmp_path) as running:
        client = running.begin_answer()
        family = running.family()
        os.kill(running.process.pid, number)
        received = b""
        while part := client.recv(65536):
            received += part
        assert b'{"error":"the server is shutting down"}' in received
        assert running.process.wait(120) == 0
        wait_until(lambda: gone(family))
        errors = running.process.communicate()[1]
        assert "Traceback" not in errors
        client.close()


def test_idle_it_ends_itself(tmp_path: Path) -> None:
    with program(tmp_path, "0.5") as running:
        family = running.family()
        assert running.process.wait(120) == 0
        wait_until(lambda: gone(family))


def test_whoever_comes_puts_the_end_off_and_whoever_stays_keeps_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes when it is told to: how long a busy machine takes between two requests says nothing here."""
    clock = FakeClock()
    for module in (serve, guard):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(serve, "IDLE_CHECK_S", 0.001)

    async def scenario() -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await over.wait()

        activity = Activity(last=clock.now)
        guarded: Any = guard.Guard(app, Settings(), activity)
        guarded.state = SimpleNamespace(activity=activity)
        server: Any = serve.server_for(guarded, 10.0, lambda: None)
        watch = asyncio.create_task(server._end_when_idle())

        async def come() -> None:
            await guarded({"type": "http", "method": "GET", "path": "/", "headers": []}, None, None)

        async def after(seconds: float) -> bool:
            """Whether it ends, so much later."""
            clock.advance(seconds)
            await asyncio.sleep(0.01)  # whoever sleeps for less in this loop has looked by then
            return bool(server.should_exit)

        over.set()
        for _ in range(4):
            assert not await after(6)
            await come()
        over.clear()
        begun.clear()
        staying = asyncio.create_task(come())
        await begun.wait()
        assert not await after(100)
        over.set()
        await staying
        assert not await after(9)
        assert await after(2)
        await watch

    asyncio.run(scenario())


# ---- the port -----------------------------------------------------------------------------------------------------------------


def test_a_port_that_localrun_has(tmp_path: Path) -> None:
    with program(tmp_path) as running, pytest.raises(PortTaken) as caught:
        listen("127.0.0.1", running.port)
    text = str(caught.value)
    assert text.startswith(f"port {running.port} is taken: localrun 0.") and "\n" not in text
    assert f"LOCALRUN_HOST=127.0.0.1:{running.port + 1}" in text


@pytest.mark.parametrize(
    ("answers", "who"),
    [
        ({"/": "Ollama is running", "/api/version": '{"version": "0.5.7"}'}, "Ollama 0.5.7 (process "),
        ({"/": "Welcome to my shop"}, "another web server (process "),
        ({"/": "Welcome", "/api/version": "not json"}, "another program (process "),
    ],
)
def test_a_port_that_another_server_has(answers: dict[str, str], who: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers.get(self.path)
            self.send_response(200 if text is not None else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(PortTaken) as caught:
                listen("127.0.0.1", server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
    assert f": {who}" in str(caught.value)


def test_a_port_that_says_nothing() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortTaken, match="does not answer as Ollama or localrun do"):
            listen("127.0.0.1", other.getsockname()[1])


def test_an_address_this_machine_has_not() -> None:
    with pytest.raises(LocalrunError, match="LOCALRUN_HOST"):
        listen("no-such-host.invalid", 0)
    with pytest.raises(LocalrunError, match=r"cannot listen at 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0)


def test_the_program_says_one_line_when_it_cannot_start(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for host, text in ((f"127.0.0.1:{port}", f"Error: port {port} is taken"), ("127.0.0.1:x", "Error: LOCALRUN_HOST: port 'x'")):
            environment = {**os.environ, "LOCALRUN_HOST": host, "LOCALRUN_MODELS": str(tmp_path)}
            done = subprocess.run(
                [sys.executable, "-m", "localrun.daemon"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 1
            assert done.stderr.splitlines()[-1].startswith(text) and "Traceback" not in done.stderr


def test_the_daemon_starts_without_numpy_and_numba() -> None:
    code = "import sys, localrun.daemon.serve, localrun.daemon.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    assert not {"numpy", "numba", "llvmlite", "tokenizers", "jinja2", "llguidance"} & set(done.stdout.split())
