"""How many bytes activations take in the forms that activations.py describes. Light: no NumPy, no Numba."""

from __future__ import annotations

SUPER = 384
"""Bytes of 256 quantized activations: 256 int8, then from 256 d f32, 260 pad, 264 eight int16 sums of 32, 288 sixteen int16 sums of 16,
320 sixteen int32: -32 times the sums of 16."""
LEVELS = 127
"""Quants of the largest activation of a block."""
FEWER_LEVELS = 63
"""The same in a block of 256 that with LEVELS would hold sixteen successive quants whose magnitudes add up to more than MOST_OF_16."""
MOST_OF_16 = 1023
"""Limit of sum |q| over 16 successive quants of a block of 256: what they make with weights of 6 bits, at most 32 * 1023, is a number of
16 bits, which the processor multiplies by a scale and adds in one operation instead of three."""
META = 28
"""Bytes of what belongs to 32 quantized activations: d f32, d * sum f32, then int32: -8, -16, -128 times sum, -16 times the sums of
either half."""
TILE_SUPER = 16 * 320
"""Bytes of the tiles of 16 tokens: the first 320 bytes of their SUPER."""
TILE_PAIR = 1024 + 256
MANY = 9
"""Tokens from which on matrix instructions may pay, though they work on sixteen: plain tiles take eight at a time. See shapes.Shape."""
WIDE = 6
"""Rows from which a tile of eight is better than one of four and a rest, where nobody has looked. See shapes.Shape."""


def tile_bytes(kind: str, n: int, max_tokens: int) -> int:
    """Bytes of the tiles of a batch; 0 for kind 'f'."""
    blocks = -(-max_tokens // 16)
    return {"256": n // 256 * TILE_SUPER, "32": -(-n // 64) * TILE_PAIR, "f": 0}[kind] * blocks
