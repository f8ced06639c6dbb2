"""The largest logit of each block of successive ones: what sampling looks at instead of the whole row (localrun/engine/selection.py).

Logits have just been written when this runs, so they lie in the threads' caches.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import fma, lanes_below, load_f32x16, load_i64, max_f32, splat_f32, store_scalar, sum_f32, vmax, where

f = numba.float32


def peaks(isa: Isa, size: int) -> Any:
    """Kernel: the largest of each `size` (a multiple of 16) values of a row, NaN where one is not finite. A chunk is a part of a row.

    args: 0 rows float32, 1 their stride, 2 n, 3 out float32, 4 its row stride, 5 parts of a row, 6 blocks of a part.
    """
    lowest = float(np.finfo(np.float32).min)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        n = load_i64(args + 16)
        parts = load_i64(args + 40)
        per_part = load_i64(args + 48)
        at = chunk // parts
        row = load_i64(args) + at * load_i64(args + 8)
        out = load_i64(args + 24) + at * load_i64(args + 32)
        first = (chunk - at * parts) * per_part
        end = min(first + per_part, (n + size - 1) // size)
        for block in range(first, end):
            start = block * size
            most = splat_f32(f(lowest))
            proof = splat_f32(f(0.0))  # 0 times anything finite is 0
            if start + size <= n:
                for i in range(size // 16):
                    v = load_f32x16(row + (start + 16 * i) * 4)
                    most = vmax(most, v)
                    proof = fma(v, splat_f32(f(0.0)), proof)
            else:
                while start < n:
                    v = where(lanes_below(n - start), load_f32x16(row + start * 4), splat_f32(f(lowest)))
                    most = vmax(most, v)
                    proof = fma(v, splat_f32(f(0.0)), proof)
                    start += 16
            store_scalar(out + block * 4, f(max_f32(most) + sum_f32(proof)))

    return kernel
