"""The IQ types: values come from a table of 16, or in groups of 4 or 8 from a grid of points (grids.py), with signs apart.

    IQ4_NL   32 values   d f16 | 16 bytes of nibbles                       value = d * T[q]
    IQ4_XS  256 values   d f16 | upper scale bits u16 | 4 bytes lower scale bits | 128 bytes of nibbles     value = d * (scale - 32) * T[q]
    IQ2_XXS 256 values   d f16 | 8 x (4 grid indices u8 | u32: 4 x 7 bits of signs, 4 bits of scale)
    IQ2_XS  256 values   d f16 | 32 x u16 (9 bits of index, 7 of signs) | 8 bytes: 16 scales
    IQ2_S   256 values   d f16 | 32 low index bytes | 32 sign bytes | 8 bytes: upper two index bits | 8 bytes: 16 scales
    IQ3_XXS 256 values   d f16 | 64 grid indices u8 | 8 x u32: 4 x 7 bits of signs, 4 bits of scale
    IQ3_S   256 values   d f16 | 64 low index bytes | 8 bytes: ninth index bits | 32 sign bytes | 4 bytes: 8 scales
    IQ1_S   256 values   d f16 | 32 low index bytes | 8 x u16 (4 x 3 upper index bits, 3 bits of scale, 1 of shift)
    IQ1_M   256 values   32 low index bytes | 16 bytes of (3 upper index bits, 1 of shift) | 4 x u16 (4 x 3 bits of scale, 4 bits of d)

IQ2 and IQ3 take points of positive numbers and turn the signs of single values; where 7 bits stand for 8 signs, the eighth makes the
number of minus signs even. Their scale is d / 8 (IQ2), d / 4 (IQ3_XXS) or d (IQ3_S) times an odd number 2 s + 1. IQ1 takes points of
{-1, 0, 1} and shifts all eight by 1/8 up or down; in eighths these are integers from -9 to 9, with the scale d / 8 * (2 s + 1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats.codes import Bytes, Codes, bits, half, nibbles, one_scale, pairs, words
from localrun.kernels_cpu.formats.grids import grid

NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""T of IQ4_NL and IQ4_XS."""

EIGHTH = np.float32(0.125)

Ints = NDArray[np.int64]


def unpack_iq4_nl(blocks: Bytes) -> Codes:
    return one_scale(NONLINEAR[nibbles(blocks[:, 2:], 16)], half(blocks, 0))


def unpack_iq4_xs(blocks: Bytes) -> Codes:
    scales = nibbles(blocks[:, 4:8], 1) | pairs(blocks[:, 2:4], 1) << 4
    return Codes(NONLINEAR[nibbles(blocks[:, 8:], 16)], half(blocks, 0), scales.astype(np.int16) - np.int16(32))


def unpack_iq2_xxs(blocks: Bytes) -> Codes:
    index = blocks[:, 2:].reshape(len(blocks), 8, 8)[:, :, :4]
    signs, scales = _signs_and_scale(words(blocks, 2, 66, "<u4")[:, 1::2])
    return _signed("iq2_xxs", index, signs, half(blocks, 0) * EIGHTH, scales)


def unpack_iq2_xs(blocks: Bytes) -> Codes:
    both = words(blocks, 2, 66, "<u2")
    return _signed("iq2_xs", both & 511, _even_signs(both >> 9), half(blocks, 0) * EIGHTH, nibbles(blocks[:, 66:], 1))


def unpack_iq2_s(blocks: Bytes) -> Codes:
    index = blocks[:, 2:34].astype(np.int64) | pairs(blocks[:, 66:74], 1).astype(np.int64) << 8
    return _signed("iq2_s", index, blocks[:, 34:66], half(blocks, 0) * EIGHTH, nibbles(blocks[:, 74:], 1))


def unpack_iq3_xxs(blocks: Bytes) -> Codes:
    signs, scales = _signs_and_scale(words(blocks, 66, 98, "<u4"))
    return _signed("iq3_xxs", blocks[:, 2:66], signs, half(blocks, 0) * np.float32(0.25), scales)


def unpack_iq3_s(blocks: Bytes) -> Codes:
    index = blocks[:, 2:66].astype(np.int64) | bits(blocks[:, 66:74]).astype(np.int64) << 8
    return _signed("iq3_s", index, blocks[:, 74:106], half(blocks, 0), nibbles(blocks[:, 106:], 1))


def unpack_iq1_s(blocks: Bytes) -> Codes:
    high = words(blocks, 34, 50, "<u2")[:, :, None]  # (B, 8, 1)
    index = blocks[:, 2:34].astype(np.int64).reshape(-1, 8, 4) | (high >> np.array([0, 3, 6, 9]) & 7) << 8
    down = np.repeat(high >> 15, 4, axis=2)
    return _shifted(index, down, half(blocks, 0), high[:, :, 0] >> 12 & 7)


def unpack_iq1_m(blocks: Bytes) -> Codes:
    """d is spread over the upper four bits of the four words, lowest bits in the first."""
    scales = words(blocks, 48, 56, "<u2")  # (B, 4)
    d = (scales >> 12 << np.array([0, 4, 8, 12])).sum(axis=1).astype(np.uint16).view(np.float16).astype(np.float32)
    high = nibbles(blocks[:, 32:48], 1).astype(np.int64)  # (B, 32)
    index = blocks[:, :32].astype(np.int64) | (high & 7) << 8
    return _shifted(index, high >> 3, d, (scales[:, :, None] >> np.array([0, 3, 6, 9]) & 7).reshape(-1, 16))


def _even_signs(index: Ints) -> Ints:
    """Seven sign bits to eight: the eighth is their parity."""
    parity = index ^ index >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return index & 127 | (parity & 1) << 7


def _signs_and_scale(packed: Ints) -> tuple[Ints, Ints]:
    """32-bit words (B, 8) to sign bytes (B, 32) and 4-bit scales (B, 8)."""
    signs = _even_signs(packed[:, :, None] >> np.array([0, 7, 14, 21]) & 127)
    return signs.reshape(len(packed), 32), packed >> 28


def _signed(
    name: str, index: NDArray[np.integer], signs: NDArray[np.integer], d: NDArray[np.float32], scales: NDArray[np.integer]
) -> Codes:
    """Grid points with one sign bit a value (signs: one byte for 8 values), and scales d * (2 s + 1)."""
    points = grid(name)[index].reshape(len(index), 256)
    minus = bits(signs.astype(np.uint8)).astype(bool)
    return Codes(np.where(minus, -points, points), d, (2 * scales + 1).astype(np.int16))


def _shifted(index: Ints, down: Ints, d: NDArray[np.float32], scales: Ints) -> Codes:
    """Points of {-1, 0, 1} in eighths, one up, or one down where `down` is 1."""
    points = grid("iq1")[index].reshape(len(index), 32, 8) * np.int8(8)
    points = points + (1 - 2 * down.reshape(len(index), 32, 1)).astype(np.int8)
    return Codes(points.reshape(len(index), 256), d * EIGHTH, (2 * scales + 1).astype(np.int16))
