"""Runs single kernels on NumPy arrays, as plan.py and weights.py would call them. Knows their arguments, not what they should give."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import amx_sizes, head, isa
from localrun.kernels_cpu.activation_sizes import MANY, META, SUPER, tile_bytes
from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_cpu.library import KernelLibrary
from localrun.kernels_cpu.shapes import Shape
from localrun.kernels_cpu.sizes import PACKINGS
from localrun.kernels_cpu.spec import KernelSpec

SPARE = 8
"""Rows of activations behind the last that tiles may read."""
GUARD = np.float32(-12345)
"""What memory holds that a kernel must not touch."""

MATRIX = Shape(matrix_from=MANY)
"""Matrix tiles wherever they are possible."""

Floats = NDArray[np.float32]


@functools.cache
def library(name: str) -> KernelLibrary:
    """Kernels of that instruction set, kept from one run of the tests to the next."""
    return KernelLibrary(isa.select(name), Path(os.environ["LOCALRUN_CACHE"]))


def aligned(nbytes: int, fill: int = 0) -> NDArray[np.uint8]:
    """uint8 memory from a multiple of 64 on."""
    whole = np.full(nbytes + 64, fill, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]


def call(name: str, spec: KernelSpec, args: Iterable[int], chunks: int, header: NDArray[np.int64] | None = None, thread: int = 0) -> None:
    """Runs chunks 0 .. chunks - 1 of a kernel, in this thread, the last first: no chunk may need another."""
    words = np.array([*args, *[0] * 8], np.int64)
    state = np.zeros(head.SIZE // 8, np.int64) if header is None else header
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(library(name).address(spec))
    for chunk in reversed(range(chunks)):
        kernel(words.ctypes.data, state.ctypes.data, chunk, thread)


class Quantized:
    """Activations in the form that matmuls of one kind read."""

    def __init__(self, name: str, x: Floats, kind: str) -> None:
        tokens, n = x.shape
        width = -(-n // 16) * 16
        rows = np.zeros((tokens, width), np.float32)
        rows[:, :n] = x
        size = {"256": n // 256 * SUPER, "32": (n + 63) // 64 * 64 + n // 32 * META, "f": width * 4}[kind]
        self.stride = -(-size // 64) * 64
        self.memory = aligned((tokens + SPARE) * self.stride)
        self.tiles = aligned(tile_bytes(kind, n, tokens + SPARE) + 64)
        readers = [0] * 8
        at = ("256", "32", "f").index(kind)
        readers[2 * at : 2 * at + 2] = [self.memory.ctypes.data, self.stride]
        if kind != "f":
            readers[6 + at] = self.tiles.ctypes.data
        header = np.zeros(head.SIZE // 8, np.int64)
        header[head.TOKENS // 8] = tokens
        args = [rows.ctypes.data, width * 4, n, 0, 0, 0, 0, 0, 0, *readers, 0]
        call(name, KernelSpec("elementwise", "norm"), args, tokens, header)

    def row(self, t: int) -> NDArray[np.uint8]:
        return self.memory[t * self.stride : (t + 1) * self.stride]


def packed_weights(name: str, type_id: int, rows: NDArray[np.uint8], n: int) -> NDArray[np.uint8]:
    """Rows of the file (uint8 (R, row bytes)), packed. The padding of the last group is dirty before."""
    packing = PACKINGS[type_id]
    groups = -(-len(rows) // 16)
    target = aligned(groups * packing.group_bytes(n), 0xA5)
    rows = np.ascontiguousarray(rows)
    args = [rows.ctypes.data, rows.shape[1], len(rows), n // packing.block, packing.group_bytes(n), target.ctypes.data, 2]
    call(name, KernelSpec("pack", "pack", (FORMATS[type_id].name,)), args, -(-groups // 2))
    return target


def matmul(
    name: str, type_id: int, rows: NDArray[np.uint8], x: Quantized, tokens: int, n: int, *, packed: bool, bias: Floats | None = None,
    add_to: Floats | None = None, shape: Shape = MATRIX,
) -> Floats:
    """W x for the first `tokens` activations: float32 (tokens, R). Fails when a row of the output behind the last token is touched."""
    packing = PACKINGS[type_id]
    n_rows, groups = len(rows), -(-len(rows) // 16)
    group_bytes = packing.group_bytes(n)
    rows = np.ascontiguousarray(rows)
    weights = packed_weights(name, type_id, rows, n) if packed else rows
    out = np.full((tokens + SPARE, groups * 16), GUARD, np.float32)
    if add_to is not None:
        out[:tokens, :n_rows] = add_to
    extra = np.zeros(groups * 16, np.float32)
    if bias is not None:
        extra[:n_rows] = bias
    unpacked_at = -(-amx_sizes.scratch_bytes() // 64) * 64
    scratch_bytes = unpacked_at + 2 * group_bytes
    scratch = aligned(2 * scratch_bytes)
    header = np.zeros(head.SIZE // 8, np.int64)
    header[head.TOKENS // 8] = tokens
    args = [
        weights.ctypes.data, group_bytes, n // packing.block, n_rows, x.memory.ctypes.data, x.stride, out.ctypes.data, groups * 64, 2,
        extra.ctypes.data if bias is not None else 0, int(add_to is not None), head.TOKENS, 0 if packed else rows.shape[1],
        scratch.ctypes.data, scratch_bytes, unpacked_at, x.tiles.ctypes.data, 2, shape.matrix_from,
        shape.wide_from,
    ]
    call(name, KernelSpec("matmul", "matmul", (FORMATS[type_id].name,)), args, -(-groups // 2), header, thread=1)
    assert (out[tokens:] == GUARD).all(), "a row behind the last token was written"
    return out[:tokens, :n_rows].copy()


def embedding_rows(name: str, type_id: int, rows: NDArray[np.uint8], n: int, tokens: NDArray[np.int32], scale: float = 1.0) -> Floats:
    """Rows of an embedding table by token: float32 (T, n)."""
    out = np.full((len(tokens), -(-n // 16) * 16), GUARD, np.float32)
    header = np.zeros(head.SIZE // 8, np.int64)
    header[head.TOKEN_IDS // 8] = tokens.ctypes.data
    rows = np.ascontiguousarray(rows)
    bits = int(np.float32(scale).view(np.int32))
    args = [rows.ctypes.data, rows.shape[1], n, bits, out.ctypes.data, out.strides[0], 0]
    call(name, KernelSpec("elementwise", "embed", (FORMATS[type_id].name,)), args, len(tokens), header)
    assert (out[:, n:] == GUARD).all(), "values behind the row were written"
    return out[:, :n].copy()
