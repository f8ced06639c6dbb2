"""Large memory of a process's own, on huge pages where the system has them: walking page tables costs a fifth of the memory's speed."""

from __future__ import annotations

import contextlib
import mmap

HUGE_PAGE = 2 << 20


def anonymous(nbytes: int) -> mmap.mmap:
    """`nbytes` zeroed bytes, taken by the system only as they are written.

    Private on purpose: Python's default, shared memory, gets no huge pages. Raises OSError when the system refuses.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a hint that not every system knows
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
