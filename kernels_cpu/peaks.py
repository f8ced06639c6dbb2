"""The largest logit of each block of successive ones, and through them the largest of all: what sampling looks at instead of whole rows.

Logits have just been written when `peaks` runs, so they lie in the threads' caches. What `largest` does is little; it is compiled because
between two passes, which leave nothing of Python in the caches, each of the calls that it replaces is slow.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import (
    fma,
    lanes_below,
    load_f32,
    load_f32x16,
    load_i64,
    max_f32,
    splat_f32,
    store_scalar,
    sum_f32,
    vmax,
    where,
)

f = numba.float32
i64 = numba.int64


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


@numba.njit
def _insert(ids: int, values: int, held: int, k: int, value: Any, number: int) -> int:
    """Puts a number where it belongs among the `held` of at most k: larger values first, of equal ones what came first. The last of k
    makes room. How many are held then.
    """
    at = min(held, k - 1)
    while at > 0 and load_f32(values + 4 * (at - 1)) < value:
        store_scalar(values + 4 * at, load_f32(values + 4 * (at - 1)))
        store_scalar(ids + 8 * at, load_i64(ids + 8 * (at - 1)))
        at -= 1
    store_scalar(values + 4 * at, value)
    store_scalar(ids + 8 * at, number)
    return min(held + 1, k)


def largest(isa: Isa, size: int) -> Any:
    """Kernel: numbers of the k largest finite values of a row, in descending order, equal ones by number. One chunk.

    args: 0 row float32, 1 n, 2 its peaks (of `peaks`), 3 numbers int64 of values that have been changed since, 4 how many; their blocks'
    peaks are brought up to date; 5 k, at least 1, 6 room for k numbers int64, 7 room for k float32; 8 is set to how many there are, or to
    -1 where a value was not finite when the peaks were found.

    The k-th largest peak is at most the k-th largest value, so only blocks whose peak reaches it can hold one of the k.
    """
    lowest = float(np.finfo(np.float32).min)

    @numba.njit
    def peak_of(row: int, start: int, end: int) -> Any:
        most = f(-np.inf)
        for i in range(start, end):
            most = max(most, load_f32(row + 4 * i))
        return most

    @numba.njit
    def kth_peak(peaks: int, blocks: int, k: int, ids: int, values: int) -> Any:
        """NaN where a peak is none; at least the lowest finite number."""
        held = i64(0)
        for block in range(blocks):
            peak = load_f32(peaks + 4 * block)
            if peak != peak:
                return peak
            if held < k or peak > load_f32(values + 4 * (k - 1)):
                held = _insert(ids, values, held, k, peak, i64(block))
        return max(load_f32(values + 4 * (k - 1)), f(lowest)) if held == k else f(lowest)

    @numba.njit
    def scan(row: int, start: int, end: int, least: Any, k: int, ids: int, values: int, held: int) -> int:
        for i in range(start, end):
            value = load_f32(row + 4 * i)
            if value >= least and (held < k or value > load_f32(values + 4 * (k - 1))):
                held = _insert(ids, values, held, k, value, i64(i))
        return held

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        row, n, peaks = load_i64(args), load_i64(args + 8), load_i64(args + 16)
        k, ids, values = load_i64(args + 40), load_i64(args + 48), load_i64(args + 56)
        blocks = (n + size - 1) // size
        for i in range(load_i64(args + 32)):
            block = load_i64(load_i64(args + 24) + 8 * i) // size
            peak = load_f32(peaks + 4 * block)
            if peak == peak:
                store_scalar(peaks + 4 * block, peak_of(row, block * size, min(n, (block + 1) * size)))
        least = kth_peak(peaks, blocks, k, ids, values)
        if least != least:
            store_scalar(args + 64, i64(-1))
            return
        held = i64(0)
        for block in range(blocks):
            if load_f32(peaks + 4 * block) < least:
                continue
            start = block * size
            end = min(n, start + size)
            while start + 16 <= end:
                if max_f32(load_f32x16(row + 4 * start)) >= least:
                    held = scan(row, start, start + 16, least, k, ids, values, held)
                start += 16
            held = scan(row, start, end, least, k, ids, values, held)
        store_scalar(args + 64, held)

    return kernel
