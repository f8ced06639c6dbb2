"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 values, one float16 scale, and a float16 minimum in the _1 types.

    Q4_0   d f16 | 16 bytes                 value = d * (q - 8)
    Q4_1   d f16 | m f16 | 16 bytes         value = d * q + m
    Q5_0   d f16 | 4 bytes | 16 bytes       value = d * (q - 16)
    Q5_1   d f16 | m f16 | 4 bytes | 16 bytes
    Q8_0   d f16 | 32 int8                  value = d * q

Of the 16 bytes, byte k holds the low four bits of value k in its low nibble and those of value k + 16 in its high one. Bit k of the
4 bytes, read as a 32-bit word, is the fifth bit of value k.
"""

from __future__ import annotations

import numpy as np

from localrun.kernels_cpu.formats.codes import Bytes, Codes, bits, half, nibbles, one_scale


def unpack_q4_0(blocks: Bytes) -> Codes:
    return one_scale(nibbles(blocks[:, 2:], 16).astype(np.int8) - np.int8(8), half(blocks, 0))


def unpack_q4_1(blocks: Bytes) -> Codes:
    return one_scale(nibbles(blocks[:, 4:], 16).astype(np.int8), half(blocks, 0), -half(blocks, 2))


def unpack_q5_0(blocks: Bytes) -> Codes:
    codes = nibbles(blocks[:, 6:], 16) | bits(blocks[:, 2:6]) << 4
    return one_scale(codes.astype(np.int8) - np.int8(16), half(blocks, 0))


def unpack_q5_1(blocks: Bytes) -> Codes:
    codes = nibbles(blocks[:, 8:], 16) | bits(blocks[:, 4:8]) << 4
    return one_scale(codes.astype(np.int8), half(blocks, 0), -half(blocks, 2))


def unpack_q8_0(blocks: Bytes) -> Codes:
    return one_scale(blocks[:, 2:].view(np.int8), half(blocks, 0))
