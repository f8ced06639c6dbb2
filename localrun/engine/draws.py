"""Random numbers that depend on nothing but (seed, position, stream): a counter-based generator, so that a sample is the same alone, in a
batch, after a preemption, or speculated. No state, no NumPy.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), applied in a
chain to the three words.
"""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """A bijection of 64-bit integers in which every input bit moves every output bit."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """In [0, 1), with 53 bits. `stream` tells apart several draws for one position."""
    word = mix((seed + _GOLDEN) & _MASK)
    word = mix((word + (position + 1) * _GOLDEN) & _MASK)
    word = mix((word + (stream + 1) * _GOLDEN) & _MASK)
    return (word >> 11) / (1 << 53)


def draw_seed() -> int:
    """A seed for a request that brought none; small enough for any JSON reader."""
    return secrets.randbelow(1 << 31)
