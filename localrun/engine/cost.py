"""How long a forward pass takes, learnt from the passes that were made. Knows rows and seconds only; uses no NumPy.

seconds = f(rows) + c * attended + d * outputs, where f is piecewise linear between powers of two, `attended` is the number of (row, earlier
position) pairs and `outputs` the number of rows whose logits are wanted. All parts are corrected after each pass by its error, in
proportion to how much each took part (normalised least mean squares), so the model follows a machine that gets slower or faster, needs no
history, and cannot diverge.
"""

from __future__ import annotations

_PAIRS = 100_000.0
"""Pairs that count as one unit of the attention term: about a 64-row chunk in a context of 1,500."""
_OUTPUTS = 16.0
"""Rows with logits that count as one unit."""
_RATE = 0.3
_SURPRISE = 4.0
"""A pass this many times slower than expected is counted as so much slower only: a page fault or a suspended laptop is not a trend."""


class CostModel:
    """Knots at 1, 2, 4, ... max_rows rows. Before the first pass nothing is known, and `first_chunk` rows are the guess."""

    def __init__(self, max_rows: int, first_chunk: int = 64) -> None:
        self.max_rows = max_rows
        self.first_chunk = min(first_chunk, max_rows)
        self._knots = [1]
        while self._knots[-1] < max_rows:
            self._knots.append(min(2 * self._knots[-1], max_rows))
        self._measured: list[float | None] = [None] * len(self._knots)
        self._seconds = [0.0] * len(self._knots)
        """At every knot: what was measured, or what follows from the knots around it."""
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
        """How many rows without logits, each attending to `per_row` positions, can join a pass so that it stays within `seconds`.

        0 when not even one can; at most `most`.
        """
        if not self.knows_something:
            return min(most, max(0, self.first_chunk - rows))
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(rows + middle, attended + middle * per_row, outputs) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

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
            step = _RATE * error / ((1 - share) ** 2 + share**2 + pairs**2 + logits**2)
            for knot, weight in ((low, 1 - share), (high, share)):
                before = self._measured[knot]
                if weight and before is not None:
                    self._measured[knot] = max(1e-7, before + step * weight)
            self._per_pairs = max(0.0, self._per_pairs + step * pairs)
            self._per_outputs = max(0.0, self._per_outputs + step * logits)
        self._seconds = [self._at_knot(i) for i in range(len(self._knots))]

    def _around(self, rows: int) -> tuple[int, int, float]:
        """The two knots around `rows`, and how far it lies from the first to the second (0..1)."""
        rows = max(1, min(rows, self.max_rows))
        low = rows.bit_length() - 1
        if rows == self.max_rows:
            low = len(self._knots) - 1
        if self._knots[low] == rows:
            return low, low, 0.0
        high = low + 1
        return low, high, (rows - self._knots[low]) / (self._knots[high] - self._knots[low])

    def _at_knot(self, index: int) -> float:
        """What was measured there; else between its measured neighbours; beyond the largest, that one's in proportion (pessimistic)."""
        measured = self._measured[index]
        if measured is not None:
            return measured
        known = [(self._knots[i], seconds) for i, seconds in enumerate(self._measured) if seconds is not None]
        rows = self._knots[index]
        below = max((k for k in known if k[0] < rows), default=None)
        above = min((k for k in known if k[0] > rows), default=None)
        if below is None:
            return 0.0 if above is None else above[1]
        if above is None:
            return below[1] * rows / below[0]
        share = (rows - below[0]) / (above[0] - below[0])
        return below[1] * (1 - share) + above[1] * share
