"""TQ1_0, TQ2_0, Q1_0, Q2_0: one or two bits a value and one float16 scale a block.

    TQ1_0  256 values of {-1, 0, 1}   48 bytes of five digits | 4 bytes of four digits | d f16
    TQ2_0  256 values of {-1, 0, 1, 2}   64 bytes of four 2-bit values | d f16            value = d * (q - 1)
    Q1_0   128 values of {-1, 1}      d f16 | 16 bytes, lowest bit first                  value = bit ? d : -d
    Q2_0    64 values of {-1, 0, 1, 2}   d f16 | 16 bytes, lowest bits first              value = d * (q - 1)

TQ1_0 writes digits base 3 as a fixed-point fraction: byte b stands for b / 256, and multiplying it by 3 pushes out the next digit.
Digit n of 32 bytes gives 32 successive values, then digit n + 1 the next 32; so with the first 32 bytes, then with the next 16, then
with the last 4. TQ2_0 has two halves of 128 values: the lowest bits of 32 bytes are 32 successive values, the next bits the next 32.
"""

from __future__ import annotations

import numpy as np

from localrun.kernels_cpu.formats.codes import Bytes, Codes, bits, half, one_scale, pairs


def unpack_tq1_0(blocks: Bytes) -> Codes:
    parts = [_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4)]
    codes = np.concatenate(parts, axis=1).astype(np.int8) - np.int8(1)
    return one_scale(codes, half(blocks, 52))


def unpack_tq2_0(blocks: Bytes) -> Codes:
    return one_scale(pairs(blocks[:, :64], 32).astype(np.int8) - np.int8(1), half(blocks, 64))


def unpack_q1_0(blocks: Bytes) -> Codes:
    return one_scale(bits(blocks[:, 2:]).astype(np.int8) * np.int8(2) - np.int8(1), half(blocks, 0))


def unpack_q2_0(blocks: Bytes) -> Codes:
    return one_scale(pairs(blocks[:, 2:], 1).astype(np.int8) - np.int8(1), half(blocks, 0))


def _digits(packed: Bytes, count: int) -> Bytes:
    """Bytes (B, n) to their first `count` digits base 3: (B, count n), digit 0 of all bytes first."""
    shifted = packed[:, None, :] * np.array([3**i for i in range(count)], np.uint8)[:, None]  # modulo 256: earlier digits fall off
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)
