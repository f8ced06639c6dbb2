"""One step of attention over 64 positions: scores, softmax, values. Knows the thread's scratch memory, not where rows come from.

K and V of a step are turned into float32 once for all queries, K as [dim][64 positions], V as [64 positions][dim]. Scores (q x K) and
outputs (weights x V) are then the same product of small matrices, taken in tiles that fill the registers. Each score is one chain of fused
multiply-adds over the dimensions, each output one over the positions, so tiles may have any shape without changing a bit.

A row that is alone reads blocks directly. Blocks lie apart, so hardware prefetching does not see them coming: while K of a step is
multiplied, K of the next one is asked for, line by line in the order in which it will be read, then V likewise; and of each block of the
step behind that a first line, because finding four pages at once takes as long as finding one. A part goes on asking beyond its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu.attention_sizes import ALIBI, BOTH, STEP, TABLE_BIAS, Layout
from localrun.kernels_cpu.fetch import prefetch_far
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.kv import Codec
from localrun.kernels_cpu.math import tanh, vexp
from localrun.kernels_cpu.octets import baked
from localrun.kernels_cpu.outer import fold_max, fold_sum, shape, tile_begin, tile_end, tile_outer
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    i32_to_f32,
    lanes_below,
    load_f32,
    load_f32x16,
    load_i32,
    load_i32x16,
    load_i64,
    put,
    splat_f32,
    store,
    store_scalar,
    tile_load,
    vmax,
    vmin,
    where,
    zeros_f32,
)
from localrun.kernels_cpu.sizes import BLOCK, head_bytes, room

MASKED = -1e30

f = numba.float32
i64 = numba.int64
_LANES = baked(np.arange(BLOCK, dtype=np.int32).tobytes())

# The words at the beginning of a thread's scratch memory, which say what the chunk works on.
TABLE, POOL_BLOCK, KEYS, VALUES, LAST, CAP, ALONE, ASKED = range(0, 64, 8)
BLOCKS, ASK = 64, 96
"""Of a row that is alone: where a step's four blocks have what is read now, and where the next step's have it."""


# ---- products -------------------------------------------------------------------------------------------------------------------


def _tile(rows: int, vectors: int) -> Any:
    """A tile of registers: out[rows][16 vectors] = begin * fade + a[rows][n] b[n][16 vectors], all float32.

    a_bytes, b_bytes, begin_bytes, out_bytes: from row to row; fade: a float a row.
    """

    @numba.njit
    def row(b: int) -> Any:
        return tile_load(zeros_f32(vectors), b, 64)

    @numba.njit
    def product(
        a: int, a_bytes: int, b: int, b_bytes: int, n: int, begin: int, begin_bytes: int, fade: int, out: int, out_bytes: int
    ) -> None:
        acc = tile_begin(rows, vectors, begin, begin_bytes, fade)
        for _ in range(n >> 2):
            acc = tile_outer(acc, a, a_bytes, row(b))
            acc = tile_outer(acc, a + 4, a_bytes, row(b + b_bytes))
            acc = tile_outer(acc, a + 8, a_bytes, row(b + 2 * b_bytes))
            acc = tile_outer(acc, a + 12, a_bytes, row(b + 3 * b_bytes))
            a += 16
            b += 4 * b_bytes
        for i in range(n & 3):
            acc = tile_outer(acc, a + 4 * i, a_bytes, row(b))
            b += b_bytes
        tile_end(acc, vectors, out, out_bytes)

    return product


def _by_rows(isa: Isa, make: Callable[[int], Any]) -> Any:
    """make(rows), compiled functions of nine arguments, as one of `left` rows, or of as many as the largest has. Of an odd number, one row
    more is written.
    """
    rows, _ = shape(isa)
    tiles = [make(n) for n in rows]
    largest, middle, smallest = tiles[0], tiles[-2 % len(tiles)], tiles[-1]
    above_middle, above_smallest = rows[-2 % len(rows)], rows[-1]

    @numba.njit
    def product(left: int, *args: Any) -> None:
        if left > above_middle:
            largest(*args)
        elif left > above_smallest:
            middle(*args)
        else:
            smallest(*args)

    return product


def _scores(isa: Isa, codec: Codec, dim: int, at: Layout) -> Any:
    """q x K of the queries of each tile of registers, as far as one of them sees."""
    (rows, *_), vectors = shape(isa)
    whole = _by_rows(isa, lambda n: _tile(n, vectors))
    half = _by_rows(isa, lambda n: _tile(n, vectors // 2)) if vectors > 1 else whole
    expand = codec.expand_k

    @numba.njit
    def scores(frame: int, queries: int, first: int) -> None:
        for b in range(4):
            start = first + b * BLOCK
            if start <= load_i64(frame + LAST):
                expand(block_part(frame, load_i64(frame + KEYS), start), dim, frame + at.floats + b * 64)
        zeros = frame + at.none
        for i in range(0, queries, rows):
            seen = load_i64(frame + at.lasts + 8 * (i // rows)) - first
            if seen >= 0:
                wanted = min(seen >> 4, 3) + 1
                q, left = frame + at.q + i * at.q_bytes, queries - i
                for v in range(0, wanted, vectors):
                    k, to = frame + at.floats + v * 64, frame + at.scores + i * STEP * 4 + v * 64
                    if wanted <= vectors // 2:
                        half(left, q, at.q_bytes, k, STEP * 4, dim, zeros, 0, zeros, to, STEP * 4)
                    else:
                        whole(left, q, at.q_bytes, k, STEP * 4, dim, zeros, 0, zeros, to, STEP * 4)

    return scores


def _values(isa: Isa, codec: Codec, at: Layout) -> Any:
    """Adds weights x V to the outputs so far, which fade."""
    (rows, *_), vectors = shape(isa)
    of_call = vectors * 64
    over = at.out_bytes % of_call // 64
    whole = _by_rows(isa, lambda n: _tile(n, vectors))
    rest = _by_rows(isa, lambda n: _tile(n, over)) if over else whole
    expand = codec.expand_v

    @numba.njit
    def values(frame: int, queries: int, first: int) -> None:
        n = min(load_i64(frame + LAST) + 1 - first, STEP)
        for b in range((n + 15) >> 4):
            part = block_part(frame, load_i64(frame + VALUES), first + b * BLOCK)
            expand(part, min(n - b * BLOCK, BLOCK), at.out_bytes // 4, frame + at.floats + b * BLOCK * at.out_bytes)
        for offset in range(0, at.out_bytes, of_call):
            v = frame + at.floats + offset
            for i in range(0, queries, rows):
                seen = min(load_i64(frame + at.lasts + 8 * (i // rows)) + 1 - first, STEP)
                if seen > 0:
                    p, fade, left = frame + at.scores + i * STEP * 4, frame + at.fade + i * 4, queries - i
                    out = frame + at.out + i * at.out_bytes + offset
                    if over and offset + of_call > at.out_bytes:
                        rest(left, p, STEP * 4, v, at.out_bytes, seen, out, at.out_bytes, fade, out, at.out_bytes)
                    else:
                        whole(left, p, STEP * 4, v, at.out_bytes, seen, out, at.out_bytes, fade, out, at.out_bytes)

    return values


# ---- products of a row that is alone ----------------------------------------------------------------------------------------------


@numba.njit
def block_part(frame: int, heads: int, position: int) -> int:
    """Where a position's block has the head's keys or values. heads: where block 0 has them."""
    return heads + i64(load_i32(load_i64(frame + TABLE) + 4 * (position >> 4))) * load_i64(frame + POOL_BLOCK)


@numba.njit
def _place(frame: int, heads: int, first: int, end: int, asks: bool) -> None:
    """Writes where the four blocks from `first` on have the head's part, and, to be asked for, the four of the next step.

    asks: whether the pages of the step behind that are looked for; end: of what the row sees.
    """
    for i in range(4):
        at = first + i * BLOCK
        now = block_part(frame, heads, at if at < end else first)
        store_scalar(frame + BLOCKS + 8 * i, now)
        store_scalar(frame + ASK + 8 * i, block_part(frame, heads, at + STEP) if asks and at + STEP < end else now)
        if asks and at + 2 * STEP < end:
            prefetch_far(block_part(frame, heads, at + 2 * STEP), 1)


def _row_of(codec: Codec, vectors: int) -> Any:
    """Compiled (four addresses) -> one row of `vectors` vectors, from as many of them."""
    read = codec.read

    @numba.njit
    def one(a: int, b: int, c: int, d: int) -> Any:
        return put(zeros_f32(1), 0, read(a))

    @numba.njit
    def two(a: int, b: int, c: int, d: int) -> Any:
        return put(put(zeros_f32(2), 0, read(a)), 1, read(b))

    @numba.njit
    def three(a: int, b: int, c: int, d: int) -> Any:
        return put(put(put(zeros_f32(3), 0, read(a)), 1, read(b)), 2, read(c))

    @numba.njit
    def four(a: int, b: int, c: int, d: int) -> Any:
        return put(put(put(put(zeros_f32(4), 0, read(a)), 1, read(b)), 2, read(c)), 3, read(d))

    return (one, two, three, four)[vectors - 1]


def _scores_alone(isa: Isa, codec: Codec, dim: int, at: Layout) -> Any:
    """As `_scores`, straight from the blocks of a type without scales."""
    (rows, *_), vectors = shape(isa)
    row = _row_of(codec, vectors)
    step = BLOCK * codec.size
    lines, pairs = max(1, 2 * step // 64), dim >> 1

    def tile(n_rows: int) -> Any:
        @numba.njit
        def product(frame: int, v: int, a: int, out: int) -> None:
            acc = tile_begin(n_rows, vectors, frame + at.none, 0, frame + at.none)
            blocks = frame + BLOCKS + 8 * v
            k0 = load_i64(blocks)
            k1, k2, k3 = k0, k0, k0
            if vectors > 1:
                k1, k2, k3 = load_i64(blocks + 8), load_i64(blocks + 16), load_i64(blocks + 24)
            following = frame + ASK + 8 * v
            n0, n1, n2, n3 = load_i64(following), load_i64(following + 8), load_i64(following + 16), load_i64(following + 24)
            done = 0
            for _ in range(pairs):
                prefetch_far(n0 + done, lines)
                if vectors > 1:
                    prefetch_far(n1 + done, lines)
                acc = tile_outer(acc, a, at.q_bytes, row(k0 + done, k1 + done, k2 + done, k3 + done))
                if vectors > 1:
                    prefetch_far(n2 + done, lines)
                    prefetch_far(n3 + done, lines)
                done += step
                acc = tile_outer(acc, a + 4, at.q_bytes, row(k0 + done, k1 + done, k2 + done, k3 + done))
                done += step
                a += 8
            if dim & 1:
                acc = tile_outer(acc, a, at.q_bytes, row(k0 + done, k1 + done, k2 + done, k3 + done))
            tile_end(acc, vectors, out, STEP * 4)

        return product

    product = _by_rows(isa, tile)

    @numba.njit
    def scores(frame: int, queries: int, first: int, end: int) -> None:
        for i in range(0, queries, rows):
            _place(frame, load_i64(frame + KEYS), first, end, i == 0)
            for v in range(0, 4, vectors):
                product(queries - i, frame, v, frame + at.q + i * at.q_bytes, frame + at.scores + i * STEP * 4 + v * 64)

    return scores


def _values_alone(isa: Isa, codec: Codec, at: Layout) -> Any:
    """As `_values`, straight from the blocks of a type without scales."""
    (rows, *_), vectors = shape(isa)
    of_call = vectors * 64
    over = at.out_bytes % of_call // 64
    size, slot_bytes = codec.size, at.out_bytes // 4 * codec.size

    def tiles(n_vectors: int) -> Any:
        row = _row_of(codec, n_vectors)
        lines = max(1, n_vectors * 16 * size // 64)

        def tile(n_rows: int) -> Any:
            @numba.njit
            def product(frame: int, offset: int, n: int, p: int, fade: int, out: int) -> None:
                acc = tile_begin(n_rows, n_vectors, out, at.out_bytes, fade)
                for b in range((n + 15) >> 4):
                    v = load_i64(frame + BLOCKS + 8 * b) + offset // 4 * size
                    ask = load_i64(frame + ASK + 8 * b) + offset // 4 * size
                    for _ in range(min(n - b * BLOCK, BLOCK)):
                        prefetch_far(ask, lines)
                        acc = tile_outer(acc, p, STEP * 4, row(v, v + 16 * size, v + 32 * size, v + 48 * size))
                        p += 4
                        v += slot_bytes
                        ask += slot_bytes
                tile_end(acc, n_vectors, out, at.out_bytes)

            return product

        return _by_rows(isa, tile)

    whole = tiles(vectors)
    rest = tiles(over) if over else whole

    @numba.njit
    def values(frame: int, queries: int, first: int, end: int) -> None:
        n = min(end - first, STEP)
        for i in range(0, queries, rows):
            _place(frame, load_i64(frame + VALUES), first, end, i == 0)
            for offset in range(0, at.out_bytes, of_call):
                p, fade = frame + at.scores + i * STEP * 4, frame + at.fade + i * 4
                out = frame + at.out + i * at.out_bytes + offset
                if over and offset + of_call > at.out_bytes:
                    rest(queries - i, frame, offset, n, p, fade, out)
                else:
                    whole(queries - i, frame, offset, n, p, fade, out)

    return values


# ---- softmax --------------------------------------------------------------------------------------------------------------------


def _masked(soft_cap: bool, bias: int, sees: int, at: Layout) -> Any:
    """(frame, query, first) -> the largest of a query's 64 scores by lane, once they are capped, moved and masked."""

    @numba.njit
    def moved(s: Any, frame: int, i: int, start: int) -> Any:
        if soft_cap:
            cap = splat_f32(f32_from_bits(load_i64(frame + CAP)))
            s = tanh(s / cap) * cap
        if bias == ALIBI:
            ahead = i32_to_f32(load_i32x16(_LANES())) + splat_f32(f(start - load_i64(frame + at.bias + 16 * i)))
            if sees == BOTH:
                ahead = vmin(ahead, ahead * f(-1.0))
            s = fma(ahead, splat_f32(f32_from_bits(load_i64(frame + at.bias + 16 * i + 8))), s)
        if bias == TABLE_BIAS:
            s = s + load_f32x16(load_i64(frame + at.bias + 16 * i + 8) + 4 * (start - load_i64(frame + at.bias + 16 * i)))
        return s

    @numba.njit
    def masked(frame: int, i: int, first: int) -> Any:
        row = frame + at.scores + i * STEP * 4
        seen = load_i64(frame + at.seen + 8 * i) - first
        past = load_i64(frame + at.past + 8 * i) - first
        peak = splat_f32(f(MASKED))
        if seen <= 0 and past >= STEP:
            for b in range(4):
                s = load_f32x16(row + b * 64)
                if soft_cap or bias:
                    s = moved(s, frame, i, first + b * BLOCK)
                    store(row + b * 64, s)
                peak = vmax(peak, s)
        else:
            for b in range(4):
                s = moved(load_f32x16(row + b * 64), frame, i, first + b * BLOCK)
                s = where(lanes_below(past - b * BLOCK), s, splat_f32(f(MASKED)))
                s = where(lanes_below(seen - b * BLOCK), splat_f32(f(MASKED)), s)
                store(row + b * 64, s)
                peak = vmax(peak, s)
        return peak

    return masked


def _softmax(soft_cap: bool, bias: int, sees: int, at: Layout) -> Any:
    """Moves maximum and sum of 16 queries at a time on, turns scores into weights, and notes by what the outputs so far fade.

    bias: ALIBI: scores fall with the distance in positions (Press et al. 2022) by each query's slope; TABLE_BIAS: what is added lies in
    each query's table, by position of the key less that of the query (Raffel et al. 2020). With sees BOTH distances have no sign.
    """
    masked = _masked(soft_cap, bias, sees, at)

    @numba.njit
    def softmax(frame: int, queries: int, first: int) -> None:
        fold = frame + at.fold
        for base in range(0, queries, 16):
            n = min(queries - base, 16)
            for i in range(n):
                store(fold + i * 64, masked(frame, base + i, first))
            old = load_f32x16(frame + at.peak + base * 4)
            new = vmax(old, fold_max(fold))
            fade = vexp(old - new)
            store(frame + at.peak + base * 4, new)
            store(frame + at.fade + base * 4, fade)
            for i in range(n):
                row = frame + at.scores + (base + i) * STEP * 4
                top = splat_f32(load_f32(frame + at.peak + (base + i) * 4))
                total = splat_f32(f(0.0))
                for b in range(4):
                    p = vexp(load_f32x16(row + b * 64) - top)
                    store(row + b * 64, p)
                    total = total + p
                store(fold + i * 64, total)
            store(frame + at.sum + base * 4, fma(load_f32x16(frame + at.sum + base * 4), fade, fold_sum(fold)))

    return softmax


def stepper(isa: Isa, kv_type: str, dim: int, dim_v: int, soft_cap: bool, bias: int, sees: int, at: Layout) -> Any:
    """A compiled function (frame, queries, first, end): all steps from `first` on, before `end`, over the queries of the scratch memory."""
    codec = Codec(kv_type)
    k_bytes, v_bytes = head_bytes(kv_type, dim), head_bytes(kv_type, room(dim_v))
    scores, softmax, values = _scores(isa, codec, dim, at), _softmax(soft_cap, bias, sees, at), _values(isa, codec, at)
    plain = codec.plain
    scores_alone, values_alone = _scores_alone(isa, codec, dim, at), _values_alone(isa, codec, at)

    @numba.njit
    def ask(frame: int, heads: int, nbytes: int, first: int, end: int) -> None:
        for start in range(first, min(first + STEP, end), BLOCK):
            part = block_part(frame, heads, start)
            for line in range(0, nbytes, 64):
                prefetch_far(part + line, 1)

    @numba.njit
    def run(frame: int, queries: int, first: int, end: int) -> None:
        alone, past = load_i64(frame + ALONE), load_i64(frame + LAST) + 1
        if alone and load_i64(frame + ASKED) != block_part(frame, load_i64(frame + KEYS), first):
            ask(frame, load_i64(frame + KEYS), k_bytes, first, past)
            if plain:
                ask(frame, load_i64(frame + VALUES), v_bytes, first, past)
        while first < end:
            if plain and alone:
                scores_alone(frame, queries, first, past)
                softmax(frame, queries, first)
                values_alone(frame, queries, first, past)
            else:
                if alone:
                    ask(frame, load_i64(frame + VALUES), v_bytes, first, past)
                    ask(frame, load_i64(frame + KEYS), k_bytes, first + STEP, past)
                scores(frame, queries, first)
                softmax(frame, queries, first)
                values(frame, queries, first)
            first += STEP
        # The thread's next chunk mostly is the next part of the same head.
        store_scalar(frame + ASKED, block_part(frame, load_i64(frame + KEYS), first) if first < past else i64(0))

    return run
