"""Finds the tile shapes (kernels_cpu/shapes.py) that suit this processor by timing them on a model's own matrices.

Matrices of one shape are multiplied one after the other, each time another one, as in a pass: so they come from where they come from in a
pass, memory or a cache. Two candidates take turns, and the one in use stays unless the other is better by WORTH in the median of pairs and
in almost every pair; whoever disturbs single samples, or all of them, changes nothing. Where the samples of one candidate differ too much
among themselves, nothing is remembered.

`choose` decides and knows no clock, no kernel and no file; `Tuning` gives it times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from math import log

import numpy as np
from numpy.typing import NDArray

from localrun.kernels_cpu import head
from localrun.kernels_cpu.shapes import DEFAULT, MATRIX_FROM, NEVER, QUARTERS, SHARES, Shape
from localrun.kernels_cpu.team import Team, table_of
from localrun.models.program import MATRIX_FROM as MATRIX_FROM_AT
from localrun.models.program import RULES, STEADY, WIDE_FROM, Program

WORTH = 0.95
"""A candidate must take no more than this part of the time."""
PAIRS = 7
AGREEING = 6
"""So many of the pairs must favour the candidate."""
HOPELESS = 3
"""After so many pairs of which none did, no more are made."""
RESTLESS = 1.3
"""Times of one candidate, third quartile over first, from which the machine is too busy to tell anything."""
BUDGET_S = 0.8
"""For all weight types of a model together."""
SAMPLE_BYTES = 6 << 20
"""Of weights that are multiplied in one sample: some times the second-level cache."""
FEWEST_BYTES = 1 << 20
"""Types of which a model has less are not worth timing."""
MOST_MATRICES = 32

Sample = tuple[Shape, int]
"""What `choose` wants to know the seconds of: a shape, and a number of rows."""
ROWS_BY_BAND = tuple((low, high) for low, high in zip(MATRIX_FROM[:-1], (12, 16, 20, 24, 28, 32, 48), strict=True))
"""Rows from `low` on up to the next one's are timed at `high`."""


@dataclass
class Restlessness:
    """How many comparisons were made, and in how many of them the machine was too busy."""

    comparisons: int = 0
    restless: int = 0

    @property
    def most(self) -> bool:
        return self.restless * 2 > self.comparisons


def _ratio(kept: Shape, tried: Shape, rows: int, busy: Restlessness) -> Generator[Sample, float, float]:
    """Time of `tried` over time of `kept`; 1.0 where no difference is certain."""
    first: list[float] = []
    second: list[float] = []
    for i in range(PAIRS):
        for j in (0, 1) if i % 2 == 0 else (1, 0):
            took = yield (tried if j else kept), rows
            (second if j else first).append(took)
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        if i + 1 == HOPELESS and min(ratios) > WORTH and max(ratios) < 1 / WORTH:
            return 1.0
    busy.comparisons += 1
    quarters = [statistics.quantiles(times, n=4) for times in (first, second)]
    if max(q[2] / q[0] for q in quarters) > RESTLESS:
        busy.restless += 1
    middle = statistics.median(ratios)
    for favours, certain in ((sum(r < 1 for r in ratios), middle <= WORTH), (sum(r > 1 for r in ratios), middle >= 1 / WORTH)):
        if favours >= AGREEING and certain:
            return middle
    return 1.0


def choose(*, matrix: bool, n_threads: int, most_rows: int) -> Generator[Sample, float, Shape | None]:
    """Asks for seconds of (shape, rows) and returns the best shape; None where the machine was too busy to say.

    matrix: whether there are matrix instructions; n_threads: that there are; most_rows: that a pass can have.
    """
    busy = Restlessness()
    best = replace(DEFAULT, matrix_from=NEVER)
    if most_rows >= 8:
        if (yield from _ratio(best, replace(best, wide_from=5), 5, busy)) < 1:
            best = replace(best, wide_from=5)
        elif (yield from _ratio(best, replace(best, wide_from=7), 6, busy)) < 1:
            best = replace(best, wide_from=7)
            if (yield from _ratio(best, replace(best, wide_from=NEVER), 8, busy)) < 1:
                best = replace(best, wide_from=NEVER)
    if n_threads > 2:
        taken = {best.members(n_threads): 1.0}
        for quarters in QUARTERS[1:]:
            fewer = replace(best, quarters=quarters)
            if fewer.members(n_threads) not in taken:
                taken[fewer.members(n_threads)] = yield from _ratio(best, fewer, 1, busy)
        least = min(taken, key=lambda members: (taken[members], -members))
        best = next(one for one in (replace(best, quarters=q) for q in QUARTERS) if one.members(n_threads) == least)
    if n_threads > 1:
        for share in SHARES[1:]:
            if (yield from _ratio(best, replace(best, share=share), 1, busy)) == 1:
                break
            best = replace(best, share=share)
    matrix_from = DEFAULT.matrix_from
    if matrix:
        gains = []  # of matrix tiles over plain ones, in each band
        for low, rows in ROWS_BY_BAND:
            if rows > most_rows:
                break
            gains.append(-log((yield from _ratio(best, replace(best, matrix_from=low), rows, busy))))
        # Of the borders between plain and matrix tiles the one that gains most; the usual one where none gains more.
        worth = {MATRIX_FROM[i]: sum(gains[i:]) for i in range(len(gains) + 1)}
        matrix_from = max(worth, key=lambda border: (worth[border], border == DEFAULT.matrix_from))
    return None if busy.most else replace(best, matrix_from=matrix_from)


class Matrices:
    """Multiplies a program's matrices of one type, and of the shape that most of them have, each time the next ones."""

    def __init__(self, program: Program, crew: Team, header: NDArray[np.int64], type_name: str) -> None:
        self._program, self._crew, self._header = program, crew, header
        found: dict[tuple[int, int], list[int]] = {}
        for i, kernel in enumerate(program.kernels):
            if kernel.factory == "matmul" and kernel.params[0] == type_name and program.rule[i] == RULES.index("matmul"):
                found.setdefault((int(program.args[i, 2]), int(program.args[i, 3])), []).append(i)
        self.nbytes = 0
        """Of all of them together."""
        self.matrix = False
        """Whether there are matrix instructions for them."""
        self._at: list[int] = []
        self._next = 0
        if not found:
            return
        size = {shape: -(-shape[1] // 16) * int(program.args[at[0], 1]) for shape, at in found.items()}
        shape = max(found, key=lambda one: size[one] * len(found[one]))
        self.nbytes = size[shape] * len(found[shape])
        self._at = found[shape][:MOST_MATRICES]
        self.matrix = bool(program.args[self._at[0], 16])
        self._each = max(1, min(SAMPLE_BYTES // size[shape], len(self._at)))
        """Matrices of one sample."""
        self._part = min(1.0, SAMPLE_BYTES / size[shape])
        """Of a matrix, where one is more than enough."""
        self._tables = [table_of(self._each) for _ in range(len(self._at) // self._each)]
        for k, table in enumerate(self._tables):
            table[:] = program.table[self._at[k * self._each : (k + 1) * self._each]]
            # One behind the other, as in a pass.
            table[:, 3] = np.maximum(np.arange(self._each) - 1, 0)

    def run(self, shape: Shape, rows: int) -> None:
        """One sample. Leaves the arguments as they were; writes rows of results that the next pass writes anew."""
        program = self._program
        k = self._next = (self._next + 1) % len(self._tables)
        at = self._at[k * self._each : (k + 1) * self._each]
        before = program.args[at]
        try:
            program.args[at, MATRIX_FROM_AT], program.args[at, WIDE_FROM] = shape.matrix_from, shape.wide_from
            self._header[head.TOKENS // 8] = rows
            chunks = program.chunks(rows, 0, 0, 0)[at]
            chunks = np.maximum(1, np.round(chunks * self._part)).astype(np.int64)
            members = shape.members(self._crew.n_threads) if rows == 1 else self._crew.n_threads
            self._crew.run(self._tables[k], chunks, -shape.share * members if rows <= STEADY else 1, members)
        finally:
            program.args[at] = before


class Tuning:
    """Times the weight types of a program of which nothing is known yet, a little at a time and BUDGET_S in all."""

    def __init__(
        self, matrices: Mapping[str, Matrices], n_threads: int, most_rows: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """matrices: by weight type; most_rows: that a pass can have."""
        self.found: dict[str, Shape] = {}
        """By weight type: what has been chosen."""
        self._clock, self._left_s = clock, BUDGET_S
        self._running = self._all(matrices, n_threads, most_rows)

    def step(self, seconds: float) -> bool:
        """Goes on for about that long. False: that was all, or all that there is time for."""
        until = self._clock() + min(seconds, self._left_s)
        began = self._clock()
        more = next(self._running, False)
        while more and self._clock() < until:
            more = next(self._running, False)
        self._left_s -= self._clock() - began
        if not more or self._left_s <= 0:
            self._running.close()
            return False
        return True

    def _all(self, matrices: Mapping[str, Matrices], n_threads: int, most_rows: int) -> Generator[bool, None, None]:
        """One sample at a time, those types first that a pass reads most of."""
        for name, one in sorted(matrices.items(), key=lambda item: -item[1].nbytes):
            choosing = choose(matrix=one.matrix, n_threads=n_threads, most_rows=most_rows)
            try:
                shape, rows = next(choosing)
                one.run(shape, rows)  # not counted: the first look at code and activations
                while True:
                    began = self._clock()
                    one.run(shape, rows)
                    took = self._clock() - began
                    yield True
                    shape, rows = choosing.send(took)
            except StopIteration as stop:
                if stop.value is not None:
                    self.found[name] = stop.value


def tuning_of(program: Program, crew: Team, header: NDArray[np.int64], most_rows: int, known: Iterable[str]) -> Tuning:
    """Of the weight types of a loaded model that are not known yet."""
    missing = {name: Matrices(program, crew, header, name) for name in program.weight_types if name not in known}
    return Tuning({name: one for name, one in missing.items() if one.nbytes >= FEWEST_BYTES}, crew.n_threads, most_rows)
