"""T5's relative positions (Raffel et al. 2020): what is added to a score depends on the bucket of the distance from query to key.

Near distances have a bucket each, farther ones share buckets that grow with the logarithm, and from FARTHEST on there is one for all.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FARTHEST = 128
BEYOND = 80
"""Keys behind the last one that a kernel may look up before it masks them."""


def buckets(distances: NDArray[np.int64], n: int, *, both: bool) -> NDArray[np.int64]:
    """Bucket of each distance (key's position less the query's). both: half of the n buckets are for keys behind the query; otherwise
    those count as distance 0.
    """
    first: NDArray[np.int64] = np.zeros_like(distances)
    if both:
        n //= 2
        first = np.where(distances > 0, n, 0)
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    near = n // 2
    # Powers of two lie exactly on borders; what is added keeps them on the upper side of it whatever the logarithm rounds to.
    ratio = np.log(np.maximum(distances, 1) / near) / math.log(FARTHEST / near)
    far = np.minimum(np.floor(near + ratio * (n - near) + 1e-6).astype(np.int64), n - 1)
    return first + np.where(distances < near, distances, far)


def distance_table(values: NDArray[np.float32], reach: int, *, both: bool) -> NDArray[np.float32]:
    """What each head adds at distances from -reach on: float32 (heads, 2 * reach + BEYOND, up to a multiple of 16).

    values: (buckets, heads).
    """
    width = -(-(2 * reach + BEYOND) // 16) * 16
    rows = values[buckets(np.arange(-reach, width - reach), len(values), both=both)]
    return np.ascontiguousarray(rows.T)
