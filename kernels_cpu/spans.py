"""The rows of one forward pass: writes into the arrays that the step header names what the spans of the pass say. One call before the pass,
since a caller in Python finds none of its own code in the caches then, and every call it makes costs microseconds.
"""

from __future__ import annotations

from typing import Any

import numba

from localrun.kernels_cpu import head as H
from localrun.kernels_cpu.attention_sizes import TILE_ROWS
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.simd import load_i32, load_i64, store_scalar

i32, i64 = numba.int32, numba.int64


def place(isa: Isa) -> Any:
    """Kernel: fills the header's arrays, and says there how many rows, outputs and tiles there are. chunk: how many spans there are.

    args: 0 address of int32: for each span how many tokens it has, the position of the first, how many blocks, how many outputs; then for
    each span its tokens, its blocks and its outputs, 1 values of a token, 2 values of a block, 3 gets the number of values that are none
    of these, or no row of their span.
    """

    @numba.njit
    def outside(value: int, n: int) -> int:
        return i64(value < 0) | i64(value >= n)

    def kernel(args: int, head: int, spans: int, thread: int) -> None:
        sizes = load_i64(args)
        vocabulary = load_i64(args + 8)
        n_blocks = load_i64(args + 16)
        token_ids = load_i64(head + H.TOKEN_IDS)
        positions = load_i64(head + H.POSITIONS)
        tables = load_i64(head + H.TABLES)
        output_rows = load_i64(head + H.OUTPUT_ROWS)
        tiles = load_i64(head + H.TILES)
        at = sizes + 16 * spans
        row = outputs = n_tiles = faults = 0
        for _ in range(spans):
            tokens = i64(load_i32(sizes))
            position = i64(load_i32(sizes + 4))
            blocks = i64(load_i32(sizes + 8))
            asked = i64(load_i32(sizes + 12))
            sizes += 16
            table = at + 4 * tokens
            for i in range(tokens):
                token = load_i32(at + 4 * i)
                faults += outside(i64(token), vocabulary)
                store_scalar(token_ids + 4 * (row + i), token)
                store_scalar(positions + 4 * (row + i), i32(position + i))
                store_scalar(tables + 8 * (row + i), table)
            for i in range(0, tokens, TILE_ROWS):
                store_scalar(tiles + 8 * n_tiles, i32(row + i))
                store_scalar(tiles + 8 * n_tiles + 4, i32(min(tokens - i, TILE_ROWS)))
                n_tiles += 1
            for i in range(blocks):
                faults += outside(i64(load_i32(table + 4 * i)), n_blocks)
            at = table + 4 * blocks
            for i in range(asked):
                inside = i64(load_i32(at + 4 * i))
                faults += outside(inside, tokens)
                store_scalar(output_rows + 4 * outputs, i32(row + inside))
                outputs += 1
            at += 4 * asked
            row += tokens
        store_scalar(head + H.TOKENS, row)
        store_scalar(head + H.OUTPUTS, outputs)
        store_scalar(head + H.N_TILES, n_tiles)
        store_scalar(args + 24, faults)

    return kernel
