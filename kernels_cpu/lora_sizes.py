"""What whoever records adapters has to know of lora.py. Light: no NumPy, no Numba."""

from __future__ import annotations

ENTRY = 64
"""Bytes of what a table says about one adapter: 0 A (0: it leaves this matrix alone), 8 bytes of a group of A, 16 rank, 24 a float32
scale for each of rank values, 32 B, 40 bytes of a group of B, 48 whether A and B are F16 (else F32)."""
ROWS = 8
"""Rows that are taken together, where there are many."""


def scratch_bytes(rank: int) -> int:
    """Bytes a thread, for adapters up to that rank: A x of the rows taken together, and room that tiles may read."""
    return (ROWS + 1) * (rank + 16) * 4
