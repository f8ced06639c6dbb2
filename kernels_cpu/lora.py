"""Low-rank adapters beside a matrix that stays as it is: out += scale * B (A x) (Hu et al. 2021, LoRA), for rows that have an adapter.

Rows of a batch may have different adapters, or none: then nothing of a row is touched. The products go through the tiles of float
matmuls, whose results do not depend on how many rows are taken together, so a row's bits depend on its own adapter only. A and B are
packed like any float matrix (pack.py, kind 'f').
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.activation_sizes import WIDE
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.lora_sizes import ENTRY, ROWS
from localrun.kernels_cpu.matmul import make_group
from localrun.kernels_cpu.simd import (
    f16_to_f32,
    f32_from_bits,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    splat_f32,
    store,
)

FEW = 16
"""Up to so many rows of a batch are taken one by one, so that threads share them."""


def low_rank(isa: Isa, embedding: int) -> Any:
    """Kernel, a row a chunk: adds what the row's adapter says. embedding: x is not a row but the token's number, A x the row of A there.

    args: 0 x float32, 1 its row stride, 2 values of a row of x, 3 out float32, 4 its row stride, 5 address at which out's address lies
    (0: it is argument 3), 6 groups of 16 values of out, 7 address of the number of each row's adapter int32 (0: none), 8 address of each
    row's scale float32, 9 offset in the head of the numbers of the rows (0: row t is row t), 10 offset in the head of how many there are,
    11 table of ENTRY bytes an adapter, 12 scratch, 13 bytes of scratch a thread, 14 factor (float bits).
    """
    whole_group, half_group = make_group(isa, "F32"), make_group(isa, "F16")

    @numba.njit
    def product(
        w: int, step: int, groups: int, n: int, half: int, x: int, stride: int, rows: int, out: int, out_stride: int, add: int
    ) -> None:
        """out (+)= W x for 1 to ROWS rows."""
        for _ in range(groups):
            if half:
                half_group(w, n, x, stride, rows, out, out_stride, 0, add, WIDE)
            else:
                whole_group(w, n, x, stride, rows, out, out_stride, 0, add, WIDE)
            w += step
            out += 64

    @numba.njit
    def number_of(args: int, head: int, t: int) -> int:
        """Which of the batch's rows row t is."""
        at = load_i64(args + 72)
        return numba.int64(load_i32(load_i64(head + at) + 4 * t)) if at else t

    @numba.njit
    def apply(args: int, head: int, entry: int, first: int, rows: int, scratch: int) -> None:
        """One adapter for successive rows."""
        rank = load_i64(entry + 16)
        groups = (rank + 15) >> 4
        half = load_i64(entry + 48)
        width = groups * 64
        if embedding:
            for i in range(rows):
                token = numba.int64(load_i32(load_i64(head + H.TOKEN_IDS) + 4 * (first + i)))
                source = load_i64(entry) + token * load_i64(entry + 8)
                for g in range(groups):
                    v = f16_to_f32(load_f16x16(source + g * 32)) if half else load_f32x16(source + g * 64)
                    store(scratch + i * width + g * 64, v)
        else:
            stride = load_i64(args + 8)
            x = load_i64(args) + first * stride
            product(load_i64(entry), load_i64(entry + 8), groups, load_i64(args + 16), half, x, stride, rows, scratch, width, 0)
        for i in range(rows):
            scale = splat_f32(load_f32(load_i64(args + 64) + 4 * number_of(args, head, first + i)) * f32_from_bits(load_i64(args + 112)))
            for g in range(groups):
                at = scratch + i * width + g * 64
                store(at, load_f32x16(at) * (load_f32x16(load_i64(entry + 24) + g * 64) * scale))
        out_stride = load_i64(args + 32)
        out = load_i64(args + 24)
        if load_i64(args + 40):
            out = load_i64(load_i64(args + 40))
        out += first * out_stride
        product(load_i64(entry + 32), load_i64(entry + 40), load_i64(args + 48), rank, half, scratch, width, rows, out, out_stride, 1)

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        total = load_i64(head + load_i64(args + 80))
        together = ROWS if total > FEW else 1
        if t % together:
            return
        adapters = load_i64(args + 56)
        scratch = load_i64(args + 96) + thread * load_i64(args + 104)
        end = min(t + together, total)
        first = t
        while first < end:
            adapter = numba.int64(load_i32(adapters + 4 * number_of(args, head, first)))
            last = first + 1
            while last < end and numba.int64(load_i32(adapters + 4 * number_of(args, head, last))) == adapter:
                last += 1
            if adapter:
                entry = load_i64(args + 88) + adapter * ENTRY
                if load_i64(entry):
                    apply(args, head, entry, first, last - first, scratch)
            first = last

    return kernel
