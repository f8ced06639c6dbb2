"""Stop strings in text that arrives in pieces: nothing is given out that may still turn out to be part of one."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Watches a stream of text for the first of several stop strings.

    The one that ends first wins; of those that end together the longest, so that what is given out does not depend on how the text was cut
    into pieces. Text behind it is discarded. Takes time in proportion to the text times the number of stop strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: empty strings are ignored."""
        self._stops = sorted({stop for stop in stops if stop}, key=lambda stop: (-len(stop), stop))
        self._held = ""
        self._matched: str | None = None

    @property
    def held(self) -> str:
        """Text received and not yet given out, because it may begin a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes in `text`; returns what can be shown now, and the stop string if one is complete; from then on always ("", that one)."""
        if self._matched is not None:
            return "", self._matched
        start = len(self._held)
        buffer = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A match that ends in the held part would have been found before.
            at = buffer.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                match = (at + len(stop), at, stop)
                best = match if best is None else min(best, match)
        if best is not None:
            _, at, self._matched = best
            self._held = ""
            return buffer[:at], self._matched
        keep = max((overlap(buffer, stop) for stop in self._stops), default=0)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """What was held back, when the text ends here."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
