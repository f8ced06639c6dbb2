"""What all quantized types have in common: small integers, an integer scale for each run of them, and one or two floats a block.

    value = d * scale * code - dmin * minimum

Every type of ggml but the floats is of this form, so one dequantization and one matmul contract (../reference.py) serve them all; the files
beside this one say where the bits of each lie. Codes have at most 7 bits and a sign, scales at most 7, d is a float16 (or a power of two):
`d * scale * code` is exact in float32, and a value is rounded at most once, where the minimum is subtracted. So the order of the operations
does not matter and neither does fusing them: dequantization has one right answer, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Codes:
    """Blocks taken apart. B blocks of L values, in J sub-blocks of L / J values each.

    codes: int8 (B, L); d: float32 (B,); scales: int16 (B, J); dmin: float32 (B,) and minima: int16 (B, J), or both None.
    B may be larger than the number of the file's blocks: a type whose sub-blocks have float scales comes as that many blocks.
    """

    codes: NDArray[np.int8]
    d: NDArray[np.float32]
    scales: NDArray[np.int16]
    dmin: NDArray[np.float32] | None = None
    minima: NDArray[np.int16] | None = None

    def values(self) -> NDArray[np.float32]:
        """float32 (B, L)."""
        blocks, length = self.codes.shape
        runs = self.codes.reshape(blocks, self.scales.shape[1], -1).astype(np.float32)  # (B, J, L / J)
        values = (self.d[:, None] * self.scales.astype(np.float32))[:, :, None] * runs
        if self.dmin is not None and self.minima is not None:
            values = values - (self.dmin[:, None] * self.minima.astype(np.float32))[:, :, None]
        return values.reshape(blocks, length)


def half(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """The float16 at byte `at` of each block: float32 (B,)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def words(blocks: Bytes, start: int, end: int, dtype: str) -> NDArray[np.int64]:
    """Bytes start..end of each block as little-endian unsigned integers of `dtype` ("<u2" or "<u4"): int64 (B, n)."""
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype).astype(np.int64)


def nibbles(quants: Bytes, run: int) -> Bytes:
    """Bytes (B, n) to 4-bit values (B, 2 n): of each `run` bytes, the low nibbles come first, then the high ones."""
    cut = quants.reshape(len(quants), -1, 1, run)
    return np.concatenate([cut & 15, cut >> 4], axis=2).reshape(len(quants), -1)


def pairs(quants: Bytes, run: int) -> Bytes:
    """Bytes (B, n) to 2-bit values (B, 4 n): of each `run` bytes, first the lowest two bits of all, then the next two, and so on."""
    cut = quants.reshape(len(quants), -1, 1, run)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (cut >> shifts & np.uint8(3)).reshape(len(quants), -1)


def bits(packed: Bytes) -> Bytes:
    """Bytes (B, n) to bits (B, 8 n), the lowest of a byte first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def one_scale(codes: NDArray[np.int8], d: NDArray[np.float32], minus: NDArray[np.float32] | None = None) -> Codes:
    """Codes of a type with no scales inside a block: value = d * code (- minus)."""
    ones = np.ones((len(codes), 1), np.int16)
    return Codes(codes, d, ones, minus, None if minus is None else ones)
