"""Attention over the blocks of the KV cache (kv.py), and what writes into them.

Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) in steps of 64 positions (attention_steps.py). Parts of PART
positions are computed from scratch and merged in order, by one thread or by several. Step and part borders lie at multiples of their sizes
whatever the batch, so a row's bits depend neither on how its prompt was cut, nor on what is computed beside it, nor on the number of
threads. K and V are read once for QUERIES query vectors: all heads of a group, for as many of up to TILE_ROWS successive rows of a sequence
as fit.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.attention_sizes import ALIBI, BOTH, FURTHER, PART, QUERIES, STEP, TABLE_BIAS, Layout, layout
from localrun.kernels_cpu.attention_steps import ALONE, CAP, KEYS, LAST, MASKED, POOL_BLOCK, TABLE, VALUES, stepper
from localrun.kernels_cpu.elementwise import _prepare
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.kv import Codec
from localrun.kernels_cpu.math import vexp
from localrun.kernels_cpu.outer import shape
from localrun.kernels_cpu.simd import (
    f32_from_bits,
    fma,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    max_f32,
    splat_f32,
    store,
    store_scalar,
)
from localrun.kernels_cpu.sizes import head_bytes, room

f = numba.float32
i64 = numba.int64


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


# ---- parts --------------------------------------------------------------------------------------------------------------------


@numba.njit
def _clear(peaks: int, sums: int, out: int, nbytes: int) -> None:
    """Nothing seen yet by any query; nbytes: of all their outputs."""
    for i in range(0, QUERIES * 4, 64):
        store(peaks + i, splat_f32(f(MASKED)))
        store(sums + i, splat_f32(f(0.0)))
    for i in range(0, nbytes, 64):
        store(out + i, splat_f32(f(0.0)))


@numba.njit
def _merge(peak: int, total: int, out: int, peak_after: Any, sum_after: Any, out_after: int, out_bytes: int) -> None:
    """Adds what a later part gives for one query to what earlier ones gave: addresses of maximum, sum and output."""
    old = load_f32(peak)
    new = max(old, peak_after)
    a = vexp(splat_f32(old - new))
    b = vexp(splat_f32(peak_after - new))
    store_scalar(peak, new)
    store_scalar(total, fma(load_f32(total), max_f32(a), sum_after * max_f32(b)))
    for d in range(0, out_bytes, 64):
        store(out + d, fma(load_f32x16(out + d), a, load_f32x16(out_after + d) * b))


@numba.njit
def _finish(out: int, peak: Any, total: Any, sinks: int, h: int, target: int, dim_v: int) -> None:
    """Divides one head's output by the sum of its weights (and the weight of its sink: Xiao et al. 2023) and writes it."""
    if sinks:
        total = total + max_f32(vexp(splat_f32(load_f32(sinks + h * 4) - peak)))
    inverse = f(1.0) / total
    # Merging a part into nothing makes +0 of -0, and so does adding 0: whoever has a single part does not merge.
    for d in range(0, dim_v & -16, 16):
        store(target + d * 4, load_f32x16(out + d * 4) * splat_f32(inverse) + splat_f32(f(0.0)))
    for d in range(dim_v & -16, dim_v):
        store_scalar(target + d * 4, load_f32(out + d * 4) * inverse + f(0.0))


def _gatherer(isa: Isa, dim: int, bias: int, sees: int, at: Layout) -> Any:
    """A compiled function that puts up to QUERIES query vectors from `base` on side by side and notes what each of them sees."""
    rows = shape(isa)[0][0]

    @numba.njit
    def seen(args: int, head: int, row: int, position: int) -> tuple[int, int]:
        """The first position that a row sees, and the one behind the last."""
        window = load_i64(args + 56)
        first, past = i64(0), position + 1
        if window > 0:
            first = position + 1 - window
        if sees == FURTHER:
            past = i64(load_i32(load_i64(args + 104) + 4 * row))
        if sees == BOTH:
            past = i64(load_i32(load_i64(args + 104) + 4 * row))
            if window > 0:
                first = position - (window >> 1)
                past = min(past, position + (window >> 1) + 1)
        return first, past

    @numba.njit
    def gather(args: int, head: int, frame: int, row0: int, kv_head: int, base: int, queries: int) -> None:
        group = load_i64(args + 16) // load_i64(args + 24)
        latest = i64(-1)
        last = i64(-1)
        for i in range(queries):
            row = row0 + (base + i) // group
            h = kv_head * group + (base + i) % group
            position = i64(load_i32(load_i64(head + H.POSITIONS) + 4 * row))
            first, past = seen(args, head, row, position)
            store_scalar(frame + at.seen + 8 * i, first)
            store_scalar(frame + at.past + 8 * i, past)
            last = past - 1 if i % rows == 0 else max(last, past - 1)
            store_scalar(frame + at.lasts + 8 * (i // rows), last)
            latest = max(latest, last)
            store_scalar(frame + at.bias + 16 * i, position)
            if bias == ALIBI:
                store_scalar(frame + at.bias + 16 * i + 8, i64(load_i32(load_i64(args + 96) + h * 4)))
            if bias == TABLE_BIAS:
                store_scalar(frame + at.bias + 16 * i + 8, load_i64(args + 96) + h * load_i64(args + 112))
            _scale(load_i64(args) + row * load_i64(args + 8) + h * dim * 4, frame + at.q + i * at.q_bytes, dim, f(1.0))
        store_scalar(frame + LAST, latest)

    return gather


def attention(isa: Isa, kv_type: str, dim: int, dim_v: int, soft_cap: int, bias: int = 0, sees: int = 0) -> Any:
    """Kernel: a chunk is one kv head of one tile of rows (or one part of that): softmax(q k) v for all query heads of the group.

    args: 0 q (scaled), 1 q stride, 2 query heads, 3 kv heads, 4 out float32, 5 out stride, 6 offset of the layer in a pool block, 7
    window (0: all positions), 8 soft cap (float bits), 9 scratch, 10 scratch bytes a thread, 11 sinks float32 a head (0: none), 12
    slopes float32 a head (bias ALIBI), or tables float32 (TABLE_BIAS: where the first head's value for distance 0 lies, 14 bytes from
    head to head), 13 int32 a row: how many positions its sequence has (sees BOTH: a window then lies half on either side) or the
    row itself sees (FURTHER: an image's rows see each other, whichever comes first). With the header's PARTS above 1 tiles hold one
    row, and a chunk leaves one part's maximum, sum and output in PARTIAL for attention_merge. The last tiles, which see most, come first.
    """
    k_bytes, v_bytes = head_bytes(kv_type, dim), head_bytes(kv_type, room(dim_v))
    at = layout(dim, dim_v)
    run = stepper(isa, kv_type, dim, dim_v, bool(soft_cap), bias, sees, at)
    gather = _gatherer(isa, dim, bias, sees, at)
    out_bytes = at.out_bytes
    of_part = 64 + out_bytes

    @numba.njit
    def set_up(args: int, head: int, frame: int, rows: int, kv_head: int) -> None:
        store_scalar(frame + TABLE, load_i64(load_i64(head + H.TABLES) + 8 * i64(load_i32(rows))))
        store_scalar(frame + POOL_BLOCK, load_i64(head + H.KV_BLOCK))
        layer = load_i64(head + H.KV) + load_i64(args + 48)
        store_scalar(frame + KEYS, layer + kv_head * k_bytes)
        store_scalar(frame + VALUES, layer + load_i64(args + 24) * k_bytes + kv_head * v_bytes)
        store_scalar(frame + CAP, load_i64(args + 64))
        store_scalar(frame + ALONE, i64(load_i32(rows + 4) == 1))

    @numba.njit
    def one_part(head: int, frame: int, queries: int, low: int, number: int, place: int) -> None:
        """Leaves part `number` of each query in PARTIAL, from place number `place` on."""
        _clear(frame + at.peak, frame + at.sum, frame + at.out, queries * out_bytes)
        run(frame, queries, max(low, number * PART), min((number + 1) * PART, load_i64(frame + LAST) + 1))
        parts = load_i64(head + H.PARTS)
        for i in range(queries):
            target = load_i64(head + H.PARTIAL) + ((place + i) * parts + number) * of_part
            store_scalar(target, load_f32(frame + at.peak + 4 * i))
            store_scalar(target + 4, load_f32(frame + at.sum + 4 * i))
            for d in range(0, out_bytes, 64):
                store(target + 64 + d, load_f32x16(frame + at.out + i * out_bytes + d))

    @numba.njit
    def all_parts(frame: int, queries: int, low: int) -> bool:
        """Leaves the outputs, not yet divided, in the scratch memory's total, or in its out where they come from a single part (True)."""
        end = load_i64(frame + LAST) + 1
        if low // PART == (end - 1) // PART:
            _clear(frame + at.peak, frame + at.sum, frame + at.out, queries * out_bytes)
            run(frame, queries, low, end)
            return True
        _clear(frame + at.all_peak, frame + at.all_sum, frame + at.total, queries * out_bytes)
        while low < end:
            border = (low // PART + 1) * PART
            _clear(frame + at.peak, frame + at.sum, frame + at.out, queries * out_bytes)
            run(frame, queries, low, min(border, end))
            for i in range(queries):
                peak, total, out = frame + at.peak + 4 * i, frame + at.sum + 4 * i, frame + at.out + i * out_bytes
                all_peak, all_sum, all_out = frame + at.all_peak + 4 * i, frame + at.all_sum + 4 * i, frame + at.total + i * out_bytes
                _merge(all_peak, all_sum, all_out, load_f32(peak), load_f32(total), out, out_bytes)
            low = border
        return False

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        n_heads = load_i64(args + 16)
        n_kv = load_i64(args + 24)
        group = n_heads // n_kv
        parts = load_i64(head + H.PARTS)
        kv_head = (chunk // parts) % n_kv
        tile = load_i64(head + H.N_TILES) - 1 - chunk // parts // n_kv
        rows = load_i64(head + H.TILES) + 8 * tile
        row0 = i64(load_i32(rows))
        n_queries = i64(load_i32(rows + 4)) * group
        frame = (load_i64(args + 72) + thread * load_i64(args + 80) + 63) & -64
        set_up(args, head, frame, rows, kv_head)
        for base in range(0, n_queries, QUERIES):
            queries = min(n_queries - base, QUERIES)
            gather(args, head, frame, row0, kv_head, base, queries)
            low = max(load_i64(frame + at.seen), 0) // STEP * STEP
            if parts > 1:
                one_part(head, frame, queries, low, chunk % parts, tile * n_heads + kv_head * group + base)
                continue
            peaks, sums, outs = frame + at.all_peak, frame + at.all_sum, frame + at.total
            if all_parts(frame, queries, low):
                peaks, sums, outs = frame + at.peak, frame + at.sum, frame + at.out
            for i in range(queries):
                h = kv_head * group + (base + i) % group
                target = load_i64(args + 32) + (row0 + (base + i) // group) * load_i64(args + 40) + h * dim_v * 4
                peak, total = load_f32(peaks + 4 * i), load_f32(sums + 4 * i)
                _finish(outs + i * out_bytes, peak, total, load_i64(args + 88), h, target, dim_v)

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
        window = load_i64(args + 56)
        low = i64(0)
        if window > 0:
            low = max(position + 1 - window, 0) // STEP * STEP
        state = load_i64(args + 72) + thread * load_i64(args + 80)
        total = state + 64
        for h in range(kv_head * group, (kv_head + 1) * group):
            store_scalar(state, f(MASKED))
            store_scalar(state + 4, f(0.0))
            for d in range(0, out_bytes, 64):
                store(total + d, splat_f32(f(0.0)))
            for number in range(low // PART, position // PART + 1):
                part = load_i64(head + H.PARTIAL) + ((tile * n_heads + h) * parts + number) * of_part
                _merge(state, state + 4, total, load_f32(part), load_f32(part + 4), part + 64, out_bytes)
            target = load_i64(args + 32) + row * load_i64(args + 40) + h * dim_v * 4
            _finish(total, load_f32(state), load_f32(state + 4), load_i64(args + 88), h, target, dim_v)

    return kernel
