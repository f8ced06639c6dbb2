"""The rows of one forward pass as the step header names them (kernels_cpu/head.py): whose token, at which position, with which block table.

Filled anew for each pass, for all spans at once: between two passes, which leave nothing of Python in the caches, every call is slow.
Checks what is filled in, since a wrong number would make a kernel read or write outside its memory. Knows no kernel.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import head
from localrun.kernels_cpu.attention_sizes import TILE_ROWS
from localrun.models.model import BLOCK_TOKENS, Span

Ints = NDArray[np.int32]


class BatchRows:
    """Room for `n` rows; writes the addresses of its arrays into `header`. max_positions: of a sequence, 0: no bound."""

    def __init__(self, n: int, header: NDArray[np.int64], n_vocab: int, max_positions: int) -> None:
        self.token_ids = np.zeros(n, np.int32)
        self.positions = np.zeros(n, np.int32)
        self.output_rows = np.zeros(n, np.int32)
        self._row_tables = np.zeros(n, np.int64)
        self._tiles = np.zeros((n, 2), np.int32)
        self._tables = np.zeros(0, np.int32)
        """Block tables of all spans, one behind the other."""
        self._ones = np.arange(n, dtype=np.int32)
        self._n_vocab, self._max_positions = n_vocab, max_positions
        self.tokens = self.outputs = self.tiles = self.longest = 0
        """Of the last pass: rows, those of them that were asked for, tiles of attention, positions of the longest sequence."""
        for offset, array in (
            (head.TOKEN_IDS, self.token_ids), (head.POSITIONS, self.positions), (head.TABLES, self._row_tables),
            (head.OUTPUT_ROWS, self.output_rows), (head.TILES, self._tiles),
        ):  # fmt: skip
            header[offset // 8] = array.ctypes.data

    def fill(self, spans: list[Span], wanted: list[Ints], n_blocks: int) -> list[int]:
        """Takes the spans; the first row of each. wanted: indices into each span's tokens. Raises ValueError, naming what is wrong."""
        lengths = [len(span.tokens) for span in spans]
        for span, n in zip(spans, lengths, strict=True):
            if n == 0 or span.start < 0 or len(span.block_table) * BLOCK_TOKENS < span.start + n:
                raise ValueError(f"a span of {n} tokens from {span.start} on with {len(span.block_table)} blocks")
            if self._max_positions and span.start + n > self._max_positions:
                raise ValueError(f"a context of {span.start + n} tokens; this model as supported handles {self._max_positions}")
        firsts = [0, *accumulate(lengths)]
        self.tokens = tokens = firsts.pop()
        self.longest = max(span.start + n for span, n in zip(spans, lengths, strict=True))
        np.concatenate([span.tokens for span in spans], out=self.token_ids[:tokens], casting="same_kind")
        self._place_tables(spans, lengths, n_blocks)
        self._place_outputs(wanted, lengths, firsts)
        # A decoder counts from its own beginning.
        starts = [span.start - (span.encoded if span.start else 0) for span in spans]
        if tokens == len(spans):
            self.positions[:tokens] = starts
            self._tiles[:tokens, 0] = self._ones[:tokens]
            self._tiles[:tokens, 1] = 1
            self.tiles = tokens
        else:
            offsets = [start - first for start, first in zip(starts, firsts, strict=True)]
            self.positions[:tokens] = self._ones[:tokens] + np.repeat(np.array(offsets, np.int32), lengths)
            self._place_tiles(lengths, firsts)
        ids = self.token_ids[:tokens]
        if ids.min() < 0 or ids.max() >= self._n_vocab:
            raise ValueError(f"token {int(ids.max())} of a vocabulary of {self._n_vocab}")
        return firsts

    def _place_tables(self, spans: list[Span], lengths: list[int], n_blocks: int) -> None:
        sizes = [len(span.block_table) for span in spans]
        ends = list(accumulate(sizes))
        if ends[-1] > len(self._tables):
            self._tables = np.zeros(2 * ends[-1], np.int32)
        blocks = self._tables[: ends[-1]]
        np.concatenate([span.block_table for span in spans], out=blocks, casting="same_kind")
        if blocks.min() < 0 or blocks.max() >= n_blocks:
            raise ValueError(f"a block table names block {int(blocks.max())} of {n_blocks}")
        address = self._tables.ctypes.data
        where = [address + 4 * (end - size) for end, size in zip(ends, sizes, strict=True)]
        self._row_tables[: self.tokens] = where if self.tokens == len(spans) else np.repeat(where, lengths)

    def _place_outputs(self, wanted: list[Ints], lengths: list[int], firsts: list[int]) -> None:
        counts = [len(asked) for asked in wanted]
        self.outputs = outputs = sum(counts)
        if not outputs:
            return
        rows = self.output_rows[:outputs]
        np.concatenate(wanted, out=rows, casting="same_kind")
        if rows.min() < 0 or (rows >= np.repeat(lengths, counts)).any():
            raise ValueError("an output row outside its span")
        rows += np.repeat(np.array(firsts, np.int32), counts)

    def _place_tiles(self, lengths: list[int], firsts: list[int]) -> None:
        """Up to TILE_ROWS successive rows of a span each."""
        per_span = [-(-n // TILE_ROWS) for n in lengths]
        before = [0, *accumulate(per_span)]
        self.tiles = n = before.pop()
        ends = np.repeat(np.array([first + n for first, n in zip(firsts, lengths, strict=True)], np.int32), per_span)
        origin = [first - TILE_ROWS * skipped for first, skipped in zip(firsts, before, strict=True)]
        starts = self._ones[:n] * TILE_ROWS + np.repeat(np.array(origin, np.int32), per_span)
        self._tiles[:n, 0] = starts
        self._tiles[:n, 1] = np.minimum(ends - starts, TILE_ROWS)
