"""How much one round of measure.py's multiplying does. Light: no NumPy, no Numba."""

from __future__ import annotations

from localrun.kernels_cpu.isa import Isa

TILES = 4
"""Tile registers that sums go to, one product each."""
TILE_MULTIPLY_ADDS = 16 * 16 * 64


def multiply_adds(isa: Isa) -> int:
    """Of one round of `multiply`."""
    return TILES * TILE_MULTIPLY_ADDS if isa.amx else 64 * accumulators(isa)


def accumulators(isa: Isa) -> int:
    """Enough to hide an instruction's latency, few enough to stay in registers."""
    return 12 if isa.name == "avx512" else 4
