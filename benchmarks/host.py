"""What every benchmark says first: which machine, how busy, which versions. And how a program is run and watched. Knows nothing of what
is measured."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
RUN_SECONDS = 3600.0


def cpu_name() -> str:
    """As the system names it."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def load_average() -> str:
    """Processes that wanted a core in the last minute; 0.0 is a quiet machine."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def describe() -> str:
    """One line: the machine and how busy it is."""
    memory = psutil.virtual_memory().total / 2**30
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{cpu_name()}, {cores} cores, {memory:.0f} GiB; {system}; load average {load_average()}"


class RunError(Exception):
    """`str(error)` is the line to show."""


@dataclass(frozen=True)
class Run:
    """A process that has ended well."""

    out: str
    seconds: float
    peak_bytes: int
    """Most resident memory, mapped file pages included; 0 where the system does not tell."""
    own_bytes: int
    """Most of it at any time that is not pages of files, which the system can drop when it needs them (Linux: RssAnon)."""


def run(command: Sequence[object], env: dict[str, str] | None = None) -> Run:
    """Runs a program to its end. Raises RunError."""
    began = time.perf_counter()
    with subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        peak = own = 0
        watched = psutil.Process(process.pid)
        while True:
            try:
                out, err = process.communicate(timeout=0.02)
                break
            except subprocess.TimeoutExpired:
                if time.perf_counter() - began > RUN_SECONDS:
                    process.kill()
                    raise RunError(f"{command[0]} took more than {RUN_SECONDS:.0f} s") from None
                with contextlib.suppress(psutil.Error):
                    memory = watched.memory_info()
                    peak = max(peak, memory.rss)
                    own = max(own, memory.rss - getattr(memory, "shared", 0))
    if process.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:]
        raise RunError(f"{' '.join(map(str, command))} ended with {process.returncode}: {' '.join(last)}")
    return Run(out, time.perf_counter() - began, peak, own)


def environment() -> dict[str, str]:
    """Of processes that run this checkout. Bytecode is written whatever the environment says: an installed localrun has its own, and a
    checkout without would compile all its sources in every process.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])}


def ours(model: Path, *arguments: str) -> dict[str, Any]:
    """One row of `python -m localrun.engine.bench`, run from this checkout. Raises RunError."""
    command = [sys.executable, "-m", "localrun.engine.bench", "-o", "jsonl", "--no-machine", *arguments, "--", model]
    done = run(command, environment())
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.out.splitlines()]
    if len(rows) != 1:
        raise RunError(f"{len(rows)} results for one test")
    return {**rows[0], "process_s": done.seconds, "peak_bytes": done.peak_bytes, "own_bytes": done.own_bytes}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other processes that never wait."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
