"""KV cache in blocks, and attention over them.

A pool block holds BLOCK = 16 successive positions of one sequence for all layers. Inside it each layer has, at its own offset,

    K  [kv head][dim][16 positions]      one load gives 16 keys' values of one dimension: scores need no horizontal sum
    V  [kv head][16 positions][dim, room up to 16]

float16 or float32. Attention is the online softmax of Milakov and Gimelshein (2018), as in FlashAttention (Dao et al. 2022), in steps of 64
positions; parts of PART positions are computed from scratch and merged in order. Step and part borders lie at multiples of their sizes whatever the
batch, so a row's bits do not depend on how its prompt was cut or what else is computed beside it. K and V are read once for all query
heads of a group and for up to TILE_ROWS rows.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.elementwise import _prepare
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.math import tanh, vexp
from localrun.kernels_cpu.simd import (
    f16_to_f32,
    f32_from_bits,
    fma,
    lanes_below,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    max_f32,
    splat_f32,
    store,
    store_f16,
    store_scalar,
    sum_f32,
    tile_fma,
    tile_load,
    tile_splat_f32,
    tile_store_all,
    vmax,
    where,
    zeros_f32,
)

BLOCK = 16
STEP = 64
PART = 512
TILE_ROWS = 8
QUERIES = 8
"""Query vectors (row x head of the group) that share one read of K and V."""
MASKED = -1e30

f = numba.float32
KV_SIZES = {"f16": 2, "f32": 4}


def layer_block_bytes(n_kv: int, dim: int, dim_v: int, kv_type: str) -> int:
    """Bytes one layer takes in a pool block."""
    return n_kv * BLOCK * (dim + (dim_v + 15) // 16 * 16) * KV_SIZES[kv_type]


def scratch_bytes(dim: int, dim_v: int) -> int:
    """Scratch memory a thread needs for `attention`."""
    wide = (dim_v + 15) // 16 * 16
    return QUERIES * 4 * ((dim + 15) // 16 * 16 + STEP + 2 * wide + 8) + 64


def _reader(kv_type: str) -> Any:
    @numba.njit
    def read(address: int) -> Any:
        if kv_type == "f16":
            return f16_to_f32(load_f16x16(address))
        return load_f32x16(address)

    return read


def _writer(kv_type: str) -> Any:
    """(address, one float): writes it in the cache's type."""

    @numba.njit
    def write(address: int, value: Any) -> None:
        if kv_type == "f16":
            store_f16(address, value)
        else:
            store_scalar(address, value)

    return write


def rope_kv(isa: Isa, kv_type: str) -> Any:
    """Kernel, one row a chunk: norms and rotates the row's query and key heads, scales the queries, writes K and V into the row's block.

    args: 0 q, 1 q stride, 2 k, 3 k stride, 4 v, 5 v stride, 6 query heads, 7 kv heads, 8 dim of q and k, 9 dim of v, 10 q norm weight (0: none),
    11 k norm weight, 12 eps (float bits), 13 dimensions to rotate, 14 offset in the head of the angle table, 15 whether pairs are halves apart,
    16 offset of the layer in a pool block, 17 scale of q (float bits).
    """
    size = KV_SIZES[kv_type]
    write = _writer(kv_type)

    def kernel(args: int, head: int, t: int, thread: int) -> None:
        q = load_i64(args) + t * load_i64(args + 8)
        k = load_i64(args + 16) + t * load_i64(args + 24)
        v = load_i64(args + 32) + t * load_i64(args + 40)
        n_heads = load_i64(args + 48)
        n_kv = load_i64(args + 56)
        dim = load_i64(args + 64)
        dim_v = load_i64(args + 72)
        eps = f32_from_bits(load_i64(args + 96))
        n_rot = load_i64(args + 104)
        halves = load_i64(args + 120)
        scale = f32_from_bits(load_i64(args + 136))
        position = numba.int64(load_i32(load_i64(head + H.POSITIONS) + 4 * t))
        table = load_i64(head + load_i64(args + 112)) + position * n_rot * 4
        for h in range(n_heads):
            _prepare(q + h * dim * 4, dim, load_i64(args + 80), eps, n_rot, table, halves)
        for i in range(n_heads * dim):
            store_scalar(q + i * 4, load_f32(q + i * 4) * scale)
        block = numba.int64(load_i32(load_i64(load_i64(head + H.TABLES) + 8 * t) + 4 * (position >> 4)))
        slot = position & 15
        k_out = load_i64(head + H.KV) + block * load_i64(head + H.KV_BLOCK) + load_i64(args + 128)
        v_out = k_out + n_kv * dim * BLOCK * size
        wide = (dim_v + 15) & -16
        for h in range(n_kv):
            _prepare(k + h * dim * 4, dim, load_i64(args + 88), eps, n_rot, table, halves)
            for i in range(dim):
                write(k_out + ((h * dim + i) * BLOCK + slot) * size, load_f32(k + (h * dim + i) * 4))
            for i in range(dim_v):
                write(v_out + ((h * BLOCK + slot) * wide + i) * size, load_f32(v + (h * dim_v + i) * 4))

    return kernel


def _step(kv_type: str, queries: int, soft_cap: bool) -> Any:
    """One step of 64 positions for `queries` query vectors. State in scratch: q, scores, out (o), then m and l."""
    read = _reader(kv_type)
    size = KV_SIZES[kv_type]

    @numba.njit
    def step(
        q: int, q_bytes: int, scores: int, o: int, o_bytes: int, m: int, positions: int, first: int, last: int, window: int, table: int,
        pool: int, pool_block: int, k_offset: int, v_offset: int, dim: int, wide: int, cap: Any
    ) -> None:
        # 1) scores of 64 keys, 16 at a time
        for b in range(4):
            start = first + b * BLOCK
            acc = zeros_f32(queries)
            if start <= last:
                keys = pool + numba.int64(load_i32(table + 4 * (start >> 4))) * pool_block + k_offset
                for d in range(dim):
                    acc = tile_fma(acc, read(keys + d * BLOCK * size), tile_splat_f32(acc, q + d * 4, q_bytes))
            tile_store_all(acc, scores + b * 64, 256)
        # 2) mask, running maximum and sum
        for i in range(queries):
            row = scores + i * 256
            position = load_i64(positions + 8 * i)
            peak = splat_f32(f(MASKED))
            for b in range(4):
                s = load_f32x16(row + b * 64)
                if soft_cap:
                    s = tanh(s / splat_f32(cap)) * splat_f32(cap)
                start = first + b * BLOCK
                s = where(lanes_below(position + 1 - start), s, splat_f32(f(MASKED)))
                if window > 0:
                    s = where(lanes_below(position + 1 - window - start), splat_f32(f(MASKED)), s)
                store(row + b * 64, s)
                peak = vmax(peak, s)
            old = load_f32(m + i * 8)
            new = max(old, max_f32(peak))
            total = splat_f32(f(0.0))
            for b in range(4):
                p = vexp(load_f32x16(row + b * 64) - splat_f32(new))
                store(row + b * 64, p)
                total = total + p
            fade = vexp(splat_f32(old - new))
            store_scalar(m + i * 8, new)
            faded = max_f32(fade)
            store_scalar(m + i * 8 + 4, fma(load_f32(m + i * 8 + 4), faded, sum_f32(total)))
            for d in range(wide >> 4):
                store(o + i * o_bytes + d * 64, load_f32x16(o + i * o_bytes + d * 64) * fade)
        # 3) values weighted by the probabilities
        n_keys = min(last + 1 - first, STEP)
        for d in range(wide >> 4):
            acc = tile_load(zeros_f32(queries), o + d * 64, o_bytes)
            for b in range((n_keys + 15) >> 4):
                values = pool + numba.int64(load_i32(table + 4 * ((first >> 4) + b))) * pool_block + v_offset + d * 16 * size
                for i in range(min(n_keys - b * 16, 16)):
                    acc = tile_fma(acc, read(values + i * wide * size), tile_splat_f32(acc, scores + (b * 16 + i) * 4, 256))
            tile_store_all(acc, o + d * 64, o_bytes)

    return step


def attention(isa: Isa, kv_type: str, soft_cap: int) -> Any:
    """Kernel: a chunk is one kv head of one tile of rows: softmax(q k) v for all query heads of the group.

    args: 0 q (scaled), 1 q stride, 2 query heads, 3 kv heads, 4 dim, 5 dim of v, 6 out float32, 7 out stride, 8 offset of the layer in a pool block,
    9 window (0: all positions), 10 soft cap (float bits), 11 scratch, 12 scratch bytes a thread, 13 sinks float32 a head (0: none).
    """
    step1, step2, step4, step8 = (_step(kv_type, n, bool(soft_cap)) for n in (1, 2, 4, 8))
    size = KV_SIZES[kv_type]

    @numba.njit
    def part(queries: int, q: int, q_bytes: int, scores: int, o: int, o_bytes: int, m: int, positions: int, low: int, high: int, last: int,
             window: int, table: int, pool: int, pool_block: int, k_offset: int, v_offset: int, dim: int, wide: int, cap: Any) -> None:
        first = low
        while first < high:
            if queries > 4:
                step8(q, q_bytes, scores, o, o_bytes, m, positions, first, last, window, table, pool, pool_block, k_offset, v_offset, dim, wide, cap)
            elif queries > 2:
                step4(q, q_bytes, scores, o, o_bytes, m, positions, first, last, window, table, pool, pool_block, k_offset, v_offset, dim, wide, cap)
            elif queries > 1:
                step2(q, q_bytes, scores, o, o_bytes, m, positions, first, last, window, table, pool, pool_block, k_offset, v_offset, dim, wide, cap)
            else:
                step1(q, q_bytes, scores, o, o_bytes, m, positions, first, last, window, table, pool, pool_block, k_offset, v_offset, dim, wide, cap)
            first += STEP

    @numba.njit
    def start(queries: int, o: int, o_bytes: int, m: int) -> None:
        for i in range(queries):
            store_scalar(m + i * 8, f(MASKED))
            store_scalar(m + i * 8 + 4, f(0.0))
            for d in range(o_bytes >> 6):
                store(o + i * o_bytes + d * 64, splat_f32(f(0.0)))

    @numba.njit
    def merge(queries: int, o: int, m: int, total: int, total_m: int, o_bytes: int) -> None:
        for i in range(queries):
            old, fresh = load_f32(total_m + i * 8), load_f32(m + i * 8)
            new = max(old, fresh)
            a = vexp(splat_f32(old - new))
            b = vexp(splat_f32(fresh - new))
            store_scalar(total_m + i * 8, new)
            store_scalar(total_m + i * 8 + 4, fma(load_f32(total_m + i * 8 + 4), max_f32(a), load_f32(m + i * 8 + 4) * max_f32(b)))
            for d in range(o_bytes >> 6):
                at = i * o_bytes + d * 64
                store(total + at, fma(load_f32x16(total + at), a, load_f32x16(o + at) * b))

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        n_heads = load_i64(args + 16)
        n_kv = load_i64(args + 24)
        dim = load_i64(args + 32)
        dim_v = load_i64(args + 40)
        window = load_i64(args + 72)
        cap = f32_from_bits(load_i64(args + 80))
        sinks = load_i64(args + 104)
        group = n_heads // n_kv
        kv_head = chunk % n_kv
        tile = load_i64(head + H.TILES) + 8 * (chunk // n_kv)
        row0 = numba.int64(load_i32(tile))
        n_queries = numba.int64(load_i32(tile + 4)) * group
        wide = (dim_v + 15) & -16
        q_bytes = ((dim + 15) & -16) * 4
        o_bytes = wide * 4
        q = load_i64(args + 88) + thread * load_i64(args + 96)
        scores = q + QUERIES * q_bytes
        o = scores + QUERIES * STEP * 4
        total = o + QUERIES * o_bytes
        m = total + QUERIES * o_bytes
        total_m = m + QUERIES * 8
        positions = total_m + QUERIES * 8
        pool = load_i64(head + H.KV)
        pool_block = load_i64(head + H.KV_BLOCK)
        k_offset = load_i64(args + 64) + kv_head * dim * BLOCK * size
        v_offset = load_i64(args + 64) + (n_kv * dim + kv_head * wide) * BLOCK * size
        table = load_i64(load_i64(head + H.TABLES) + 8 * row0)
        for base in range(0, n_queries, QUERIES):
            queries = min(n_queries - base, QUERIES)
            for i in range(QUERIES):
                v = min(base + i, n_queries - 1)
                row = row0 + v // group
                store_scalar(positions + 8 * i, numba.int64(load_i32(load_i64(head + H.POSITIONS) + 4 * row)))
                source = load_i64(args) + row * load_i64(args + 8) + (kv_head * group + v % group) * dim * 4
                for d in range(dim):
                    store_scalar(q + i * q_bytes + d * 4, load_f32(source + d * 4))
            last = load_i64(positions + 8 * (queries - 1))
            low = 0
            if window > 0:
                low = max(load_i64(positions) + 1 - window, 0) // STEP * STEP
            start(QUERIES, total, o_bytes, total_m)
            while low <= last:
                border = (low // PART + 1) * PART
                start(QUERIES, o, o_bytes, m)
                part(queries, q, q_bytes, scores, o, o_bytes, m, positions, low, min(border, last + 1), last, window, table, pool, pool_block,
                     k_offset, v_offset, dim, wide, cap)
                merge(queries, o, m, total, total_m, o_bytes)
                low = border
            for i in range(queries):
                v = base + i
                h = kv_head * group + v % group
                norm = load_f32(total_m + i * 8 + 4)
                if sinks:
                    norm = norm + max_f32(vexp(splat_f32(load_f32(sinks + h * 4) - load_f32(total_m + i * 8))))
                inverse = f(1.0) / norm
                target = load_i64(args + 48) + (row0 + v // group) * load_i64(args + 56) + h * dim_v * 4
                for d in range(dim_v):
                    store_scalar(target + d * 4, load_f32(total + i * o_bytes + d * 4) * inverse)

    return kernel
