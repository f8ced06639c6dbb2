"""The daemon as a program: takes its port, or says who has it; serves until it is told to end, or nobody has come for a while.

Knows sockets, signals and uvicorn. What is served is app.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from localrun import __version__
from localrun.errors import LocalrunError
from localrun.settings import Settings

log = logging.getLogger("localrun.daemon")

STOP_S = 5
"""How long open requests may go on after the daemon was told to end."""

BACKLOG = 2048
IDLE_CHECK_S = 0.5
PROBE_S = 2.0


class PortTaken(LocalrunError):
    """The address cannot be listened on; the message says who does, as far as can be told, and what to do."""

    code = "port_taken"


def serve(settings: Settings, *, ready: Callable[[str, int], None] | None = None, **app_options: Any) -> None:
    """Serves until SIGTERM, SIGINT or `settings.idle_exit` seconds without a request. `ready` hears the address, once it answers.

    app_options go to create_app. Raises PortTaken before anything is started.
    """
    from localrun.daemon.app import create_app

    start_logging(settings.debug)
    for name in Settings.strangers(os.environ):
        log.warning("%s is set, and is no setting here (localrun serve --help has them all)", name)
    listener = listen(settings.host, settings.port)
    try:
        app = create_app(settings, **app_options)
        host, port = listener.getsockname()[:2]

        def started() -> None:
            if not settings.api_keys and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                log.warning("anyone who reaches this address can use it; LOCALRUN_API_KEYS asks them for a key")
            log.info("localrun %s listens at http://%s:%d", __version__, f"[{host}]" if ":" in host else host, port)
            if ready is not None:
                ready(host, port)

        server_for(app, settings.idle_exit, started).run(sockets=[listener])
    finally:
        listener.close()


def server_for(app: FastAPI, idle_exit: float, started: Callable[[], None]) -> uvicorn.Server:
    """uvicorn around the application; `started` is called when it answers."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=STOP_S,
        ws="none",
        lifespan="on",
    )
    return _Server(config, idle_exit, started)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises PortTaken, or LocalrunError for an address this machine has not."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise LocalrunError(f"LOCALRUN_HOST: {host!r} is no address of this machine ({error.strerror or error})") from None
    # With the protocol spelt out, asyncio turns Nagle's algorithm off; without, every reply waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":
            # there SO_REUSEADDR would let two programs have one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError, AttributeError):
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", errno.EADDRINUSE)) or getattr(error, "winerror", 0) == 10013:
            raise PortTaken(taken_by(host, port)) from None
        if error.errno == errno.EACCES:
            advice = f"choose one above 1023, for example LOCALRUN_HOST={host}:{port + 10000}"
            raise LocalrunError(f"port {port} needs more rights than this user has; {advice}") from None
        raise LocalrunError(f"cannot listen at {host}:{port}: {error.strerror}; set LOCALRUN_HOST") from None
    return listener


def taken_by(host: str, port: int) -> str:
    """One line: who listens there, as far as they tell, and how to choose another address."""
    return f"port {port} is taken: {_holder(host, port)}; to use another port, set LOCALRUN_HOST={host}:{port + 1}"


def _holder(host: str, port: int) -> str:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    import httpx

    url = f"http://{f'[{near}]' if ':' in near else near}:{port}"
    pid = _pid_of(port)
    who = f" (process {pid})" if pid else ""
    try:
        with httpx.Client(base_url=url, timeout=PROBE_S, trust_env=False) as client:
            try:
                greeting = client.get("/").text[:100]
            except httpx.TimeoutException:  # where the whole machine stood still, before it could answer: asked once more
                greeting = client.get("/").text[:100]
            answer = client.get("/api/version", timeout=3 * PROBE_S)  # it is not silent
            told = answer.json() if answer.is_success else {}
    except (httpx.HTTPError, ValueError):
        return f"another program{who} has it, which does not answer as Ollama or localrun do"
    if isinstance(told, dict) and told.get("server") == "localrun":
        return f"localrun {told.get('localrun', '')}{who} runs there already (localrun ps shows what it does)"
    if "Ollama is running" in greeting:
        version = told.get("version", "") if isinstance(told, dict) else ""
        return f"Ollama {version}{who} runs there"
    return f"another web server{who} runs there"


def _pid_of(port: int) -> int | None:
    """Process that listens on the port, where the system tells."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
    except (psutil.Error, OSError, NotImplementedError):
        pass
    return None


class _Server(uvicorn.Server):
    """uvicorn that tells when it answers, ends when it has been idle, and ends with exit code 0 when it was asked to."""

    def __init__(self, config: uvicorn.Config, idle_exit: float, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._idle_exit = idle_exit
        self._on_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()
            if self._idle_exit > 0:
                self._watch = asyncio.create_task(self._end_when_idle())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.cancel()
        await super().shutdown(sockets=sockets)

    async def _end_when_idle(self) -> None:
        state = self.config.app.state  # type: ignore[union-attr]
        while not self.should_exit:
            await asyncio.sleep(min(IDLE_CHECK_S, self._idle_exit))
            activity = state.activity
            if activity.open == 0 and time.monotonic() - activity.last >= self._idle_exit:
                log.info("nobody came for %g seconds", self._idle_exit)
                self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again afterwards: being told to end is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = [signal.SIGINT, signal.SIGTERM, *([signal.Signals["SIGBREAK"]] if sys.platform == "win32" else [])]
        before: dict[int, Any] = {number: signal.signal(number, self._told) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def start_logging(debug: bool) -> None:
    """Lines to stderr: time, level, who, what. Nothing changes where logging is set up already."""
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("uvicorn.error", "asyncio", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def main() -> int:
    """`python -m localrun.daemon`: settings from the environment; returns the exit code."""
    import argparse

    from localrun.settings_page import settings_text

    argparse.ArgumentParser(
        prog="python -m localrun.daemon",
        description="Serves until it is told to end. It has no options; settings come from the environment:",
        epilog=settings_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    try:
        serve(Settings.from_env(os.environ))
    except LocalrunError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    return 0
