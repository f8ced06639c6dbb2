"""How fast this machine reads memory with all cores, remembered: what bounds the speed of writing tokens.

Run as a program it measures and prints bytes a second, with the yardstick that `localrun bench` uses; `bandwidth` runs that in a process of
its own, since it loads NumPy and LLVM, and keeps the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

_FRESH_S = 3600.0
"""For so long the answer stands."""
_BEST_S = 30 * 86400.0
"""For so long a better one than the newest does: other programs only ever make a measurement worse."""
_BYTES = 400 << 20


def bandwidth(cache: Path, n_threads: int) -> float:
    """Bytes a second that `n_threads` threads read together; 0.0 when it cannot be measured here. Takes some seconds when it is not kept in
    `cache`."""
    kept = cache / "bandwidth.json"
    best, age = _kept(kept, n_threads)
    if age < _FRESH_S:
        return best
    try:
        command = [sys.executable, "-P", "-m", "localrun.engine.bandwidth", str(n_threads), str(cache)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, stdin=subprocess.DEVNULL)
        speed = max(best, float(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return best
    draft = kept.with_name(f".bandwidth-{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"threads": n_threads, "bytes_per_second": speed, "at": time.time()}), encoding="utf-8")
        draft.replace(kept)
    return speed


def _kept(path: Path, n_threads: int) -> tuple[float, float]:
    """The answer that is kept, and how old it is in seconds."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        body = json.loads(path.read_bytes())
        age = time.time() - body["at"]
        if body["threads"] == n_threads and 0 <= age < _BEST_S:
            return float(body["bytes_per_second"]), age
    return 0.0, float("inf")


def _measure(n_threads: int, cache: str) -> float:
    import psutil

    from localrun.engine.machine import Yardstick

    with Yardstick(n_threads, cache_dir=cache) as yardstick:
        return yardstick.read_bytes_s(min(_BYTES, int(psutil.virtual_memory().available) // 4))


if __name__ == "__main__":
    sys.stdout.write(f"{_measure(int(sys.argv[1]), sys.argv[2])}\n")
