"""Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K: super-blocks of 256 values in sub-blocks of 16 or 32 that have small integer scales.

    Q2_K    16 x (scale 4 bits, min 4 bits) | 64 bytes of 2-bit values | d f16 | dmin f16         sub-blocks of 16
    Q3_K    32 bytes of third bits | 64 bytes of 2-bit values | 12 bytes: 16 scales of 6 bits | d f16
    Q4_K    d f16 | dmin f16 | 12 bytes: 8 scales and 8 mins of 6 bits | 128 bytes of 4-bit values      sub-blocks of 32
    Q5_K    d f16 | dmin f16 | 12 bytes likewise | 32 bytes of fifth bits | 128 bytes of 4-bit values
    Q6_K    128 bytes of 4-bit values | 64 bytes of their upper two bits | 16 scales int8 | d f16      sub-blocks of 16
    Q8_K    d f32 | 256 int8 | 16 sums int16      (made of activations, never found in files; the sums are of 16 values each)

2-bit values: two halves of 128 values, 32 bytes each; byte l holds values l, l + 32, l + 64, l + 96 of its half, lowest bits first.
4-bit values of Q4_K and Q5_K: four runs of 64 values, 32 bytes each, low nibbles the first 32 of them; of Q6_K: two halves of 128 values,
64 bytes each, low nibbles the first 64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu.formats.codes import Bytes, Codes, bits, half, nibbles, one_scale, pairs


def unpack_q2_k(blocks: Bytes) -> Codes:
    scales = blocks[:, :16]
    codes = pairs(blocks[:, 16:80], 32).astype(np.int8)
    return Codes(codes, half(blocks, 80), (scales & 15).astype(np.int16), half(blocks, 82), (scales >> 4).astype(np.int16))


def unpack_q3_k(blocks: Bytes) -> Codes:
    """The third bit of value 32 j + l is bit j of byte l; where it is 0 the code is 4 less: codes run from -4 to 3.

    Scale i is 6 bits, minus 32: the lower four are nibble i of bytes 0..7 (low nibbles first), the upper two are in byte 8 + i % 4 from bit
    2 (i / 4) on.
    """
    third = _planes(blocks[:, :32])
    codes = pairs(blocks[:, 32:96], 32).astype(np.int8) + third.astype(np.int8) * np.int8(4) - np.int8(4)
    scales = nibbles(blocks[:, 96:104], 8) | pairs(blocks[:, 104:108], 4) << 4
    return Codes(codes, half(blocks, 108), scales.astype(np.int16) - np.int16(32))


def unpack_q4_k(blocks: Bytes) -> Codes:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    codes = nibbles(blocks[:, 16:], 32).astype(np.int8)
    return Codes(codes, half(blocks, 0), scales, half(blocks, 2), minima)


def unpack_q5_k(blocks: Bytes) -> Codes:
    """The fifth bit of value 32 j + l is bit j of byte l of the fifth bits."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    codes = nibbles(blocks[:, 48:], 32) | _planes(blocks[:, 16:48]) << 4
    return Codes(codes.astype(np.int8), half(blocks, 0), scales, half(blocks, 2), minima)


def unpack_q6_k(blocks: Bytes) -> Codes:
    """The upper bits lie as the 2-bit values of the other types do."""
    codes = nibbles(blocks[:, :128], 64) | pairs(blocks[:, 128:192], 32) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.int16)
    return Codes(codes.astype(np.int8) - np.int8(32), half(blocks, 208), scales)


def unpack_q8_k(blocks: Bytes) -> Codes:
    d = np.ascontiguousarray(blocks[:, :4]).view("<f4")[:, 0].astype(np.float32)
    return one_scale(blocks[:, 4:260].view(np.int8), d)


def _planes(packed: Bytes) -> Bytes:
    """32 bytes a block to 256 bits: bit j of byte l becomes value 32 j + l."""
    return bits(packed).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)


def _six_bit_scales(packed: Bytes) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """The 12 bytes of Q4_K and Q5_K to 8 scales and 8 mins, int16 (B, 8) each.

    Bytes 0..3 and 4..7 hold the first four scales and mins in six bits; their two spare bits are the upper ones of the last four,
    whose low nibbles (scale) and high nibbles (min) are bytes 8..11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.int16), minima.astype(np.int16)
