"""Short causal convolutions over the tokens of a sequence, and the step before it: state is the last few inputs.

Rows are float32 with room up to a multiple of 16. A part is WIDE vectors of 16 channels.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import silu
from localrun.kernels_cpu.simd import fma, load_f32x16, load_i64, splat_f32, store
from localrun.kernels_cpu.slots import over_spans
from localrun.kernels_cpu.state_sizes import CONV_CHANNELS

f = numba.float32

WIDE = CONV_CHANNELS // 16


def short_conv(isa: Isa, taps: int, activated: int) -> Any:
    """Kernel: y[t] = act(bias + sum over j of w[j] x[t - (taps - 1) + j]) for each channel; act is SiLU or nothing.

    args: 3 x, 4 its row stride, 5 y, 6 its row stride, 7 weights float32 [vector][tap][16], 8 bias (0: none), 9 vectors of 16 channels.
    State: [vector][input, oldest first][16].
    """
    kept = taps - 1

    @numba.njit
    def one(x: int, stride: int, y: int, y_stride: int, weights: int, bias: int, state: int, first: int, rows: int) -> None:
        for t in range(rows):
            acc = splat_f32(f(0.0))
            if bias:
                acc = load_f32x16(bias)
            for j in range(taps):
                at = t - kept + j
                source = x + (first + at) * stride if at >= 0 else state + (at + kept) * 64
                acc = fma(load_f32x16(weights + j * 64), load_f32x16(source), acc)
            if activated:
                acc = silu(acc)
            store(y + (first + t) * y_stride, acc)
        for i in range(kept):
            at = rows - kept + i
            source = x + (first + at) * stride if at >= 0 else state + (at + kept) * 64
            store(state + i * 64, load_f32x16(source))

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        bias = load_i64(args + 64)
        for v in range(part * WIDE, min((part + 1) * WIDE, load_i64(args + 72))):
            one(
                load_i64(args + 24) + v * 64,
                load_i64(args + 32),
                load_i64(args + 40) + v * 64,
                load_i64(args + 48),
                load_i64(args + 56) + v * taps * 64,
                bias + v * 64 if bias else bias,
                state + (v - part * WIDE) * kept * 64,
                first,
                rows,
            )

    return over_spans(run)


def before(isa: Isa) -> Any:
    """Kernel: y[t] = x[t - 1], the state before the first; state is the last x.

    args: 3 x, 4 its row stride, 5 y, 6 its row stride, 7 vectors of 16 channels.
    """

    @numba.njit
    def run(args: int, state: int, part: int, first: int, rows: int) -> None:
        stride, y_stride = load_i64(args + 32), load_i64(args + 48)
        for v in range(part * WIDE, min((part + 1) * WIDE, load_i64(args + 56))):
            x = load_i64(args + 24) + v * 64 + first * stride
            y = load_i64(args + 40) + v * 64 + first * y_stride
            kept = state + (v - part * WIDE) * 64
            last = load_f32x16(kept)
            for t in range(rows):
                store(y + t * y_stride, last)
                last = load_f32x16(x + t * stride)
            store(kept, last)

    return over_spans(run)
