"""How fast this machine reads memory with all cores: what bounds the speed of writing tokens.

Run as a program it measures and prints bytes a second (it needs NumPy, which whoever asks need not load); `bandwidth` runs that once and
remembers the answer.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

from localrun.store.durable import write_file

_ROUNDS = 6
_MOST_BYTES = 512 << 20
_KEPT_S = 7 * 86400.0
"""After which it is measured again: machines get other memory, and containers other neighbours."""


def bandwidth(cache: Path, n_threads: int) -> float:
    """Bytes a second; 0.0 when it cannot be measured here. The answer is kept in `cache` for a week. Takes about a second otherwise."""
    kept = cache / "bandwidth.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        body = json.loads(kept.read_bytes())
        if body["threads"] == n_threads and 0 <= time.time() - body["at"] < _KEPT_S:
            return float(body["bytes_per_second"])
    try:
        command = [sys.executable, "-m", "localrun.store.bandwidth", str(n_threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL)
        speed = float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_file(kept, json.dumps({"threads": n_threads, "bytes_per_second": speed, "at": time.time()}).encode())
    return speed


def _measure(n_threads: int) -> float:
    """The best of some rounds in which every thread reads a part of its own, larger than caches."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import psutil

    size = max(32 << 20, min(_MOST_BYTES, int(psutil.virtual_memory().available) // 4)) // n_threads // 8
    parts = [np.ones(size, np.int64) for _ in range(n_threads)]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, size * 8 * n_threads / (time.perf_counter() - began))
    return best


if __name__ == "__main__":
    sys.stdout.write(f"{_measure(int(sys.argv[1]))}\n")
