"""Which NVIDIA cards this machine has and what is free on them, for plans: asked of the driver's own tool, since the daemon loads no CUDA.

What a runner can use is found out by the runner (kernels_gpu/card.py).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

from localrun.store.plan import CardMemory

TIMEOUT_S = 5
_ASKED = ("--query-gpu=name,memory.free", "--format=csv,noheader,nounits")


def cards() -> list[CardMemory]:
    """Name and free bytes of each card, none where there is no driver or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, *_ASKED], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, _, free = line.rpartition(",")
        if free.strip().isdigit():
            found.append(CardMemory(name.strip(), int(free) << 20))
    return found


def usable() -> bool:
    """Whether runners have what they need to use cards."""
    return importlib.util.find_spec("cupy") is not None
