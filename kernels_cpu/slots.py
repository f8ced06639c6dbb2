"""Recurrent state: where it lies, and how kernels walk over the tokens of a sequence with it.

A slot holds all that a model's recurrent layers remember of one sequence; slots lie side by side in one array. Behind its other words the
step header says which slot each span of successive tokens goes on from, and after how many tokens its state is also to be written to
another slot: a span is a list of segments, and each ends where a copy is wanted or where the span ends.

A kernel's chunk is one part (a head, a few channels) of one span, computed token by token whatever the batch, so its bits depend neither
on how a prompt was cut nor on what is computed beside it.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.simd import load_f32x16, load_i32, load_i64, store

i64 = numba.int64


def over_spans(run: Any) -> Any:
    """The kernel that calls run(args, state, part, first row, rows) for each segment of a span.

    args: 0 parts of a span, 1 offset of the layer's state in a slot, 2 bytes of one part's state (a multiple of 64), 3.. run's own.
    """

    @numba.njit
    def copy(source: int, target: int, nbytes: int) -> None:
        for at in range(0, nbytes, 64):
            store(target + at, load_f32x16(source + at))

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        parts = load_i64(args)
        part = chunk % parts
        nbytes = load_i64(args + 16)
        inside = load_i64(head + H.SLOTS) + load_i64(args + 8) + part * nbytes
        slot_bytes = load_i64(head + H.SLOT_BYTES)
        span = load_i64(head + H.SPANS) + chunk // parts * 12
        state = inside + i64(load_i32(span)) * slot_bytes
        segment = load_i64(head + H.SEGMENTS) + i64(load_i32(span + 4)) * 12
        for _ in range(load_i32(span + 8)):
            run(args, state, part, i64(load_i32(segment)), i64(load_i32(segment + 4)))
            target = i64(load_i32(segment + 8))
            if target >= 0:
                copy(state, inside + target * slot_bytes, nbytes)
            segment += 12

    return kernel
