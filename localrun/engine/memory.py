"""How much memory the KV pool may take. Knows bytes and the operating system's counters; knows no tokens."""

from __future__ import annotations

from pathlib import Path

import psutil

MEBI = 1 << 20
_RESERVE = 512 * MEBI
_MOST = 8 << 30

_CGROUP = ((Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
           (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")))  # fmt: skip


def available_memory() -> int:
    """Bytes that this process can still take: what the system says, or less where a container's limit does."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in _CGROUP:
        try:
            available = min(available, int(limit_file.read_text()) - int(used_file.read_text()))
        except (OSError, ValueError):  # no such limit on this system ("max" is no number)
            continue
    return max(0, available)


def kv_budget(available: int, asked: int, bytes_per_block: int, block_tokens: int, n_ctx_train: int) -> int:
    """Bytes for KV blocks.

    asked > 0: that. Else half of what is available after a reserve of 512 MiB, at most 8 GiB, at most 8 whole contexts of the model (a pool
    that large would never fill), but room for 512 tokens in any case: a machine that has not even that is told by the allocation itself.
    """
    if asked > 0:
        return asked
    least = bytes_per_block * -(-512 // block_tokens)
    whole_contexts = 8 * bytes_per_block * -(-max(n_ctx_train, 2048) // block_tokens)
    return max(least, min((available - _RESERVE) // 2, _MOST, whole_contexts))
