"""The real daemon, started by the terminal program when none listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Run
from tests.daemon.test_lifetimes import wait_until
from tests.ports import free_port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A free port; whatever listens there afterwards is ended."""
    number = free_port()
    monkeypatch.setenv("LOCALRUN_HOST", f"127.0.0.1:{number}")
    monkeypatch.setenv("LOCALRUN_IDLE_EXIT", "600")  # should this process be killed: no test is to count on how long it takes
    yield number
    for process in listeners(number):
        process.terminate()
        process.wait(120)


def listeners(port: int) -> list[psutil.Process]:
    """The processes of ours that listen on the port."""
    found = []
    for process in psutil.process_iter():
        try:
            connections = process.net_connections("tcp") if process.username() == psutil.Process().username() else []
        except psutil.Error:
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections):
            found.append(process)
    return found


def log_text() -> str:
    return (Path(os.environ["LOCALRUN_STATE"]) / "daemon.log").read_text(encoding="utf-8")


def test_daemon_is_started_once_and_detached(port: int, localrun: Run) -> None:
    first = localrun("list")
    assert (first.returncode, first.stderr) == (0, "starting localrun\n")
    [daemon] = listeners(port)
    second = localrun("list")
    assert (second.returncode, second.stderr) == (0, "")
    assert listeners(port) == [daemon]
    if sys.platform != "win32":
        assert os.getsid(daemon.pid) != os.getsid(0), "Ctrl-C in this terminal would reach it"
    assert Path(daemon.cwd()) == Path(os.environ["LOCALRUN_STATE"]).resolve()


def test_daemon_ends_when_idle(port: int, localrun: Run) -> None:
    assert "starting localrun\n" in localrun("list", LOCALRUN_IDLE_EXIT="2").stderr
    daemon = listeners(port)
    wait_until(lambda: not listeners(port))
    for process in daemon:
        process.wait(120)
    assert "nobody came for 2 seconds" in log_text()


def test_two_at_once_start_one(port: int, localrun: Run) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: results.append(localrun("list"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.returncode for done in results] == [0, 0, 0], [done.stderr for done in results]
    assert len(listeners(port)) == 1
    assert log_text().count("listens at") == 1


def test_start_that_fails_names_why_and_where_to_look(port: int, localrun: Run) -> None:
    done = localrun("list", LOCALRUN_KEEP_ALIVE="nonsense")
    assert done.returncode == 1
    assert "the daemon did not start: LOCALRUN_KEEP_ALIVE" in done.stderr
    assert f"(log: {os.environ['LOCALRUN_STATE']}" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_started_to_be_told_that_nothing_runs(port: int, localrun: Run) -> None:
    done = localrun("ps")
    assert (done.returncode, done.stdout.split()) == (0, ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"])
    done = localrun("stop", "smollm2")
    assert done.returncode == 1
    assert "localrun is not running" in done.stderr
    assert not listeners(port)


def test_somebody_silent_has_the_port(localrun: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = localrun("list", LOCALRUN_HOST=f"127.0.0.1:{server.getsockname()[1]}")
    assert done.returncode == 1
    assert "is not localrun" in done.stderr


def test_serve_says_who_has_the_port(port: int, localrun: Run) -> None:
    assert localrun("list").returncode == 0
    done = localrun("serve")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert f"port {port} is taken: localrun" in line
    assert "LOCALRUN_HOST=" in line
