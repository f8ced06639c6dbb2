"""Softplus on float vectors, the same on every instruction set."""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.math import vexp
from localrun.kernels_cpu.simd import fma, splat_f32, vabs, vmax

f = numba.float32


@numba.njit
def softplus(x: Any) -> Any:
    """log(1 + e**x) of an f32x16, to about 1e-7 relative: max(x, 0) + log(1 + u) with u = e**-|x|.

    log(1 + u) = 2 artanh(u / (2 + u)), whose argument is at most a third: eight terms of its series are as exact as a float.
    """
    u = vexp(vabs(x) * f(-1.0))
    s = u / (u + splat_f32(f(2.0)))
    q = s * s
    p = fma(q, splat_f32(f(1.0 / 15.0)), splat_f32(f(1.0 / 13.0)))
    p = fma(p, q, splat_f32(f(1.0 / 11.0)))
    p = fma(p, q, splat_f32(f(1.0 / 9.0)))
    p = fma(p, q, splat_f32(f(1.0 / 7.0)))
    p = fma(p, q, splat_f32(f(1.0 / 5.0)))
    p = fma(p, q, splat_f32(f(1.0 / 3.0)))
    p = fma(p, q, splat_f32(f(1.0)))
    return fma(s + s, p, vmax(x, splat_f32(f(0.0))))
