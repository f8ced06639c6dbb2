"""A bound on how fast downloads may go, kept by all threads that read from the network together.

Whoever has read bytes waits until that many would have come at the allowed rate; while it waits it reads nothing, and the connection's own
flow control slows the sender down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.25
"""Unused bandwidth is kept for so long: after a pause so many seconds' bytes may come at once."""


class Bandwidth:
    """Safe to use from several threads and for several downloads at once."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        """rate: bytes a second, above 0."""
        if rate <= 0:
            raise ValueError("a bandwidth is above 0")
        self.rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = clock() - BURST_S
        """When all bytes so far would have come at the allowed rate."""

    def spend(self, count: int) -> float:
        """Counts `count` bytes that have come; how many seconds the one who read them must wait before reading more."""
        with self._lock:
            now = self._clock()
            self._paid_until = max(self._paid_until, now - BURST_S) + count / self.rate
            return max(0.0, self._paid_until - now)
