"""MXFP4 and NVFP4: 4-bit floats (E2M1) with a power of two a block of 32, or an 8-bit float a block of 16.

    MXFP4  32 values   e (E8M0) | 16 bytes: low nibbles values 0..15, high nibbles 16..31           value = 2^(e - 128) * T[q]
    NVFP4  64 values   4 scales (E4M3 without sign) | 4 x 8 bytes: each 16 values, low nibbles the first 8     value = s / 2 * T[q]

T holds the E2M1 values doubled, so that they are integers. Sources: the OCP Microscaling Formats specification, version 1.0, for E2M1, E8M0
and E4M3; the block layouts are ggml's.
"""

from __future__ import annotations

import numpy as np

from localrun.kernels_cpu.formats.codes import Bytes, Codes, nibbles, one_scale

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def unpack_mxfp4(blocks: Bytes) -> Codes:
    d = np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 128)  # e = 0 and 1 give subnormal float32, which are exact too
    return one_scale(E2M1_DOUBLED[nibbles(blocks[:, 1:], 16)], d.astype(np.float32))


def unpack_nvfp4(blocks: Bytes) -> Codes:
    """Comes as four blocks of 16 for each block of the file. A scale's top bit is ignored; 0x7F, which is NaN in E4M3, counts as 0."""
    scale = blocks[:, :4].reshape(-1)
    exponent = (scale >> 3 & 15).astype(np.int32)
    mantissa = (scale & 7).astype(np.float32)
    normal = np.ldexp(mantissa + 8, exponent - 10)
    d = np.where(exponent == 0, np.ldexp(mantissa, -9), normal) / 2
    d[scale == 0x7F] = 0
    return one_scale(E2M1_DOUBLED[nibbles(blocks[:, 4:].reshape(-1, 8), 8)], d.astype(np.float32))
