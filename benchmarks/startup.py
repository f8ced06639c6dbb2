"""Time from `localrun run MODEL "hi"` to the first word on the terminal: no daemon yet, daemon running, model loaded.

    python benchmarks/startup.py [--model smollm2] [--rounds 3]

Uses a daemon of its own on a free port and the person's own store (the model is pulled first if it is not there) and kernel cache,
filled by a first answer that is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import host
import psutil
from peer import client, end, free_port, wait_until_ready

PROMPT = "hi"
STOP_SECONDS = 30.0


class Program:
    """The `localrun` command with an address, and a folder for logs, of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.env = {**host.environment(), "LOCALRUN_HOST": f"127.0.0.1:{self.port}", "LOCALRUN_STATE": str(folder)}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "localrun", *words]

    def first_word(self, model: str) -> tuple[float, float]:
        """Seconds to the first byte of the answer, and to the end. Raises RunError."""
        began = time.perf_counter()
        command = self.command("run", model, PROMPT)
        with subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            first_s = time.perf_counter() - began
            process.stdout.read()
        if not first.strip() or process.returncode:
            raise host.RunError(f"localrun run ended with {process.returncode} and no answer")
        return first_s, time.perf_counter() - began

    @contextlib.contextmanager
    def daemon(self) -> Iterator[None]:
        """One that listens."""
        process = subprocess.Popen(self.command("serve"), env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(f"http://127.0.0.1:{self.port}/api/version", process)
            yield
        finally:
            end(process)

    def stop_daemon(self) -> None:
        """Ends the one that `localrun run` started by itself. Raises RunError."""
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                listens = any(c.laddr.port == self.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN)
                if listens:
                    process.terminate()
                    process.wait(STOP_SECONDS)
                    return
        raise host.RunError(f"nobody listens at port {self.port}")

    def unload(self, model: str) -> None:
        with client(f"http://127.0.0.1:{self.port}") as http:
            http.post("/api/generate", json={"model": model, "keep_alive": 0}).raise_for_status()
            until = time.monotonic() + STOP_SECONDS
            while http.get("/api/ps").json()["models"]:
                if time.monotonic() > until:
                    raise host.RunError("the model was not unloaded")
                time.sleep(0.05)


def measured(model: str, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds to the first byte and to the end, `rounds` times for each state."""
    program = Program(folder)
    found: dict[str, list[tuple[float, float]]] = {"daemon not running": [], "daemon running": [], "model loaded": []}
    program.first_word(model)  # pulls the model, compiles kernels, builds the tokenizer
    program.stop_daemon()
    for _ in range(rounds):
        found["daemon not running"].append(program.first_word(model))
        program.stop_daemon()
        with program.daemon():
            time.sleep(2.0)  # a daemon that has run for a while, its helper process started
            found["daemon running"].append(program.first_word(model))
            found["model loaded"].append(program.first_word(model))
    return found


def main() -> int:
    """Exit status 0, or 1 after a line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"machine: {host.describe()}\nmodel: {options.model}, prompt: {PROMPT!r}, medians of {options.rounds}\n")
    try:
        with tempfile.TemporaryDirectory(prefix="localrun-startup-", ignore_cleanup_errors=True) as folder:
            found = measured(options.model, options.rounds, Path(folder))
    except host.RunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    for state, seconds in found.items():
        first, whole = host.median([a for a, _ in seconds]), host.median([b for _, b in seconds])
        print(f"{state:<20} first word {first:6.2f} s   whole answer {whole:6.2f} s")
    print(f"\nload average at the end: {host.load_average()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
