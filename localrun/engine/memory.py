"""How much memory the KV pool and recurrent state may take. Knows bytes and the operating system's counters; knows no tokens."""

from __future__ import annotations

from pathlib import Path

import psutil

MEBI = 1 << 20
_RESERVE = 512 * MEBI
_MOST = 8 << 30
_MOST_STATE = 4 << 30
_MOST_SLOTS = 256
_FEWEST_SLOTS = 4
"""Two sequences, and a snapshot for each."""

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


def state_slots(available: int, asked: int, state_bytes: int, *, pure: bool) -> int:
    """Slots of recurrent state; 0 for a model that has none.

    Half of them are for sequences that run, the rest for snapshots. They get a quarter of what is available, at most 4 GiB; where a budget
    is asked for, half of that, or all of it if the model has no other memory (`pure`). Never fewer than 4, never more than 256.
    """
    if not state_bytes:
        return 0
    budget = (asked if pure else asked // 2) if asked > 0 else min((available - _RESERVE) // 4, _MOST_STATE)
    return max(_FEWEST_SLOTS, min(_MOST_SLOTS, budget // state_bytes))


def blocks_without_kv(block_tokens: int, n_ctx_train: int) -> int:
    """Blocks of a model without keys and values. They take no memory and only number tokens for the prefix tree: 8 whole contexts."""
    return 8 * -(-min(max(n_ctx_train, 2048), 1 << 18) // block_tokens)
