"""What whoever records attention has to know of attention.py: how it is cut, and what memory it needs. Light: no NumPy, no Numba."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from localrun.kernels_cpu.sizes import room

STEP = 64
PART = 512
TILE_ROWS = 16
QUERIES = 48
"""Query vectors (row x head of the group) that share one read of K and V: whole tiles of registers, and whole vectors of what is kept of
each."""
BOTH, FURTHER = 1, 2
"""What rows see besides what comes before them: the whole sequence, or so many positions as each one's own end says."""
ALIBI, TABLE_BIAS = 1, 2
"""What may be added to scores by distance: a slope a head, or values from a table a head (T5)."""
WORDS = 128
"""Bytes of the words at the beginning of a thread's scratch memory."""


class Layout(NamedTuple):
    """A thread's scratch memory: at which byte of it what lies. All sizes are multiples of 64."""

    q_bytes: int
    """From one query vector to the next."""
    out_bytes: int
    """From one output to the next."""
    none: int
    """Zeros."""
    seen: int
    """int64 a query: the first position that it sees (may be below 0)."""
    past: int
    """int64 a query: the position behind the last that it sees."""
    bias: int
    """Two int64 a query: its position, then its slope (float bits) or the address of its table."""
    lasts: int
    """int64 a tile of registers: the last position that one of its queries sees."""
    peak: int
    """float32 a query: the largest score in this part."""
    sum: int
    """float32 a query: the sum of weights in this part."""
    fade: int
    """float32 a query: what its output so far is to be multiplied by."""
    all_peak: int
    all_sum: int
    """The same of the parts that are done."""
    fold: int
    """A vector for each of 16 queries, to be folded into one."""
    q: int
    scores: int
    """float32 a query and position of a step: scores, then weights."""
    out: int
    """The output in this part."""
    total: int
    """The output of the parts that are done."""
    floats: int
    """K of a step [dim][64 positions], then V [64 positions][dim], as float32."""
    nbytes: int


def layout(dim: int, dim_v: int) -> Layout:
    """Of heads of these sizes."""
    q_bytes, out_bytes = room(dim) * 4, room(dim_v) * 4
    sizes = [
        256, QUERIES * 8, QUERIES * 8, QUERIES * 16, QUERIES * 8, *[QUERIES * 4] * 5, 16 * 64, QUERIES * q_bytes, QUERIES * STEP * 4,
        QUERIES * out_bytes, QUERIES * out_bytes, STEP * max(q_bytes, out_bytes),
    ]  # fmt: skip
    return Layout(q_bytes, out_bytes, *accumulate(sizes, initial=WORDS))


def scratch_bytes(dim: int, dim_v: int) -> int:
    """Scratch memory a thread needs for `attention`."""
    return layout(dim, dim_v).nbytes + 64


def partial_bytes(n_heads: int, dim_v: int) -> int:
    """Memory that one part of one row needs: per head 64 bytes of maximum and sum, then the unfinished output."""
    return n_heads * (64 + room(dim_v) * 4)
