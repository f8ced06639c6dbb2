"""Scales and minima for blocks of weights, by least squares over a set of roundings. Compiled with Numba.

For each block several step widths are tried; each gives a rounding, the rounding gives the best scale (and minimum) in closed form, and
the one with the smallest squared error is kept. 64 blocks lie side by side, so that the arithmetic of one is a lane of a vector and in
the same order on every machine: the same file makes the same bytes everywhere.

The method is the usual one for such formats (search over the step, then least squares for the rounding that it gives; see "Least squares
quantization in PCM", Lloyd 1982). Errors are weighted by column, by how much the values that meet a weight matter (importance.py); without
that, by 1. Knows no layouts.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

LANES = 64
"""Blocks that are computed side by side."""

_f = np.float32
# adding and taking away 1.5 x 2^23 rounds a float32 of less than 2^22 to the nearest integer, ties to even
_ROUND = _f(12582912.0)
_HUGE = _f(3e38)
_NIL = _f(0.0)


@numba.njit(nogil=True)
def affine(
    x: NDArray[np.float32], w: NDArray[np.float32], levels: int, below_zero: bool, tries: int, d: NDArray[np.float32],
    m: NDArray[np.float32],
) -> None:  # fmt: skip
    """x ~ d q + m with q in 0..levels. x: (blocks, n); w: (k, n), above 0, block b's is w[b % k]; d, m: (blocks,) results. below_zero: m is
    at most 0. tries: step widths."""
    blocks, n = x.shape
    y = np.empty((n, LANES), np.float32)
    weight = np.empty((n, LANES), np.float32)
    s_w = np.empty(LANES, np.float32)
    low = np.empty(LANES, np.float32)
    span = np.empty(LANES, np.float32)
    inverse = np.empty(LANES, np.float32)
    s_y, s_yy = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    s_q, s_qq, s_qy = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    best = np.empty(LANES, np.float32)
    top = _f(levels)
    for first in range(0, blocks, LANES):
        width = min(LANES, blocks - first)
        for b in range(LANES):
            row = x[first + min(b, width - 1)]
            parts = w[(first + min(b, width - 1)) % len(w)]
            least, most = row[0], row[0]
            for i in range(1, n):
                least = min(least, row[i])
                most = max(most, row[i])
            if below_zero:
                least = min(least, _NIL)
            low[b], span[b] = least, most - least
            best[b] = _HUGE
            total, squares, count = _NIL, _NIL, _NIL
            for i in range(n):
                value = row[i] - least
                y[i, b] = value
                weight[i, b] = parts[i]
                count += parts[i]
                total += parts[i] * value
                squares += parts[i] * value * value
            s_w[b], s_y[b], s_yy[b] = count, total, squares
        for step in range(tries):
            reach = top + _f(0.1) * _f(step) - _f(0.05) * _f(tries - 1)
            for b in range(LANES):
                inverse[b] = reach / span[b] if span[b] > _NIL else _NIL
                s_q[b] = s_qq[b] = s_qy[b] = _NIL
            for i in range(n):
                for b in range(LANES):
                    q = (y[i, b] * inverse[b] + _ROUND) - _ROUND
                    q = q if q < top else top
                    part = weight[i, b] * q
                    s_q[b] += part
                    s_qq[b] += part * q
                    s_qy[b] += part * y[i, b]
            for b in range(width):
                scale, minimum, error = _solved(s_w[b], s_q[b], s_qq[b], s_qy[b], s_y[b], s_yy[b], low[b], below_zero)
                if error < best[b]:
                    best[b] = error
                    d[first + b], m[first + b] = scale, minimum
        for b in range(width):
            if span[b] <= _NIL:
                d[first + b], m[first + b] = _NIL, low[b]


@numba.njit(nogil=True)
def _solved(n: Any, s_q: Any, s_qq: Any, s_qy: Any, s_y: Any, s_yy: Any, low: Any, below_zero: bool) -> Any:
    """Scale, minimum and squared error of the best line through (q, y + low). n and the sums: weighted, n the weights' own."""
    spread = n * s_qq - s_q * s_q
    if spread > _NIL:
        scale = (n * s_qy - s_q * s_y) / spread
        offset = (s_y - scale * s_q) / n
        if not below_zero or offset + low <= _NIL:
            return scale, offset + low, s_yy - scale * s_qy - offset * s_y
    elif s_qq <= _NIL or not below_zero:
        return _NIL, low, s_yy
    # through zero
    s_qx = s_qy + low * s_q
    scale = s_qx / s_qq
    return scale, _NIL, (s_yy + _f(2.0) * low * s_y + n * low * low) - scale * s_qx


@numba.njit(nogil=True)
def symmetric(x: NDArray[np.float32], w: NDArray[np.float32], least: int, most: int, tries: int, d: NDArray[np.float32]) -> None:
    """x ~ d q with q in least..most, -least >= most. x: (blocks, n); w: as for affine; d: (blocks,) result, of either sign. tries: step
    widths."""
    blocks, n = x.shape
    y = np.empty((n, LANES), np.float32)
    weight = np.empty((n, LANES), np.float32)
    extreme = np.empty(LANES, np.float32)
    inverse = np.empty(LANES, np.float32)
    s_qq, s_qy = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    best = np.empty(LANES, np.float32)
    low, high = _f(least), _f(most)
    for first in range(0, blocks, LANES):
        width = min(LANES, blocks - first)
        for b in range(LANES):
            row = x[first + min(b, width - 1)]
            parts = w[(first + min(b, width - 1)) % len(w)]
            peak = row[0]
            for i in range(n):
                y[i, b] = row[i]
                weight[i, b] = parts[i]
                if abs(row[i]) > abs(peak):
                    peak = row[i]
            extreme[b] = peak
            best[b] = _NIL
            if b < width:
                d[first + b] = _NIL
        for step in range(-2, tries):
            # blocks of one magnitude and its opposite are exact with a step of that magnitude or half of it
            reach = _f(step) if step < 0 else low + _f(0.1) * (_f(step) - _f(0.5) * _f(tries - 1))
            for b in range(LANES):
                inverse[b] = reach / extreme[b] if extreme[b] != _NIL else _NIL
                s_qq[b] = s_qy[b] = _NIL
            for i in range(n):
                for b in range(LANES):
                    q = (y[i, b] * inverse[b] + _ROUND) - _ROUND
                    q = q if q < high else high
                    q = q if q > low else low
                    part = weight[i, b] * q
                    s_qq[b] += part * q
                    s_qy[b] += part * y[i, b]
            for b in range(width):
                if s_qq[b] > _NIL:
                    gain = s_qy[b] / s_qq[b] * s_qy[b]
                    if gain > best[b] * _f(1.000001):
                        best[b] = gain
                        d[first + b] = s_qy[b] / s_qq[b]


@numba.njit(nogil=True)
def rounded(value: Any, low: Any, high: Any) -> int:
    """The nearest integer in low..high, ties to even."""
    if value <= low:
        return int(low)
    if value >= high:
        return int(high)
    return int((_f(value) + _ROUND) - _ROUND)


@numba.njit(nogil=True)
def half_bits(value: Any) -> Any:
    """The bits of the nearest float16, ties to even; beyond its range the largest one."""
    bits = np.int64(_f(value).view(np.int32)) & 0xFFFFFFFF
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    if magnitude >= 0x477FF000:
        return sign | 0x7BFF
    if magnitude >= 0x38800000:  # a normal float16
        magnitude += 0xFFF + ((magnitude >> 13) & 1)
        return sign | ((magnitude - 0x38000000) >> 13)
    if magnitude < 0x33000000:
        return sign
    shift = 126 - (magnitude >> 23)
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    half = mantissa >> shift
    rest = mantissa - (half << shift)
    middle = 1 << (shift - 1)
    if rest > middle or (rest == middle and half & 1):
        half += 1
    return sign | half


@numba.njit(nogil=True)
def half_value(bits: int) -> Any:
    """The float32 of a float16's bits (finite ones)."""
    exponent = (bits >> 10) & 31
    mantissa = bits & 1023
    if exponent:
        value = np.int32((exponent + 112) << 23 | mantissa << 13).view(np.float32)
    else:
        value = _f(mantissa) * _f(2.0**-24)
    return -value if bits & 0x8000 else value


@numba.njit(nogil=True)
def put_half(out: NDArray[np.uint8], at: int, value: Any) -> Any:
    """Writes a float16 and returns what it holds."""
    bits = half_bits(value)
    out[at] = bits & 255
    out[at + 1] = bits >> 8
    return half_value(bits)
