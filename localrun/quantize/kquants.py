"""Types with blocks of 256 values and two levels of scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K. Layouts as ggml defines them; scales from fit.py.

    Q2_K  16 bytes: scale low, minimum high nibble | 64 x 4 quants | d f16 | dmin f16       sub-blocks of 16: x = d s q - dmin m
    Q3_K  32 bytes of third bits | 64 x 4 quants | 12 bytes of 16 6-bit scales | d f16      sub-blocks of 16: x = d (s - 32) (q - 4)
    Q4_K  d f16 | dmin f16 | 12 bytes of 8 6-bit scales and minima | 128 x 2 quants         sub-blocks of 32: x = d s q - dmin m
    Q5_K  as Q4_K, with 32 bytes of fifth bits before the quants
    Q6_K  128 x 2 low nibbles | 64 x 4 high bits | 16 int8 scales | d f16                   sub-blocks of 16: x = d s (q - 32)

The scales of the sub-blocks are found first, then rounded together, and the quants are taken against the rounded ones.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from localrun.quantize.fit import affine, put_half, rounded, symmetric

_f = np.float32
_ROUND = _f(12582912.0)
_HUGE = _f(3e38)
TRIES = 21
EVEN = np.ones(256, np.float32)
ROUNDS = 2
"""Of choosing a block's own numbers."""
FINE_TRIES = 17
"""For 5 and 6 bits, where steps lie closer to one another anyway."""


@numba.njit(nogil=True)
def _error(x: NDArray[np.float32], w: NDArray[np.float32], step: Any, low: Any, least: Any, most: Any, enough: Any) -> Any:
    """Squared error, weighted, of x ~ step q - low with the best q in least..most. Stops early when it is `enough`."""
    inverse = _f(1.0) / step if step != 0 else _f(0.0)
    error = _f(0.0)
    for i in range(0, len(x), 8):
        for k in range(i, i + 8):
            q = ((x[k] + low) * inverse + _ROUND) - _ROUND
            q = min(max(q, least), most)
            rest = x[k] + low - step * q
            error += w[k] * rest * rest
        if error >= enough:
            break
    return error


@numba.njit(nogil=True)
def _settled(x: NDArray[np.float32], w: NDArray[np.float32], d: Any, m: Any, scale: Any, minimum: Any, top: int, q_top: int) -> Any:
    """Scale and minimum of one sub-block in units of `scale` and `minimum`, 0..top, and the squared error: the nearest ones or those
    beside them, whichever is best."""
    s = rounded(d / scale, _f(0.0), _f(top)) if scale > 0 else 0
    t = rounded(-m / minimum, _f(0.0), _f(top)) if minimum > 0 else 0
    best_s, best_t = s, t
    best = _error(x, w, scale * _f(s), minimum * _f(t), _f(0.0), _f(q_top), _HUGE)
    for one in range(max(0, s - 1), min(top, s + 1) + 1 if scale > 0 else 1):
        for two in range(max(0, t - 1), min(top, t + 1) + 1 if minimum > 0 else 1):
            if one != s or two != t:
                error = _error(x, w, scale * _f(one), minimum * _f(two), _f(0.0), _f(q_top), best)
                if error < best:
                    best, best_s, best_t = error, one, two
    return best_s, best_t, best


@numba.njit(nogil=True)
def _levels(
    x: NDArray[np.float32], w: NDArray[np.float32], d: NDArray[np.float32], m: NDArray[np.float32], n_sub: int, top: int, q_top: int,
    out: NDArray[np.uint8], d_at: int, size: int, s: NDArray[np.uint8], t: NDArray[np.uint8], q: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Rounds the scales d and minima m of each block's sub-blocks to 0..top, writes d and dmin, and takes the quants.

    x: (blocks, 256); w: (k, 256), see fit.py; d, m: (blocks * n_sub,); s, t: (blocks, n_sub) results; q: (blocks, 256) result. The two
    numbers of a block are first chosen for its largest sub-blocks, then by least squares over all; what gives the smaller error is kept.
    """
    width = 256 // n_sub
    pair = np.empty(4, np.uint8)
    try_s, try_t = np.empty(n_sub, np.uint8), np.empty(n_sub, np.uint8)
    for b in range(len(x)):
        most_d, most_m = _f(0.0), _f(0.0)
        for j in range(n_sub):
            most_d = max(most_d, d[b * n_sub + j])
            most_m = max(most_m, -m[b * n_sub + j])
        want_d, want_m = most_d / _f(top), most_m / _f(top)
        best = _HUGE
        for _ in range(ROUNDS):
            scale, minimum = put_half(pair, 0, want_d), put_half(pair, 2, want_m)
            total = _f(0.0)
            # sums for least squares: x ~ D a - M t, a = s q
            aa, at, tt, ax, tx = 0.0, 0.0, 0.0, 0.0, 0.0
            for j in range(n_sub):
                part = x[b, j * width : (j + 1) * width]
                parts = w[b % len(w), j * width : (j + 1) * width]
                one, two, error = _settled(part, parts, d[b * n_sub + j], m[b * n_sub + j], scale, minimum, top, q_top)
                try_s[j], try_t[j] = one, two
                total += error
                step, low = scale * _f(one), minimum * _f(two)
                inverse = _f(1.0) / step if step > 0 else _f(0.0)
                for i in range(width):
                    a = float(one) * rounded((part[i] + low) * inverse, _f(0.0), _f(q_top))
                    aa += parts[i] * a * a
                    at += parts[i] * a * two
                    ax += parts[i] * a * part[i]
                    tx += parts[i] * two * part[i]
                    tt += parts[i] * two * two
            if total >= best:
                break
            best = total
            for k in range(4):
                out[b * size + d_at + k] = pair[k]
            for j in range(n_sub):
                s[b, j], t[b, j] = try_s[j], try_t[j]
                step, low = scale * _f(try_s[j]), minimum * _f(try_t[j])
                inverse = _f(1.0) / step if step > 0 else _f(0.0)
                for i in range(j * width, (j + 1) * width):
                    q[b, i] = rounded((x[b, i] + low) * inverse, _f(0.0), _f(q_top))
            spread = aa * tt - at * at
            if spread > 1e-6 * aa * tt and spread > 0:
                want_d, want_m = _f((ax * tt - at * tx) / spread), _f((at * ax - aa * tx) / spread)
            elif aa > 0:
                want_d = _f((ax + want_m * at) / aa)
            if want_d <= 0 or want_m < 0:
                break


@numba.njit(nogil=True)
def _put_6_bits(s: NDArray[np.uint8], t: NDArray[np.uint8], out: NDArray[np.uint8], at: int) -> None:
    """Eight 6-bit scales and minima in 12 bytes."""
    for j in range(4):
        out[at + j] = s[j] | ((s[j + 4] >> 4) << 6)
        out[at + 4 + j] = t[j] | ((t[j + 4] >> 4) << 6)
        out[at + 8 + j] = (s[j + 4] & 15) | ((t[j + 4] & 15) << 4)


@numba.njit(nogil=True)
def _q4_k(x: NDArray[np.float32], w: NDArray[np.float32], five: bool, out: NDArray[np.uint8]) -> None:
    n = len(x)
    size, top = (176, 31) if five else (144, 15)
    d, m = np.empty(n * 8, np.float32), np.empty(n * 8, np.float32)
    affine(x.reshape(n * 8, 32), w.reshape(len(w) * 8, 32), top, True, FINE_TRIES if five else TRIES, d, m)
    s, t, q = np.empty((n, 8), np.uint8), np.empty((n, 8), np.uint8), np.empty((n, 256), np.uint8)
    _levels(x, w, d, m, 8, 63, top, out, 0, size, s, t, q)
    for b in range(n):
        at = b * size
        _put_6_bits(s[b], t[b], out, at + 4)
        at += 16
        if five:
            for i in range(32):
                bits = 0
                for j in range(8):
                    bits |= (int(q[b, 32 * j + i]) >> 4) << j
                out[at + i] = bits
            at += 32
        for j in range(4):
            for i in range(32):
                out[at + 32 * j + i] = (q[b, 64 * j + i] & 15) | ((q[b, 64 * j + 32 + i] & 15) << 4)


@numba.njit(nogil=True)
def _q2_k(x: NDArray[np.float32], w: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    n = len(x)
    d, m = np.empty(n * 16, np.float32), np.empty(n * 16, np.float32)
    affine(x.reshape(n * 16, 16), w.reshape(len(w) * 16, 16), 3, True, TRIES, d, m)
    s, t, q = np.empty((n, 16), np.uint8), np.empty((n, 16), np.uint8), np.empty((n, 256), np.uint8)
    _levels(x, w, d, m, 16, 15, 3, out, 80, 84, s, t, q)
    for b in range(n):
        at = b * 84
        for j in range(16):
            out[at + j] = s[b, j] | (t[b, j] << 4)
        for h in range(2):
            for i in range(32):
                bits = 0
                for j in range(4):
                    bits |= int(q[b, 128 * h + 32 * j + i]) << (2 * j)
                out[at + 16 + 32 * h + i] = bits


@numba.njit(nogil=True)
def _signed(
    x: NDArray[np.float32], w: NDArray[np.float32], d: NDArray[np.float32], half_s: int, half_q: int, out: NDArray[np.uint8],
    d_at: int, size: int, s: NDArray[np.int8], q: NDArray[np.uint8],
) -> None:  # fmt: skip
    """As _levels, of types without minima: scales in -half_s..half_s - 1, quants in -half_q..half_q - 1, kept with half_q added."""
    least, most = _f(-half_q), _f(half_q - 1)
    pair = np.empty(2, np.uint8)
    tried = np.empty(16, np.int8)
    for b in range(len(x)):
        extreme = _f(0.0)
        for j in range(16):
            if abs(d[b * 16 + j]) > abs(extreme):
                extreme = d[b * 16 + j]
        want = extreme / _f(-half_s)
        best = _HUGE
        for _ in range(ROUNDS):
            scale = put_half(pair, 0, want)
            total = _f(0.0)
            aa, ax = 0.0, 0.0
            for j in range(16):
                part = x[b, j * 16 : (j + 1) * 16]
                parts = w[b % len(w), j * 16 : (j + 1) * 16]
                near = rounded(d[b * 16 + j] / scale, _f(-half_s), _f(half_s - 1)) if scale != 0 else 0
                chosen = near
                error = _error(part, parts, scale * _f(near), _f(0.0), least, most, _HUGE)
                # of the other sign too: there is one scale and one quant more below zero than above
                for other in (near - 1, near + 1, -near - 1, -near, 1 - near):
                    if other != near and -half_s <= other < half_s and scale != 0:
                        found = _error(part, parts, scale * _f(other), _f(0.0), least, most, error)
                        if found < error:
                            error, chosen = found, other
                tried[j] = chosen
                total += error
                step = scale * _f(chosen)
                inverse = _f(1.0) / step if step != 0 else _f(0.0)
                for i in range(16):
                    a = float(chosen) * rounded(part[i] * inverse, least, most)
                    aa += parts[i] * a * a
                    ax += parts[i] * a * part[i]
            if total >= best:
                break
            best = total
            out[b * size + d_at], out[b * size + d_at + 1] = pair[0], pair[1]
            for j in range(16):
                s[b, j] = tried[j]
                step = scale * _f(tried[j])
                inverse = _f(1.0) / step if step != 0 else _f(0.0)
                for i in range(j * 16, (j + 1) * 16):
                    q[b, i] = rounded(x[b, i] * inverse, least, most) + half_q
            if aa <= 0:
                break
            want = _f(ax / aa)


@numba.njit(nogil=True)
def _q3_k(x: NDArray[np.float32], w: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    n = len(x)
    d = np.empty(n * 16, np.float32)
    symmetric(x.reshape(n * 16, 16), w.reshape(len(w) * 16, 16), -4, 3, TRIES, d)
    s, q = np.empty((n, 16), np.int8), np.empty((n, 256), np.uint8)
    _signed(x, w, d, 32, 4, out, 108, 110, s, q)
    for b in range(n):
        at = b * 110
        for i in range(32):
            bits = 0
            for j in range(8):
                bits |= (int(q[b, 32 * j + i]) >> 2) << j
            out[at + i] = bits
            for h in range(2):
                bits = 0
                for j in range(4):
                    bits |= (int(q[b, 128 * h + 32 * j + i]) & 3) << (2 * j)
                out[at + 32 + 32 * h + i] = bits
        for j in range(8):
            out[at + 96 + j] = ((int(s[b, j]) + 32) & 15) | (((int(s[b, j + 8]) + 32) & 15) << 4)
        for j in range(4):
            bits = 0
            for k in range(4):
                bits |= ((int(s[b, 4 * k + j]) + 32) >> 4) << (2 * k)
            out[at + 104 + j] = bits


@numba.njit(nogil=True)
def _q6_k(x: NDArray[np.float32], w: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    n = len(x)
    d = np.empty(n * 16, np.float32)
    symmetric(x.reshape(n * 16, 16), w.reshape(len(w) * 16, 16), -32, 31, FINE_TRIES, d)
    s, q = np.empty((n, 16), np.int8), np.empty((n, 256), np.uint8)
    _signed(x, w, d, 128, 32, out, 208, 210, s, q)
    for b in range(n):
        at = b * 210
        for h in range(2):
            for i in range(32):
                one, two = int(q[b, 128 * h + i]), int(q[b, 128 * h + 32 + i])
                three, four = int(q[b, 128 * h + 64 + i]), int(q[b, 128 * h + 96 + i])
                out[at + 64 * h + i] = (one & 15) | ((three & 15) << 4)
                out[at + 64 * h + 32 + i] = (two & 15) | ((four & 15) << 4)
                out[at + 128 + 32 * h + i] = (one >> 4) | ((two >> 4) << 2) | ((three >> 4) << 4) | ((four >> 4) << 6)
        for j in range(16):
            out[at + 192 + j] = np.uint8(int(s[b, j]) & 255)


def q2_k(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    """x: float32, whole blocks; out: uint8, of the right size; w: float32 above 0, for each column of a row how much errors there
    count. The same holds for all below."""
    _q2_k(x.reshape(-1, 256), w.reshape(-1, 256), out)


def q3_k(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _q3_k(x.reshape(-1, 256), w.reshape(-1, 256), out)


def q4_k(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _q4_k(x.reshape(-1, 256), w.reshape(-1, 256), False, out)


def q5_k(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _q4_k(x.reshape(-1, 256), w.reshape(-1, 256), True, out)


def q6_k(x: NDArray[np.float32], out: NDArray[np.uint8], w: NDArray[np.float32] = EVEN) -> None:
    _q6_k(x.reshape(-1, 256), w.reshape(-1, 256), out)
