"""Runs single kernels on an emulated card, on NumPy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_cpu import head
from localrun.kernels_cpu.activation_sizes import SUPER
from localrun.kernels_cpu.formats import FORMATS
from localrun.kernels_gpu.device import Launch
from localrun.kernels_gpu.emulator import Emulator, compiler
from localrun.kernels_gpu.layout import CARD_TYPES, PLANES
from localrun.kernels_gpu.source import WARP_ROWS_THREADS, Kernel

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to emulate a card with")
GUARD = np.float32(-12345)
"""What memory holds that a kernel must not touch."""

Floats = NDArray[np.float32]


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def room(n: int) -> int:
    return (n + 15) // 16 * 16


class Card:
    """An emulated card, with short words for what tests do."""

    def __init__(self, seed: int = 1) -> None:
        self.device = Emulator(Path(os.environ["LOCALRUN_CACHE"]), seed=seed)

    def put(self, array: NDArray[np.generic]) -> int:
        """Address of a copy of the array; 0 for an empty one."""
        if not array.size:
            return 0
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        address = self.device.allocate(len(data))
        self.device.upload(address, data)
        return address

    def get(self, address: int, like: NDArray[np.generic]) -> NDArray[np.generic]:
        """What lies there, shaped as `like`."""
        out = np.empty(like.nbytes, np.uint8)
        self.device.download(address, out)
        return out.view(like.dtype).reshape(like.shape)

    def call(self, kernel: Kernel, grid: tuple[int, int, int], args: Iterable[int], words: dict[int, int]) -> None:
        """words: of the step header, by byte offset."""
        header = np.zeros(head.SIZE // 8, np.int64)
        for offset, value in words.items():
            header[offset // 8] = value
        self.device.prepare([kernel])
        self.device.run([Launch(kernel, grid, self.put(np.array([*args, *[0] * 8], np.int64)), self.put(header))])

    def row_args(self, x: Floats, fill: float = 0.0) -> tuple[int, int]:
        """(address, stride) of rows with room up to a multiple of 16."""
        rows = np.full((len(x), room(x.shape[1])), fill, np.float32)
        rows[:, : x.shape[1]] = x
        return self.put(rows), rows.shape[1] * 4

    def rows(self, address: int, tokens: int, n: int) -> Floats:
        """The rows, whose room must not have been written."""
        got = self.get(address, np.empty((tokens, room(n)), np.float32)).astype(np.float32)
        assert (got[:, n:] == 0).all(), "values behind the row were written"
        return got[:, :n]

    def quantized(self, x: Floats, kind: str) -> tuple[int, int, int]:
        """(address, stride, bytes) of the rows in the form that matmuls of one kind read."""
        tokens, n = x.shape
        address, row_stride = self.row_args(x)
        if kind == "f":
            return address, row_stride, tokens * row_stride
        stride = {"256": n // 256 * SUPER, "32": (n + 63) // 64 * 64 + n // 32 * 28}[kind]
        stride = -(-stride // 64) * 64
        to = self.device.allocate(tokens * stride)
        readers = [0] * 8
        at = ("256", "32").index(kind)
        readers[2 * at : 2 * at + 2] = [to, stride]
        self.call(Kernel("norm"), (tokens, 1, 1), [address, row_stride, n, 0, 0, 0, 0, 0, 0, *readers, 0], {head.TOKENS: tokens})
        return to, stride, tokens * stride

    def planes(self, type_id: int, rows: NDArray[np.uint8]) -> list[int]:
        card_type = CARD_TYPES[FORMATS[type_id].name]
        blocks = np.ascontiguousarray(rows).reshape(-1, FORMATS[type_id].block_bytes)
        addresses = [self.put(plane) for plane in card_type.planes(blocks)]
        return addresses + [0] * (PLANES - len(addresses))


def matmul_kernel(type_name: str, bucket: int, rows: int, tokens: int) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel and grid for that many activations at a time; bucket 0: tiles."""
    struct = CARD_TYPES[type_name].struct
    if CARD_TYPES[type_name].is_float:
        n = bucket or 8
        return Kernel("floats", (struct, n), WARP_ROWS_THREADS), (-(-rows // 32), -(-tokens // n), 1)
    if not bucket:
        return Kernel("tiles", (struct,)), (-(-rows // 64), -(-tokens // 32), 1)
    per_warp = 1 if bucket == 8 else 2
    return Kernel("matvec", (struct, bucket, per_warp), WARP_ROWS_THREADS), (-(-rows // (4 * per_warp)), 1, 1)


def matmul(
    card: Card, type_id: int, rows: NDArray[np.uint8], x: Floats, bucket: int, *, bias: Floats | None = None, add_to: Floats | None = None
) -> Floats:
    """W x: float32 (tokens, R). Fails when what lies behind a row of the output is touched."""
    card_type = CARD_TYPES[FORMATS[type_id].name]
    tokens, n = x.shape
    address, stride, _ = card.quantized(x, card_type.kind)
    out, out_stride = card.row_args(np.full((tokens, len(rows)), GUARD, np.float32) if add_to is None else add_to)
    kernel, grid = matmul_kernel(FORMATS[type_id].name, bucket, len(rows), tokens)
    args = [
        *card.planes(type_id, rows), n // card_type.block, len(rows), address, stride, out, out_stride,
        card.put(bias) if bias is not None else 0, int(add_to is not None), head.TOKENS // 8,
    ]  # fmt: skip
    card.call(kernel, grid, args, {head.TOKENS: tokens})
    return card.rows(out, tokens, len(rows))
