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
        self._seconds: list[float | None] = [None] * len(self._knots)
        self._per_pairs = 0.0
        self._per_outputs = 0.0

    @property
    def knows_something(self) -> bool:
        return any(s is not None for s in self._seconds)

    def knows(self, rows: int) -> bool:
        """Whether passes of about that many rows have been measured."""
        low, high, _ = self._around(rows)
        return self._seconds[low] is not None or self._seconds[high] is not None

    def predict(self, rows: int, attended: int = 0, outputs: int = 0) -> float:
        """Seconds of a pass with that many rows in all, as far as is known; 0.0 while nothing is."""
        low, high, share = self._around(rows)
        base = self._knot(low) * (1 - share) + self._knot(high) * share
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
        if self._seconds[nearest] is None:
            at_knot = max(1e-7, seconds - self._per_pairs * pairs - self._per_outputs * logits)
            self._seconds[nearest] = at_knot * self._knots[nearest] / rows
            return
        expected = self.predict(rows, attended, outputs)
        error = min(seconds, expected * _SURPRISE) - expected
        step = _RATE * error / ((1 - share) ** 2 + share**2 + pairs**2 + logits**2)
        for knot, weight in ((low, 1 - share), (high, share)):
            if weight and self._seconds[knot] is not None:
                self._seconds[knot] = max(1e-7, self._knot(knot) + step * weight)
        self._per_pairs = max(0.0, self._per_pairs + step * pairs)
        self._per_outputs = max(0.0, self._per_outputs + step * logits)

    def _around(self, rows: int) -> tuple[int, int, float]:
        """The two knots around `rows`, and how far it lies from the first to the second (0..1)."""
        rows = max(1, min(rows, self.max_rows))
        high = next(i for i, k in enumerate(self._knots) if k >= rows)
        if self._knots[high] == rows:
            return high, high, 0.0
        low = high - 1
        return low, high, (rows - self._knots[low]) / (self._knots[high] - self._knots[low])

    def _knot(self, index: int) -> float:
        """What was measured there; else between its measured neighbours; beyond the largest, that one's in proportion (pessimistic)."""
        known = self._seconds[index]
        if known is not None:
            return known
        below = next((i for i in range(index - 1, -1, -1) if self._seconds[i] is not None), None)
        above = next((i for i in range(index + 1, len(self._knots)) if self._seconds[i] is not None), None)
        if below is None:
            return 0.0 if above is None else self._knot(above)
        if above is None:
            return self._knot(below) * self._knots[index] / self._knots[below]
        share = (self._knots[index] - self._knots[below]) / (self._knots[above] - self._knots[below])
        return self._knot(below) * (1 - share) + self._knot(above) * share
