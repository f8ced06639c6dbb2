"""How much amx.py takes at a time, and the scratch memory that needs. Light: no NumPy, no Numba."""

from __future__ import annotations

ROWS = 16
"""Tokens of a tile."""
DEPTH, DEPTH_32 = 3, 32
"""Blocks of a row that are taken at a time."""
PART_BYTES, PART_BYTES_32 = 8192 + 64 * 10, 512 + 64 * 2
"""An expanded block: its bytes, then scales and minima as they are multiplied."""
MOST_GROUPS = 8
MOST_TOKENS = 512
CONFIG, SUMS, PARTS = 0, 64, 64 + 4096
FLOATS = PARTS + max(DEPTH * PART_BYTES, DEPTH_32 * PART_BYTES_32)
"""Scratch: tile configuration, products, expanded weights, then 64 bytes of float sums a group and token."""


def scratch_bytes() -> int:
    """Scratch memory a thread needs."""
    return FLOATS + MOST_GROUPS * MOST_TOKENS * 64
