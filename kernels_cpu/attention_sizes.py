"""What whoever records attention has to know of attention.py: how it is cut, and what memory it needs. Light: no NumPy, no Numba."""

from __future__ import annotations

from localrun.kernels_cpu.sizes import room

STEP = 64
PART = 512
TILE_ROWS = 8
QUERIES = 8
"""Query vectors (row x head of the group) that share one read of K and V."""
BOTH, FURTHER = 1, 2
"""What rows see besides what comes before them: the whole sequence, or so many positions as each one's own end says."""
ALIBI, TABLE_BIAS = 1, 2
"""What may be added to scores by distance: a slope a head, or values from a table a head (T5)."""
FRAME = 192
"""Words at the beginning of a thread's scratch memory."""


def scratch_bytes(dim: int, dim_v: int) -> int:
    """Scratch memory a thread needs for `attention`."""
    return FRAME + QUERIES * (room(dim) * 4 + STEP * 4 + 2 * room(dim_v) * 4 + 2 * 8 + 8 + 8 + 8)


def partial_bytes(n_heads: int, dim_v: int) -> int:
    """Memory that one part of one row needs: per head 64 bytes of maximum and sum, then the unfinished output."""
    return n_heads * (64 + room(dim_v) * 4)
