"""How vision.py cuts its work, and what memory it needs. Light: no NumPy, no Numba."""

from __future__ import annotations

ROWS = 8
"""Patches whose queries are taken together."""


def scratch_bytes(n: int) -> int:
    """Bytes a thread for n patches: ROWS rows of scores, and 16 values of each row's output."""
    return ROWS * (-(-n // 16) * 64 + 64)
