"""What `make run` does once everything is installed: a daemon of its own, one question or a chat, and nothing left running.

The daemon listens on a free port, so that an Ollama or another localrun on this machine is neither used nor disturbed. PROMPT in the
environment is the question; without it a person at a terminal gets a chat, and anyone else a default question.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = os.environ.get("MODEL") or "smollm2"
QUESTION = "What is a language model? Answer in three sentences."
START_SECONDS = 60
STOP_SECONDS = 20
ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_up(daemon: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Raises SystemExit with the daemon's own last words when it does not come up."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            opener.open(url + "/api/version", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if daemon.poll() is not None:
                break
            time.sleep(0.05)
    raise SystemExit(f"Error: the daemon did not start:\n{log.read_text(errors='replace')}")


def stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def main() -> int:
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(128 + number))
    prompt = os.environ.get("PROMPT", "")
    environment = {**os.environ, "LOCALRUN_HOST": f"127.0.0.1:{free_port()}"}
    localrun = [sys.executable, "-m", "localrun"]
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP
    with tempfile.TemporaryDirectory(prefix="localrun-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "daemon.log"
        with log.open("wb") as file:
            # a session of its own: Ctrl-C stops the answer, not the daemon under it
            daemon = subprocess.Popen(
                # it is stopped below; should this process be killed first, it ends itself
                [*localrun, "serve", "--idle-exit", "600"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                creationflags=flags,
            )
        try:
            wait_until_up(daemon, f"http://{environment['LOCALRUN_HOST']}", log)
            if not prompt and sys.stdin is not None and sys.stdin.isatty():
                return talk([*localrun, "run", MODEL], None, environment)
            print(f">>> {prompt or QUESTION}", flush=True)
            return talk([*localrun, "run", "--verbose", MODEL, "--", prompt or QUESTION], subprocess.DEVNULL, environment)
        finally:
            stop(daemon)


def talk(command: list[str], stdin: int | None, environment: dict[str, str]) -> int:
    """The exit status of the terminal program. It deals with Ctrl-C itself; this process only waits for it."""
    with subprocess.Popen(command, stdin=stdin, cwd=ROOT, env=environment) as program:
        while True:
            try:
                return program.wait()
            except KeyboardInterrupt:
                continue


if __name__ == "__main__":
    sys.exit(main())
