"""Types with blocks of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Layouts as ggml defines them; scales from fit.py.

    Q4_0  d f16 | 16 bytes: value i low, value i + 16 high nibble          x = d (q - 8)
    Q4_1  d f16 | m f16 | likewise                                         x = d q + m
    Q5_0  d f16 | fifth bits u32, bit i of value i | likewise              x = d (q - 16)
    Q5_1  d f16 | m f16 | fifth bits | likewise                            x = d q + m
    Q8_0  d f16 | 32 int8                                                  x = d q
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from localrun.quantize.fit import affine, put_half, rounded, symmetric

_f = np.float32
TRIES = 19
EVEN = np.ones(32, np.float32)


@numba.njit(nogil=True)
def _put_quants(q: NDArray[np.uint8], five: bool, out: NDArray[np.uint8], at: int) -> None:
    if five:
        bits = 0
        for i in range(32):
            bits |= (int(q[i]) >> 4) << i
        for i in range(4):
            out[at + i] = (bits >> (8 * i)) & 255
        at += 4
    for i in range(16):
        out[at + i] = (q[i] & 15) | ((q[i + 16] & 15) << 4)


@numba.njit(nogil=True)
def _signed(x: NDArray[np.float32], w: NDArray[np.float32], half: int, size: int, out: NDArray[np.uint8]) -> None:
    """Q4_0 (half 8) and Q5_0 (16). x: (blocks, 32); w: (k, 32), see fit.py; out: (blocks * size,)."""
    d = np.empty(len(x), np.float32)
    symmetric(x, w, -half, half - 1, TRIES, d)
    q = np.empty(32, np.uint8)
    low, high = _f(-half), _f(half - 1)
    for b in range(len(x)):
        scale = put_half(out, b * size, d[b])
        inverse = _f(1.0) / scale if scale != 0 else _f(0.0)
        for i in range(32):
            q[i] = rounded(x[b, i] * inverse, low, high) + half
        _put_quants(q, half == 16, out, b * size + 2)


@numba.njit(nogil=True)
def _with_minimum(x: NDArray[np.float32], w: NDArray[np.float32], top: int, size: int, out: NDArray[np.uint8]) -> None:
    """Q4_1 (top 15) and Q5_1 (31)."""
    d, m = np.empty(len(x), np.float32), np.empty(len(x), np.float32)
    affine(x, w, top, False, TRIES, d, m)
    q = np.empty(32, np.uint8)
    for b in range(len(x)):
        scale = put_half(out, b * size, d[b])
        minimum = put_half(out, b * size + 2, m[b])
        inverse = _f(1.0) / scale if scale != 0 else _f(0.0)
        for i in range(32):
            q[i] = rounded((x[b, i] - minimum) * inverse, _f(0.0), _f(top))
        _put_quants(q, top == 31, out, b * size + 4)


@numba.njit(nogil=True)
def _bytes(x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    """Q8_0: 255 levels leave nothing to search for."""
    for b in range(len(x)):
        peak = _f(0.0)
        for i in range(32):
            peak = max(peak, abs(x[b, i]))
        scale = put_half(out, b * 34, peak / _f(127.0))
        inverse = _f(1.0) / scale if scale != 0 else _f(0.0)
        for i in range(32):
            out[b * 34 + 2 + i] = np.uint8(rounded(x[b, i] * inverse, _f(-127.0), _f(127.0)) & 255)


def q4_0(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    """x: float32, whole blocks; out: uint8, of the right size; w: float32 above 0, for each column of a row how much errors there
    count. The same holds for all below."""
    _signed(x.reshape(-1, 32), w.reshape(-1, 32), 8, 18, out)


def q5_0(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _signed(x.reshape(-1, 32), w.reshape(-1, 32), 16, 22, out)


def q4_1(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _with_minimum(x.reshape(-1, 32), w.reshape(-1, 32), 15, 20, out)


def q5_1(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _with_minimum(x.reshape(-1, 32), w.reshape(-1, 32), 31, 24, out)


def q8_0(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    """w changes nothing here."""
    _bytes(x.reshape(-1, 32), out)
