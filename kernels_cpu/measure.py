"""What this machine can do at most, measured with kernels of the same make as the real ones: reading memory, and multiplying bytes.

    read: adds up memory that is read once, front to back, prefetched as weights are;
    multiply: integer dot products out of registers and the first-level cache, with the best instruction of the instruction set.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu.fetch import fetcher
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.measure_sizes import accumulators
from localrun.kernels_cpu.simd import load_i32x16, load_i64, load_u8x64, store, store_scalar, tile_store_all, zeros_i32
from localrun.kernels_cpu.token_rows import rows_from


def read(isa: Isa) -> Any:
    """args: address, bytes a chunk (a multiple of 256), address of 64 bytes for each thread; chunk: which part of the memory."""
    fetch = fetcher(64)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        size = load_i64(args + 8)
        at = load_i64(args) + chunk * size
        end = at + size
        a = load_i32x16(at)
        b = load_i32x16(at + 64)
        c = load_i32x16(at + 128)
        d = load_i32x16(at + 192)
        while at < end:
            fetch(at)
            a = a + load_i32x16(at)
            fetch(at + 64)
            b = b + load_i32x16(at + 64)
            fetch(at + 128)
            c = c + load_i32x16(at + 128)
            fetch(at + 192)
            d = d + load_i32x16(at + 192)
            at += 256
        store(load_i64(args + 16) + thread * 64, a + b + c + d)

    return kernel


def multiply(isa: Isa) -> Any:
    """args: rounds a chunk, bytes of scratch for each thread, its address (at least 4 KiB a thread, zeros)."""
    if isa.amx:
        return _multiply_tiles()
    dot = isa.ops.tile_dot4
    count = accumulators(isa)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        scratch = load_i64(args + 16) + thread * load_i64(args + 8)
        acc = zeros_i32(count)
        w = load_u8x64(scratch)
        for i in range(load_i64(args)):
            # Other bytes each time: products of the same ones would be taken out of the loop.
            acc = dot(acc, w, rows_from(scratch + 64 + (i & 7) * 4, 4, count))
        tile_store_all(acc, scratch + 256, 64)

    return kernel


def _multiply_tiles() -> Any:
    from localrun.kernels_cpu.amx import dot_signed_signed, load_config, load_tile, release, store_tile, tile_zero

    @numba.njit  # type: ignore[untyped-decorator]
    def configure(at: int) -> None:
        """Eight tiles of 16 rows of 64 bytes."""
        for i in range(64):
            store_scalar(at + i, numba.uint8(0))
        store_scalar(at, numba.uint8(1))
        for tile in range(8):
            store_scalar(at + 16 + 2 * tile, numba.uint8(64))
            store_scalar(at + 48 + tile, numba.uint8(16))
        load_config(at)

    def kernel(args: int, head: int, chunk: int, thread: int) -> None:
        scratch = load_i64(args + 16) + thread * load_i64(args + 8)
        configure(scratch)
        load_tile(4, scratch + 1024, 64)
        load_tile(5, scratch + 1024, 64)
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
        for _ in range(load_i64(args)):
            dot_signed_signed(0, 4, 5)
            dot_signed_signed(1, 4, 5)
            dot_signed_signed(2, 4, 5)
            dot_signed_signed(3, 4, 5)
        store_tile(0, scratch + 1024, 64)
        store_tile(1, scratch + 1024, 64)
        store_tile(2, scratch + 1024, 64)
        store_tile(3, scratch + 1024, 64)
        release()

    return kernel
