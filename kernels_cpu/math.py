"""Elementary functions on float vectors, the same on every instruction set."""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.simd import bits_f32, f32_to_i32, fma, keep_above, splat_f32, vmax, vmin, vround

f = numba.float32


@numba.njit
def vexp(x: Any) -> Any:
    """e**x of an f32x16, to about 1e-7 relative; at and below -87 it is 0, above 88 it stays at 1.6e38.

    Cody and Waite's reduction x = n ln 2 + r with ln 2 in two parts, then the Taylor polynomial of degree 7 on |r| < 0.35.
    """
    asked = x
    x = vmin(vmax(x, splat_f32(f(-87.0))), splat_f32(f(88.0)))
    n = vround(x * f(1.4426950408889634))
    r = fma(n, splat_f32(f(-0.693359375)), x)
    r = fma(n, splat_f32(f(2.12194440054690583e-4)), r)
    p = fma(r, splat_f32(f(1.0 / 5040.0)), splat_f32(f(1.0 / 720.0)))
    p = fma(p, r, splat_f32(f(1.0 / 120.0)))
    p = fma(p, r, splat_f32(f(1.0 / 24.0)))
    p = fma(p, r, splat_f32(f(1.0 / 6.0)))
    p = fma(p, r, splat_f32(f(0.5)))
    p = fma(p, r, splat_f32(f(1.0)))
    p = fma(p, r, splat_f32(f(1.0)))
    return keep_above(asked, f(-87.0), p * bits_f32((f32_to_i32(n) + 127) << 23))


@numba.njit
def sigmoid(x: Any) -> Any:
    """1 / (1 + e**-x)."""
    one = splat_f32(f(1.0))
    return one / (one + vexp(x * f(-1.0)))


@numba.njit
def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@numba.njit
def gelu_tanh(x: Any) -> Any:
    """The tanh form of GELU, written with a sigmoid: x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))."""
    inner = fma(x * x * f(0.044715), x, x)
    return x * sigmoid(inner * f(1.5957691216057308))


@numba.njit
def tanh(x: Any) -> Any:
    """2 sigmoid(2 x) - 1."""
    return fma(sigmoid(x * f(2.0)), splat_f32(f(2.0)), splat_f32(f(-1.0)))


@numba.njit
def relu(x: Any) -> Any:
    """max(x, 0)."""
    return keep_above(x, f(0.0), x)


@numba.njit
def relu_squared(x: Any) -> Any:
    """max(x, 0)**2 (So et al. 2021)."""
    return keep_above(x, f(0.0), x * x)
