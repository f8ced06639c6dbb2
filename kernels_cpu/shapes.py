"""Tile shapes: what a processor decides about how matrices are multiplied, none of which changes a bit of any result.

What is best depends on how fast a core multiplies beside how fast memory is read, so it is timed once per processor
(models/tuning.py) and kept beside compiled kernels (kernels_cpu/shapes_file.py). Light: no NumPy, no Numba.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrun.kernels_cpu.activation_sizes import MANY, WIDE

NEVER = 1 << 20
"""As a number of rows: more than any pass has."""
WIDE_FROM = (5, 6, 7, NEVER)
MATRIX_FROM = (MANY, 13, 17, 25, 33, 49)
SHARES = (1, 2, 4)


@dataclass(frozen=True)
class Shape:
    """Of matrices of one weight type.

    wide_from: how many rows of what is left, above 4, go into a tile of eight instead of one of four, where there are both;
    matrix_from: from how many rows on matrix instructions are used, where there are any;
    share: into how many parts a thread's even share of what is left of a matrix is cut. With 1 each reads the longest possible way
    through memory, but all wait for the slowest; processors with cores of different speed want more.
    """

    wide_from: int = WIDE
    matrix_from: int = 13
    share: int = 1


DEFAULT = Shape()
"""What is used until something better is known: the best of a Sapphire Rapids' two cores, all types together."""
