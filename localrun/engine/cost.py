"""How long a forward pass takes, learnt from the passes that were made. Knows rows and seconds only; uses no NumPy.

seconds = f(rows) + c * attended + d * outputs, where f is linear between the knots, `attended` is the number of (row, earlier position)
pairs and `outputs` the number of rows whose logits are wanted. f need not rise: kernels change with the number of rows, and 32 rows may
cost less than 24. All parts are corrected after each pass by its error, in proportion to how much each took part (normalised least mean
squares), so the model needs no history and cannot diverge; what lies far from that pass follows a little too, as a machine gets slower or
faster as a whole.

What has not been tried is thought cheap where it is a little larger than what has: such a pass is made soon, and is then known. A model
that expected larger passes to cost in proportion would stay with small ones for ever, where every pass has to read all weights again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf

_PAIRS = 100_000.0
"""Pairs that count as one unit of the attention term: about a 64-row chunk in a context of 1,500."""
_OUTPUTS = 16.0
"""Rows with logits that count as one unit."""
_RATE = 0.3
_DRIFT = 0.05
"""Of a pass's relative error, what is taken for a change of the whole machine's speed."""
_WORTH = 0.02
"""Steps that all cost the same, as those of streams do, need no look at what follows for other sizes each time."""
_SURPRISE = 4.0
"""A pass this many times slower than expected is counted as so much slower only: a page fault or a suspended laptop is not a trend."""
_HOPE = 1.5
"""What has not been tried is thought to cost no more than a pass that has been with so many times fewer rows."""
_SMALL = (1, 2, 3, 4, 6, 8, 9, 12, 15, 16, 24, 31)
"""Where kernels work on 8 or 16 or 32 rows at a time, the first row of the next group may be dear."""


class CostModel:
    """Knots up to max_rows. Before the first pass nothing is known, and `first_chunk` rows are the guess."""

    def __init__(self, max_rows: int, first_chunk: int = 64) -> None:
        self.max_rows = max_rows
        self.first_chunk = min(first_chunk, max_rows)
        self._knots = [rows for rows in _SMALL if rows < max_rows]
        rows = 32
        while rows < max_rows:
            self._knots += [r for r in (rows, rows + rows // 2) if r < max_rows]
            rows *= 2
        self._knots.append(max_rows)
        self._measured: list[float | None] = [None] * len(self._knots)
        self._seconds = [0.0] * len(self._knots)
        """At every knot: what was measured, or what follows from the knots around it."""
        self._moved = 0.0
        """How far, relatively, measurements have moved since all that follows from them was worked out."""
        self._per_pairs = 0.0
        self._per_outputs = 0.0

    @property
    def knows_something(self) -> bool:
        return any(s is not None for s in self._measured)

    def knows(self, rows: int) -> bool:
        """Whether passes of about that many rows have been measured."""
        low, high, _ = self._around(rows)
        return self._measured[low] is not None or self._measured[high] is not None

    def predict(self, rows: int, attended: int = 0, outputs: int = 0) -> float:
        """Seconds of a pass with that many rows in all, as far as is known; 0.0 while nothing is."""
        low, high, share = self._around(rows)
        base = self._seconds[low] * (1 - share) + self._seconds[high] * share
        return base + self._per_pairs * attended / _PAIRS + self._per_outputs * outputs / _OUTPUTS

    def rows_within(self, seconds: float, rows: int, attended: int, outputs: int, per_row: int, most: int) -> int:
        """The most rows without logits, each attending to `per_row` positions, that can join a pass so that it stays within `seconds`: also
        where fewer would not.

        0 when not even one can; at most `most`.
        """
        if not self.knows_something:
            return min(most, max(0, self.first_chunk - rows))

        def fits(more: int) -> bool:
            return self.predict(rows + more, attended + more * per_row, outputs) <= seconds

        edges = [0, *(k - rows for k in self._knots if 0 < k - rows < most), most]
        for low, high in zip(reversed(edges[:-1]), reversed(edges[1:]), strict=True):
            if fits(high):
                return high
            if fits(low + 1):
                low += 1
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if fits(middle) else (low, middle)
                return low
        return 0

    def observe(self, rows: int, attended: int, outputs: int, seconds: float) -> None:
        """A pass was made."""
        if rows < 1:
            return
        low, high, share = self._around(rows)
        nearest = high if share > 0.5 else low
        pairs, logits = attended / _PAIRS, outputs / _OUTPUTS
        if self._measured[nearest] is None:
            at_knot = max(1e-7, seconds - self._per_pairs * pairs - self._per_outputs * logits)
            self._measured[nearest] = at_knot * self._knots[nearest] / rows
        else:
            expected = self.predict(rows, attended, outputs)
            error = min(seconds, expected * _SURPRISE) - expected
            drift = 1.0 + _DRIFT * error / expected
            step = _RATE * error / ((1 - share) ** 2 + share**2 + pairs**2 + logits**2)
            taking_part = {high: share, low: 1 - share}
            for knot, before in enumerate(self._measured):
                if before is not None:
                    weight = taking_part.get(knot)
                    now = before * drift if weight is None else max(1e-7, before + step * weight)
                    self._measured[knot] = now
                    self._seconds[knot] *= now / before
                    self._moved += abs(now / before - drift)
            self._per_pairs = max(0.0, self._per_pairs + step * pairs)
            self._per_outputs = max(0.0, self._per_outputs + step * logits)
            if self._moved < _WORTH:
                return
        self._seconds, self._moved = self._at_knots(), 0.0

    def _around(self, rows: int) -> tuple[int, int, float]:
        """The two knots around `rows`, and how far it lies from the first to the second (0..1)."""
        rows = max(1, min(rows, self.max_rows))
        high = bisect_left(self._knots, rows)
        if self._knots[high] == rows:
            return high, high, 0.0
        low = high - 1
        return low, high, (rows - self._knots[low]) / (self._knots[high] - self._knots[low])

    def _at_knots(self) -> list[float]:
        """What is expected at every knot. Measured: that, but no more than the same rows would take in smaller passes, as measured (that
        many passes can always be made in place of one). Between measured knots: a straight line. Beyond the largest: hopeful.
        Before the smallest: as that.
        """
        expected: list[float] = []
        known: list[tuple[int, float]] = []
        ahead = [(rows, s) for rows, s in zip(self._knots, self._measured, strict=True) if s is not None][::-1]
        far, least_per_row = 0, inf  # how many of the known ones are not close to the knot, and the best of those
        for i, (rows, measured) in enumerate(zip(self._knots, self._measured, strict=True)):
            half = bisect_right(self._knots, rows // 2) - 1
            smaller = {j for j in (i - 1, half) if 0 <= j < i and known}
            most = min((expected[j] * -(-rows // self._knots[j]) for j in smaller), default=inf)
            if measured is not None:
                expected.append(min(measured, most))
                known.append(ahead.pop())
            elif ahead:
                n, s = known[-1] if known else (1, ahead[-1][1])
                share = (rows - n) / max(1, ahead[-1][0] - n)
                expected.append(min(s * (1 - share) + ahead[-1][1] * share, most))
            else:
                while far < len(known) and known[far][0] * _HOPE < rows:
                    least_per_row = min(least_per_row, known[far][1] / known[far][0])
                    far += 1
                close = min((s for _, s in known[far:]), default=inf)
                expected.append(min(close, rows / _HOPE * least_per_row) if known else 0.0)
        return expected
