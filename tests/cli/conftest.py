"""A fake daemon, and the terminal program run as people run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cli.fake_daemon import FakeDaemon

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as daemon:
        monkeypatch.setenv("LOCALRUN_HOST", daemon.host)
        yield daemon


@pytest.fixture
def localrun() -> Run:
    """`localrun("list", stdin="...")`: runs the command, neither end of it a terminal."""

    def run(*arguments: str, stdin: str | bytes = b"", timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "localrun", *arguments],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
