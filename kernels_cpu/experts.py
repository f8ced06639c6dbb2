"""Mixtures of experts: choosing, sorting tokens by expert, multiplying by the chosen experts' matrices only, summing up.

Of T tokens with k experts each there are T * k pairs; pair t * k + s is token t's s-th choice. `sort` lists them by expert, in the order of
pairs within an expert; matrices are applied to rows in that order, and `combine` adds a token's rows in the order of its choices, so that
its bits do not depend on the rest of the batch.

Memory of a routing, all of it written anew in each layer (offsets by routing.Layout): choices and weights by pair, the order, the places
of the pairs in it, where each expert begins, which experts have any token.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.activation_sizes import WIDE
from localrun.kernels_cpu.activations import give
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import sigmoid, vexp
from localrun.kernels_cpu.matmul import make_group
from localrun.kernels_cpu.pack import group_packer
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    lanes_below,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    max_f32,
    splat_f32,
    store,
    store_scalar,
    sum_f32,
    vmax,
    vmin,
    where,
)

f = numba.float32
i32 = numba.int32
i64 = numba.int64
NONE = -1e30
LEAST_SUM = 6.103515625e-5
"""Below this a sum of weights is not divided by."""


@numba.njit
def _best(row: int, n: int) -> int:
    """Index of the largest of n floats, the first of equals."""
    best = 0
    for i in range(1, n):
        if load_f32(row + 4 * i) > load_f32(row + 4 * best):
            best = i
    return best


@numba.njit
def _softmax(row: int, n: int) -> None:
    peak = splat_f32(f(NONE))
    for i in range((n + 15) >> 4):
        peak = vmax(peak, where(lanes_below(n - i * 16), load_f32x16(row + i * 64), splat_f32(f(NONE))))
    top = splat_f32(max_f32(peak))
    total = splat_f32(f(0.0))
    for i in range((n + 15) >> 4):
        p = where(lanes_below(n - i * 16), vexp(load_f32x16(row + i * 64) - top), splat_f32(f(0.0)))
        store(row + i * 64, p)
        total = total + p
    scale = splat_f32(f(1.0)) / splat_f32(sum_f32(total))
    for i in range((n + 15) >> 4):
        store(row + i * 64, load_f32x16(row + i * 64) * scale)


@numba.njit
def _drop_groups(asked: int, n: int, n_groups: int, n_used: int) -> None:
    """Only the n_used groups with the largest sums of their best two stay eligible (DeepSeek-AI 2024)."""
    size = n // n_groups
    for _ in range(n_groups - n_used):
        worst = -1
        least = f(0.0)
        for g in range(n_groups):
            first = f(NONE)
            second = f(NONE)
            for i in range(size):
                v = load_f32(asked + 4 * (g * size + i))
                if v > first:
                    second = first
                    first = v
                elif v > second:
                    second = v
            total = f(first + second)
            # A later one of equals goes first; one that is gone already does not count.
            if first > f(NONE) and (worst < 0 or total <= least):
                worst = g
                least = total
        for i in range(size):
            store_scalar(asked + 4 * (worst * size + i), f(NONE))


def route(isa: Isa) -> Any:
    """Kernel, one row a chunk: a token's experts and their weights.

    args: 0 scores (overwritten), 1 their row stride, 2 experts, 3 experts to choose, 4 one of routing.GATES, 5 bias added for choosing only
    (0: none), 6 whether the weights are divided by their sum, 7 factor of the weights (float bits), 8 groups, 9 groups to use, 10 choices
    int32, 11 weights float32, 12 scratch rows, 13 their stride.
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        scores = load_i64(args) + t * load_i64(args + 8)
        n = load_i64(args + 16)
        k = load_i64(args + 24)
        gate = load_i64(args + 32)
        bias = load_i64(args + 40)
        choices = load_i64(args + 80) + 4 * k * t
        weights = load_i64(args + 88) + 4 * k * t
        asked = load_i64(args + 96) + t * load_i64(args + 104)
        if gate == 0:
            _softmax(scores, n)
        elif gate == 1:
            for i in range((n + 15) >> 4):
                store(scores + i * 64, sigmoid(load_f32x16(scores + i * 64)))
        for i in range((n + 15) >> 4):
            v = load_f32x16(scores + i * 64)
            if bias:
                v = v + load_f32x16(bias + i * 64)
            store(asked + i * 64, v)
        if load_i64(args + 64) > load_i64(args + 72):
            _drop_groups(asked, n, load_i64(args + 64), load_i64(args + 72))
        for s in range(k):
            best = _best(asked, n)
            store_scalar(choices + 4 * s, i32(best))
            store_scalar(weights + 4 * s, load_f32(scores + 4 * best))
            store_scalar(asked + 4 * best, f(2.0 * NONE))
        if gate == 2:
            top = load_f32(weights)
            for s in range(k):
                store_scalar(weights + 4 * s, max_f32(vexp(splat_f32(load_f32(weights + 4 * s) - top))))
        factor = f32_from_bits(load_i64(args + 56))
        if gate == 2 or load_i64(args + 48):
            total = f(0.0)
            for s in range(k):
                total = f(total + load_f32(weights + 4 * s))
            factor = f(factor / max(total, f(LEAST_SUM)))
        for s in range(k):
            store_scalar(weights + 4 * s, f(load_f32(weights + 4 * s) * factor))

    return kernel


def sort(isa: Isa) -> Any:
    """Kernel, one chunk: the pairs of the batch by expert.

    args: 0 choices, 1 experts, 2 choices of a token, 3 order, 4 places, 5 starts, 6 active, 7 n_active.
    """

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        choices = load_i64(args)
        n = load_i64(args + 8)
        pairs = load_i64(head + H.TOKENS) * load_i64(args + 16)
        order = load_i64(args + 24)
        places = load_i64(args + 32)
        starts = load_i64(args + 40)
        active = load_i64(args + 48)
        for e in range(n + 1):
            store_scalar(starts + 4 * e, i32(0))
        for p in range(pairs):
            at = starts + 4 * i64(load_i32(choices + 4 * p))
            store_scalar(at, i32(load_i32(at) + i32(1)))
        n_active = 0
        first = i32(0)
        for e in range(n):
            count = load_i32(starts + 4 * e)
            store_scalar(starts + 4 * e, first)
            if count:
                store_scalar(active + 4 * n_active, i32(e))
                n_active += 1
            first = i32(first + count)
        for p in range(pairs):
            at = starts + 4 * i64(load_i32(choices + 4 * p))
            place = load_i32(at)
            store_scalar(order + 4 * i64(place), i32(p))
            store_scalar(places + 4 * p, place)
            store_scalar(at, i32(place + i32(1)))
        for e in range(n):  # each start has moved on to the next one's
            back = n - e
            store_scalar(starts + 4 * back, load_i32(starts + 4 * (back - 1)))
        store_scalar(starts, i32(0))
        store_scalar(load_i64(args + 56), i32(n_active))

    return kernel


def gather(isa: Isa) -> Any:
    """Kernel, one place of the order a chunk: the row of the pair's token, quantized for its readers.

    args: 0 rows, 1 their stride, 2 n, 3 order, 4.. readers (see give), 12 choices of a token, 13 weights by which rows are multiplied (0:
    none), 14 scratch rows, 15 their stride.
    """

    def kernel(args: int, head: int, place: int, thread: int) -> None:
        pair = i64(load_i32(load_i64(args + 24) + 4 * place))
        n = load_i64(args + 16)
        row = load_i64(args) + pair // load_i64(args + 96) * load_i64(args + 8)
        if load_i64(args + 104):
            factor = splat_f32(load_f32(load_i64(args + 104) + 4 * pair))
            scaled = load_i64(args + 112) + place * load_i64(args + 120)
            for i in range((n + 15) >> 4):
                store(scaled + i * 64, load_f32x16(row + i * 64) * factor)
            row = scaled
        give(row, n, args + 32, place, 1)

    return kernel


def expert_matmul(isa: Isa, type_name: str, heads: int = 0) -> Any:
    """Kernel: out = W_e x (+ bias_e) for the rows of each expert e; a chunk is some groups of one matrix.

    With `heads`, every token has one row for each matrix instead: row t * matrices + e.

    args: 0 addresses of the matrices (packed, or as the file has them), 1 bytes of a group, 2 blocks in a row, 3 rows, 4 activations, 5
    their stride, 6 out float32, 7 its stride, 8 groups a chunk, 9 chunks a matrix, 10 biases float32 (0: none), 11 bytes from bias to bias,
    12 starts, 13 active, 14 n_active, 15 bytes of a row in the file (0: the weights are packed), 16 scratch, 17 bytes of scratch a thread,
    18 matrices.
    """
    group = make_group(isa, type_name)
    pack_group = group_packer(type_name)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        parts = load_i64(args + 72)
        stride = load_i64(args + 40)
        out_stride = load_i64(args + 56)
        if heads:
            e = chunk // parts
            start = e
            tokens = load_i64(head + H.TOKENS)
            x0 = load_i64(args + 32) + e * stride
            out0 = load_i64(args + 48) + e * out_stride
            stride *= load_i64(args + 144)
            out_stride *= load_i64(args + 144)
        else:
            if chunk // parts >= i64(load_i32(load_i64(args + 112))):
                return
            e = i64(load_i32(load_i64(args + 104) + 4 * (chunk // parts)))
            start = i64(load_i32(load_i64(args + 96) + 4 * e))
            tokens = i64(load_i32(load_i64(args + 96) + 4 * e + 4)) - start
            x0 = load_i64(args + 32) + start * stride
            out0 = load_i64(args + 48) + start * out_stride
        weights = load_i64(load_i64(args) + 8 * e)
        group_bytes = load_i64(args + 8)
        n_blocks = load_i64(args + 16)
        n_rows = load_i64(args + 24)
        per_chunk = load_i64(args + 64)
        row_bytes = load_i64(args + 120)
        unpacked = load_i64(args + 128) + thread * load_i64(args + 136)
        first = chunk % parts * per_chunk
        for g in range(first, min(first + per_chunk, (n_rows + 15) >> 4)):
            w = weights + g * group_bytes
            if row_bytes:
                pack_group(weights + g * 16 * row_bytes, row_bytes, n_rows - g * 16, n_blocks, group_bytes, unpacked)
                w = unpacked
            bias = load_i64(args + 80)
            if bias:
                bias += e * load_i64(args + 88) + g * 64
            group(w, n_blocks, x0, stride, tokens, out0 + g * 64, out_stride, bias, 0, WIDE)

    return kernel


def combine(isa: Isa) -> Any:
    """Kernel, one token a chunk: x (+)= scale * sum of weight * row over its choices.

    args: 0 rows, 1 their stride, 2 n, 3 weights (0: all 1), 4 places, 5 choices of a token, 6 x, 7 its stride, 8 whether to add to x,
    9 scale (float bits).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        k = load_i64(args + 40)
        x = load_i64(args + 48) + t * load_i64(args + 56)
        weights = load_i64(args + 24)
        places = load_i64(args + 32)
        scale = splat_f32(f32_from_bits(load_i64(args + 72)))
        for i in range((load_i64(args + 16) + 15) >> 4):
            total = splat_f32(f(0.0))
            for s in range(k):
                pair = t * k + s
                row = load_i64(args) + i64(load_i32(places + 4 * pair)) * load_i64(args + 8)
                weight = f(1.0)
                if weights:
                    weight = load_f32(weights + 4 * pair)
                total = fma(load_f32x16(row + i * 64), splat_f32(weight), total)
            if load_i64(args + 64):
                store(x + i * 64, fma(total, scale, load_f32x16(x + i * 64)))
            else:
                store(x + i * 64, total * scale)

    return kernel


def gated_limited(isa: Isa) -> Any:
    """Kernel, one row a chunk: gpt-oss's gate, quantized for its readers: g sigmoid(1.702 g) (u + 1), g at most the limit, u within it.

    args: 0 gate (overwritten), 1 up, 2 their row stride, 3 n, 4.. readers (see give), 12 limit (float bits).
    """

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        gate = load_i64(args) + t * load_i64(args + 16)
        up = load_i64(args + 8) + t * load_i64(args + 16)
        n = load_i64(args + 24)
        limit = splat_f32(f32_from_bits(load_i64(args + 96)))
        for i in range((n + 15) >> 4):
            g = vmin(load_f32x16(gate + i * 64), limit)
            u = vmax(vmin(load_f32x16(up + i * 64), limit), limit * f(-1.0))
            store(gate + i * 64, where(lanes_below(n - i * 16), g * sigmoid(g * f(1.702)) * (u + splat_f32(f(1.0))), splat_f32(f(0.0))))
        give(gate, n, args + 32, t, 1)

    return kernel
