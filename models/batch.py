"""The rows of one forward pass as the step header names them (kernels_cpu/head.py): whose token, at which position, with which block table.

Filled anew for each pass by a kernel (kernels_cpu/spans.py), to which all that the spans say goes in one piece. Checks what is filled in,
since a wrong number would make a kernel read or write outside its memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import head
from localrun.kernels_cpu.attention_sizes import TILE_ROWS
from localrun.kernels_cpu.library import brief
from localrun.kernels_cpu.spec import KernelSpec
from localrun.models.model import BLOCK_TOKENS, Span

KERNEL = KernelSpec("spans", "place")
Ints = NDArray[np.int32]


class BatchRows:
    """Room for `most` rows, of `spare` behind which kernels may read; writes the addresses of its arrays into `header`.

    address: of the kernel; max_positions: of a sequence, 0: no bound.
    """

    def __init__(self, address: int, header: NDArray[np.int64], most: int, spare: int, n_vocab: int, max_positions: int) -> None:
        self.token_ids = np.zeros(most + spare, np.int32)
        self.positions = np.zeros(most + spare, np.int32)
        self.output_rows = np.zeros(most + spare, np.int32)
        self._row_tables = np.zeros(most + spare, np.int64)
        self._tiles = np.zeros((most + spare, 2), np.int32)
        self._most, self._n_vocab, self._max_positions = most, n_vocab, max_positions
        self.tokens = self.outputs = self.tiles = self.longest = 0
        """Of the last pass: rows, those of them that were asked for, tiles of attention, positions of the longest sequence."""
        for offset, array in (
            (head.TOKEN_IDS, self.token_ids), (head.POSITIONS, self.positions), (head.TABLES, self._row_tables),
            (head.OUTPUT_ROWS, self.output_rows), (head.TILES, self._tiles),
        ):  # fmt: skip
            header[offset // 8] = array.ctypes.data
        self._place = brief(address)
        self._given = np.zeros(0, np.int32)
        """What the spans say, see the kernel. Block tables are read from there in the pass, too."""
        self._args = np.zeros(4, np.int64)
        self._args[1] = n_vocab
        self._addresses = self._args.ctypes.data, header.ctypes.data

    def fill(self, spans: list[Span], wanted: list[Ints], n_blocks: int) -> list[int]:
        """Takes the spans; the first row of each. wanted: indices into each span's tokens. Raises ValueError, naming what is wrong."""
        firsts: list[int] = []
        sizes: list[int] = []
        arrays: list[Ints] = []
        tokens = blocks = outputs = tiles = longest = 0
        for span, asked in zip(spans, wanted, strict=True):
            n, held, m = len(span.tokens), len(span.block_table), len(asked)
            end = span.start + n
            if n == 0 or span.start < 0 or held * BLOCK_TOKENS < end:
                raise ValueError(f"a span of {n} tokens from {span.start} on with {held} blocks")
            if self._max_positions and end > self._max_positions:
                raise ValueError(f"a context of {end} tokens; this model as supported handles {self._max_positions}")
            if m > n:
                raise ValueError(f"{m} outputs of a span of {n} tokens")
            firsts.append(tokens)
            # A decoder counts from its own beginning.
            sizes += n, span.start - (span.encoded if span.start else 0), held, m
            arrays += span.tokens, span.block_table, asked
            tokens, blocks, outputs, tiles, longest = tokens + n, blocks + held, outputs + m, tiles - (-n // TILE_ROWS), max(longest, end)
        if not 0 < tokens <= self._most:
            raise ValueError(f"a batch of {tokens} rows; 1 to {self._most} are possible")
        self.tokens, self.outputs, self.tiles, self.longest = tokens, outputs, tiles, longest
        size = len(sizes) + tokens + blocks + outputs
        if size > len(self._given):
            self._given = np.zeros(2 * size, np.int32)
            self._args[0] = self._given.ctypes.data
        np.concatenate([np.array(sizes, np.int32), *arrays], out=self._given[:size], casting="same_kind")
        self._args[2] = n_blocks
        self._place(*self._addresses, len(spans), 0)
        if self._args[3]:
            raise ValueError(self._fault(spans, wanted, n_blocks))
        return firsts

    def _fault(self, spans: list[Span], wanted: list[Ints], n_blocks: int) -> str:
        """What the kernel found to be wrong."""
        for span, asked in zip(spans, wanted, strict=True):
            if len(bad := _outside(span.tokens, self._n_vocab)):
                return f"token {bad[0]} of a vocabulary of {self._n_vocab}"
            if len(bad := _outside(span.block_table, n_blocks)):
                return f"a block table names block {bad[0]} of {n_blocks}"
            if len(bad := _outside(asked, len(span.tokens))):
                return f"output row {bad[0]} of a span of {len(span.tokens)} tokens"
        raise AssertionError("spans have changed during the pass")


def _outside(values: Ints, n: int) -> Ints:
    """Those that are not in range(n)."""
    return values[(values < 0) | (values >= n)]
