"""Attention over the blocks of the KV cache (kv.py).

Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) in steps of 64 positions. Parts of PART positions are
computed from scratch and merged in order, by one thread or by several. Step and part borders lie at multiples of their sizes whatever
the batch, so a row's bits depend neither on how its prompt was cut, nor on what is computed beside it, nor on the number of threads. K
and V are read once for QUERIES query vectors: all heads of a group, for as many of up to TILE_ROWS successive rows of a sequence as fit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.attention_sizes import ALIBI, BOTH, FRAME, FURTHER, PART, QUERIES, STEP, TABLE_BIAS
from localrun.kernels_cpu.elementwise import _prepare
from localrun.kernels_cpu.fetch import prefetch
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.kv import Codec
from localrun.kernels_cpu.math import tanh, vexp
from localrun.kernels_cpu.octets import baked
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
    max_f32,
    splat_f32,
    store,
    store_scalar,
    sum_f32,
    tile_fma,
    tile_load,
    tile_splat_f32,
    tile_store_all,
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

# A thread's working memory: a frame of int64 words that say what the chunk works on, then the buffers they point to.
TABLE, POOL, POOL_BLOCK, K_OFFSET, V_OFFSET, DIM, WIDE, WINDOW, LAST, CAP = range(0, 80, 8)
Q, Q_BYTES, SCORES, OUT, STATE, POSITIONS, ALONE, END = range(80, 144, 8)


@numba.njit
def _scale(source: int, target: int, n: int, factor: Any) -> None:
    """target = source * factor, n float32; what lies behind them is left alone."""
    for i in range(0, n & -16, 16):
        store(target + i * 4, load_f32x16(source + i * 4) * splat_f32(factor))
    for i in range(n & -16, n):
        store_scalar(target + i * 4, load_f32(source + i * 4) * factor)


def rope_kv(isa: Isa, kv_type: str, dim: int, dim_v: int) -> Any:
    """Kernel, one row a chunk: norms and rotates the row's query and key heads, scales the queries, writes K and V into the row's block.

    args: 0 q, 1 q stride, 2 k, 3 k stride, 4 v, 5 v stride, 6 query heads, 7 kv heads, 8 q norm weight (0: none), 9 k norm weight, 10
    eps (float bits), 11 dimensions to rotate, 12 offset in the head of the angle table, 13 whether pairs are halves apart, 14 offset of
    the layer in a pool block, 15 scale of q (float bits).
    """
    codec = Codec(kv_type)
    write_k, write_v = codec.write_k, codec.write_v
    k_bytes, v_bytes = head_bytes(kv_type, dim), head_bytes(kv_type, room(dim_v))

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        q = load_i64(args) + t * load_i64(args + 8)
        k = load_i64(args + 16) + t * load_i64(args + 24)
        v = load_i64(args + 32) + t * load_i64(args + 40)
        n_heads = load_i64(args + 48)
        n_kv = load_i64(args + 56)
        eps = f32_from_bits(load_i64(args + 80))
        n_rot = load_i64(args + 88)
        halves = load_i64(args + 104)
        scale = f32_from_bits(load_i64(args + 120))
        position = i64(load_i32(load_i64(head + H.POSITIONS) + 4 * t))
        table = load_i64(head + load_i64(args + 96)) + position * n_rot * 4
        for h in range(n_heads):
            _prepare(q + h * dim * 4, dim, load_i64(args + 64), eps, n_rot, table, halves)
        _scale(q, q, n_heads * dim, scale)
        block = i64(load_i32(load_i64(load_i64(head + H.TABLES) + 8 * t) + 4 * (position >> 4)))
        layer = load_i64(head + H.KV) + block * load_i64(head + H.KV_BLOCK) + load_i64(args + 112)
        for h in range(n_kv):
            _prepare(k + h * dim * 4, dim, load_i64(args + 72), eps, n_rot, table, halves)
            write_k(layer + h * k_bytes, position & 15, k + h * dim * 4, dim)
            write_v(layer + n_kv * k_bytes + h * v_bytes, position & 15, v + h * dim_v * 4, dim_v)

    return kernel


# ---- one step of 64 positions --------------------------------------------------------------------------------------------------


def _scores(codec: Codec, queries: int) -> Any:
    """Scores of 64 keys, 16 at a time, into the frame's SCORES."""
    dot_k = codec.dot_k

    @numba.njit
    def scores(frame: int, first: int) -> None:
        keys = load_i64(frame + POOL) + load_i64(frame + K_OFFSET)
        for b in range(4):
            acc = zeros_f32(queries)
            start = first + b * BLOCK
            if start <= load_i64(frame + LAST):
                block = i64(load_i32(load_i64(frame + TABLE) + 4 * (start >> 4)))
                part = keys + block * load_i64(frame + POOL_BLOCK)
                acc = dot_k(part, load_i64(frame + DIM), load_i64(frame + Q), load_i64(frame + Q_BYTES), acc)
            tile_store_all(acc, load_i64(frame + SCORES) + b * 64, 256)

    return scores


def _softmax(queries: int, soft_cap: bool, bias: int, sees: int) -> Any:
    """Masks the scores, moves maximum and sum on, turns scores into weights, fades the output so far.

    bias: ALIBI: scores fall with the distance in positions (Press et al. 2022), by the slopes that lie behind the frame's POSITIONS;
    TABLE_BIAS: what is added lies at the addresses there, by position of the key less that of the query (Raffel et al. 2020).
    sees: BOTH: keys behind a query are seen too, up to the frame's END; a window lies half on either side; FURTHER: up to ends of their
    own, which lie behind the biases.
    """

    @numba.njit
    def softmax(frame: int, first: int) -> None:
        cap = splat_f32(f32_from_bits(load_i64(frame + CAP)))
        window = load_i64(frame + WINDOW)
        vectors = load_i64(frame + WIDE) >> 4
        for i in range(queries):
            row = load_i64(frame + SCORES) + i * 256
            state = load_i64(frame + STATE) + i * 8
            out = load_i64(frame + OUT) + i * vectors * 64
            position = load_i64(load_i64(frame + POSITIONS) + 8 * i)
            past = position + 1
            unseen = position + 1 - window
            if sees == FURTHER:
                past = load_i64(load_i64(frame + POSITIONS) + 2 * QUERIES * 8 + 8 * i)
            if sees == BOTH:
                past = load_i64(frame + END)
                unseen = position - (window >> 1)
                if window > 0:
                    past = min(past, position + (window >> 1) + 1)
            all_seen = first + STEP <= past and (window <= 0 or unseen <= first)
            peak = splat_f32(f(MASKED))
            for b in range(4):
                s = load_f32x16(row + b * 64)
                if soft_cap:
                    s = tanh(s / cap) * cap
                start = first + b * BLOCK
                if bias == ALIBI:
                    ahead = i32_to_f32(load_i32x16(_LANES())) + splat_f32(f(start - position))
                    if sees == BOTH:
                        ahead = vmin(ahead, ahead * f(-1.0))
                    s = fma(ahead, splat_f32(load_f32(load_i64(frame + POSITIONS) + QUERIES * 8 + 8 * i)), s)
                if bias == TABLE_BIAS:
                    s = s + load_f32x16(load_i64(load_i64(frame + POSITIONS) + QUERIES * 8 + 8 * i) + 4 * (start - position))
                if not all_seen:
                    s = where(lanes_below(past - start), s, splat_f32(f(MASKED)))
                    if window > 0:
                        s = where(lanes_below(unseen - start), splat_f32(f(MASKED)), s)
                store(row + b * 64, s)
                peak = vmax(peak, s)
            old = load_f32(state)
            new = max(old, max_f32(peak))
            total = splat_f32(f(0.0))
            for b in range(4):
                p = vexp(load_f32x16(row + b * 64) - splat_f32(new))
                store(row + b * 64, p)
                total = total + p
            fade = vexp(splat_f32(old - new))
            store_scalar(state, new)
            store_scalar(state + 4, fma(load_f32(state + 4), max_f32(fade), sum_f32(total)))
            if new > old:  # otherwise the output fades by a factor of 1
                for d in range(vectors):
                    store(out + d * 64, load_f32x16(out + d * 64) * fade)

    return softmax


def _values(codec: Codec, queries: int) -> Any:
    """Adds the values, weighted, to the frame's OUT."""
    read_v = codec.read_v

    @numba.njit
    def values(frame: int, first: int) -> None:
        pool = load_i64(frame + POOL) + load_i64(frame + V_OFFSET)
        wide = load_i64(frame + WIDE)
        n_keys = min(load_i64(frame + LAST) + 1 - first, STEP)
        for d in range(0, wide, 16):
            acc = tile_load(zeros_f32(queries), load_i64(frame + OUT) + d * 4, wide * 4)
            for b in range((n_keys + 15) >> 4):
                part = pool + i64(load_i32(load_i64(frame + TABLE) + 4 * ((first >> 4) + b))) * load_i64(frame + POOL_BLOCK)
                weights = load_i64(frame + SCORES) + b * 64
                for i in range(min(n_keys - b * 16, 16)):
                    acc = tile_fma(acc, read_v(part, i, d, wide), tile_splat_f32(acc, weights + i * 4, 256))
            tile_store_all(acc, load_i64(frame + OUT) + d * 4, wide * 4)

    return values


def _fetch(kv_type: str) -> Any:
    """Asks for the values of this step and the keys of the next: blocks lie apart, so hardware prefetching does not see them coming."""

    @numba.njit
    def fetch(offset: int, nbytes: int, frame: int, first: int) -> None:
        for b in range(4):
            start = first + b * BLOCK
            if start <= load_i64(frame + LAST):
                block = i64(load_i32(load_i64(frame + TABLE) + 4 * (start >> 4)))
                at = load_i64(frame + POOL) + block * load_i64(frame + POOL_BLOCK) + offset
                for line in range(0, nbytes, 64):
                    prefetch(at + line, 1)

    @numba.njit
    def both(frame: int, first: int, k_bytes: int, v_bytes: int) -> None:
        fetch(load_i64(frame + V_OFFSET), v_bytes, frame, first)
        fetch(load_i64(frame + K_OFFSET), k_bytes, frame, first + STEP)

    return both


def _stepper(kv_type: str, soft_cap: bool, bias: int, sees: int, k_bytes: int, v_bytes: int) -> Any:
    """A compiled function (frame, queries, first, end): all steps from `first` on, before `end`."""
    codec = Codec(kv_type)
    steps = [(_scores(codec, n), _softmax(n, soft_cap, bias, sees), _values(codec, n)) for n in (1, 2, 4, 8)]
    (s1, m1, v1), (s2, m2, v2), (s4, m4, v4), (s8, m8, v8) = steps
    fetch = _fetch(kv_type)

    @numba.njit
    def run(frame: int, queries: int, first: int, end: int) -> None:
        while first < end:
            if load_i64(frame + ALONE):
                fetch(frame, first, k_bytes, v_bytes)
            if queries > 4:
                s8(frame, first)
                m8(frame, first)
                v8(frame, first)
            elif queries > 2:
                s4(frame, first)
                m4(frame, first)
                v4(frame, first)
            elif queries > 1:
                s2(frame, first)
                m2(frame, first)
                v2(frame, first)
            else:
                s1(frame, first)
                m1(frame, first)
                v1(frame, first)
            first += STEP

    return run


# ---- parts --------------------------------------------------------------------------------------------------------------------


@numba.njit
def _clear(queries: int, out: int, out_bytes: int, state: int) -> None:
    """Nothing seen yet."""
    for i in range(queries):
        store_scalar(state + i * 8, f(MASKED))
        store_scalar(state + i * 8 + 4, f(0.0))
        for d in range(0, out_bytes, 64):
            store(out + i * out_bytes + d, splat_f32(f(0.0)))


@numba.njit
def _merge(total: int, total_state: int, out: int, state: int, out_bytes: int) -> None:
    """Adds what a later part gives for one query to what earlier ones gave. State: maximum and sum, float32 each."""
    old, fresh = load_f32(total_state), load_f32(state)
    new = max(old, fresh)
    a = vexp(splat_f32(old - new))
    b = vexp(splat_f32(fresh - new))
    store_scalar(total_state, new)
    store_scalar(total_state + 4, fma(load_f32(total_state + 4), max_f32(a), load_f32(state + 4) * max_f32(b)))
    for d in range(0, out_bytes, 64):
        store(total + d, fma(load_f32x16(total + d), a, load_f32x16(out + d) * b))


@numba.njit
def _finish(out: int, state: int, sinks: int, h: int, target: int, dim_v: int) -> None:
    """Divides one head's output by the sum of its weights (and the weight of its sink: Xiao et al. 2023) and writes it."""
    norm = load_f32(state + 4)
    if sinks:
        norm = norm + max_f32(vexp(splat_f32(load_f32(sinks + h * 4) - load_f32(state))))
    inverse = f(1.0) / norm
    _scale(out, target, dim_v, inverse)


@numba.njit
def _low(position: int, window: int) -> int:
    """Where the steps of a row that sees `window` positions (0: all) begin."""
    if window > 0:
        return max(position + 1 - window, 0) // STEP * STEP
    return 0


def attention(isa: Isa, kv_type: str, dim: int, dim_v: int, soft_cap: int, bias: int = 0, sees: int = 0) -> Any:
    """Kernel: a chunk is one kv head of one tile of rows (or one part of that): softmax(q k) v for all query heads of the group.

    args: 0 q (scaled), 1 q stride, 2 query heads, 3 kv heads, 4 out float32, 5 out stride, 6 offset of the layer in a pool block, 7
    window (0: all positions), 8 soft cap (float bits), 9 scratch, 10 scratch bytes a thread, 11 sinks float32 a head (0: none), 12
    slopes float32 a head (bias ALIBI), or tables float32 (TABLE_BIAS: where the first head's value for distance 0 lies, 14 bytes from
    head to head), 13 int32 a row: how many positions its sequence has (sees BOTH: a window then lies half on either side) or the
    row itself sees (FURTHER: an image's rows see each other, whichever comes first). With the header's PARTS above 1 tiles hold one
    row, and a chunk leaves one part's maximum, sum and output in PARTIAL for attention_merge.
    """
    k_bytes, v_bytes = head_bytes(kv_type, dim), head_bytes(kv_type, room(dim_v))
    run = _stepper(kv_type, bool(soft_cap), bias, sees, k_bytes, v_bytes)
    wide = room(dim_v)
    q_bytes, out_bytes = room(dim) * 4, wide * 4
    of_part = 64 + out_bytes

    @numba.njit
    def set_up(args: int, head: int, frame: int, row0: int, kv_head: int) -> None:
        q = frame + FRAME
        scores = q + QUERIES * q_bytes
        out = scores + QUERIES * STEP * 4
        state = out + 2 * QUERIES * out_bytes
        store_scalar(frame + TABLE, load_i64(load_i64(head + H.TABLES) + 8 * row0))
        store_scalar(frame + POOL, load_i64(head + H.KV))
        store_scalar(frame + POOL_BLOCK, load_i64(head + H.KV_BLOCK))
        store_scalar(frame + K_OFFSET, load_i64(args + 48) + kv_head * k_bytes)
        store_scalar(frame + V_OFFSET, load_i64(args + 48) + load_i64(args + 24) * k_bytes + kv_head * v_bytes)
        store_scalar(frame + DIM, i64(dim))
        store_scalar(frame + WIDE, i64(wide))
        store_scalar(frame + WINDOW, load_i64(args + 56))
        store_scalar(frame + CAP, load_i64(args + 64))
        store_scalar(frame + Q, q)
        store_scalar(frame + Q_BYTES, i64(q_bytes))
        store_scalar(frame + SCORES, scores)
        store_scalar(frame + OUT, out)
        store_scalar(frame + STATE, state)
        store_scalar(frame + POSITIONS, state + 2 * QUERIES * 8)
        if sees == BOTH:
            store_scalar(frame + END, i64(load_i32(load_i64(args + 104) + 4 * row0)))

    @numba.njit
    def gather(args: int, head: int, frame: int, row0: int, kv_head: int, base: int, n_queries: int) -> None:
        """Copies QUERIES query vectors from `base` on side by side (the last one again where there are fewer) and notes their positions."""
        group = load_i64(args + 16) // load_i64(args + 24)
        for i in range(QUERIES):
            v = min(base + i, n_queries - 1)
            row = row0 + v // group
            position = i64(load_i32(load_i64(head + H.POSITIONS) + 4 * row))
            store_scalar(load_i64(frame + POSITIONS) + 8 * i, position)
            last = position
            if sees == FURTHER:
                past = i64(load_i32(load_i64(args + 104) + 4 * row))
                store_scalar(load_i64(frame + POSITIONS) + 2 * QUERIES * 8 + 8 * i, past)
                last = past - 1
                if i:
                    last = max(last, load_i64(frame + LAST))
            if sees == BOTH:
                last = load_i64(frame + END) - 1
                if load_i64(frame + WINDOW) > 0:
                    last = min(last, position + (load_i64(frame + WINDOW) >> 1))
            store_scalar(frame + LAST, last)
            if bias == ALIBI:
                slope = load_f32(load_i64(args + 96) + (kv_head * group + v % group) * 4)
                store_scalar(load_i64(frame + POSITIONS) + QUERIES * 8 + 8 * i, slope)
            if bias == TABLE_BIAS:
                values = load_i64(args + 96) + (kv_head * group + v % group) * load_i64(args + 112)
                store_scalar(load_i64(frame + POSITIONS) + QUERIES * 8 + 8 * i, values)
            source = load_i64(args) + row * load_i64(args + 8) + (kv_head * group + v % group) * dim * 4
            _scale(source, load_i64(frame + Q) + i * q_bytes, dim, f(1.0))

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        n_heads = load_i64(args + 16)
        n_kv = load_i64(args + 24)
        group = n_heads // n_kv
        parts = load_i64(head + H.PARTS)
        number = chunk % parts
        kv_head = (chunk // parts) % n_kv
        tile = chunk // parts // n_kv
        rows = load_i64(head + H.TILES) + 8 * tile
        row0 = i64(load_i32(rows))
        n_queries = i64(load_i32(rows + 4)) * group
        frame = load_i64(args + 72) + thread * load_i64(args + 80)
        set_up(args, head, frame, row0, kv_head)
        store_scalar(frame + ALONE, i64(load_i32(rows + 4) == 1))
        out = load_i64(frame + OUT)
        state = load_i64(frame + STATE)
        total = out + QUERIES * out_bytes
        total_state = state + QUERIES * 8
        for base in range(0, n_queries, QUERIES):
            queries = min(n_queries - base, QUERIES)
            gather(args, head, frame, row0, kv_head, base, n_queries)
            last = load_i64(frame + LAST)
            window = load_i64(args + 56)
            if sees == BOTH and window > 0:
                window = (window >> 1) + 1  # so many of those before it does the first query see
            low = _low(load_i64(load_i64(frame + POSITIONS)), window)
            if parts > 1:
                low = max(low, number * PART)
                _clear(QUERIES, out, out_bytes, state)
                run(frame, queries, low, min((number + 1) * PART, last + 1))
                for i in range(queries):
                    at = load_i64(head + H.PARTIAL) + ((tile * n_heads + kv_head * group + base + i) * parts + number) * of_part
                    store_scalar(at, load_i64(state + i * 8))
                    for d in range(0, out_bytes, 64):
                        store(at + 64 + d, load_f32x16(out + i * out_bytes + d))
                continue
            _clear(QUERIES, total, out_bytes, total_state)
            while low <= last:
                border = (low // PART + 1) * PART
                _clear(QUERIES, out, out_bytes, state)
                run(frame, queries, low, min(border, last + 1))
                for i in range(queries):
                    _merge(total + i * out_bytes, total_state + i * 8, out + i * out_bytes, state + i * 8, out_bytes)
                low = border
            for i in range(queries):
                h = kv_head * group + (base + i) % group
                target = load_i64(args + 32) + (row0 + (base + i) // group) * load_i64(args + 40) + h * dim_v * 4
                _finish(total + i * out_bytes, total_state + i * 8, load_i64(args + 88), h, target, dim_v)

    return kernel


def attention_merge(isa: Isa, dim_v: int) -> Any:
    """Kernel: merges the parts that `attention` left, in order. A chunk is one kv head of one row; args as `attention`'s."""
    out_bytes = room(dim_v) * 4
    of_part = 64 + out_bytes

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        n_heads = load_i64(args + 16)
        n_kv = load_i64(args + 24)
        group = n_heads // n_kv
        parts = load_i64(head + H.PARTS)
        kv_head = chunk % n_kv
        tile = chunk // n_kv
        row = i64(load_i32(load_i64(head + H.TILES) + 8 * tile))
        position = i64(load_i32(load_i64(head + H.POSITIONS) + 4 * row))
        total_state = load_i64(args + 72) + thread * load_i64(args + 80)
        total = total_state + 64
        for h in range(kv_head * group, (kv_head + 1) * group):
            _clear(1, total, out_bytes, total_state)
            for number in range(_low(position, load_i64(args + 56)) // PART, position // PART + 1):
                at = load_i64(head + H.PARTIAL) + ((tile * n_heads + h) * parts + number) * of_part
                _merge(total, total_state, at + 64, at, out_bytes)
            target = load_i64(args + 32) + row * load_i64(args + 40) + h * dim_v * 4
            _finish(total, total_state, load_i64(args + 88), h, target, dim_v)

    return kernel
