"""Numbers, times and tables as people read them. Pure functions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

FAR_FUTURE_YEARS = 20
"""An expiry beyond this is how the wire says "never"."""


def size(count: int) -> str:
    """Bytes in decimal units, one decimal below ten: 98 MB, 1.1 GB."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{count} B"


def span(seconds: float) -> str:
    """A length of time in one unit, in words."""
    whole = int(seconds)
    if whole < 1:
        return "Less than a second"
    if whole < 60:
        return f"{whole} second{'s' if whole > 1 else ''}"
    minutes = whole // 60
    if minutes == 1:
        return "About a minute"
    if minutes < 60:
        return f"{minutes} minutes"
    hours = round(seconds / 3600)
    if hours == 1:
        return "About an hour"
    days = hours // 24
    if hours < 48:
        return f"{hours} hours"
    if days < 14:
        return f"{days} days"
    if days < 60:
        return f"{days // 7} weeks"
    return f"{days // 30} months" if days < 730 else f"{days // 365} years"


def parse_time(text: str) -> datetime | None:
    """An RFC 3339 time, of any precision (Python reads six digits of a second, the wire may carry nine); None for no time."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)?", text.strip())
    if not match:
        return None
    base, fraction, zone = match.groups()
    try:
        when = datetime.fromisoformat(f"{base}.{(fraction or '0')[:6]:0<6}{'+00:00' if zone in (None, 'Z', 'z') else zone}")
    except ValueError:
        return None
    return None if when.year < 1971 else when


def ago(text: str, now: datetime | None = None) -> str:
    """"2 hours ago" for an RFC 3339 time."""
    when = parse_time(text)
    if when is None:
        return "Never"
    return f"{span(max(0.0, ((now or datetime.now(UTC)) - when).total_seconds()))} ago"


def until(text: str, now: datetime | None = None) -> str:
    """"4 minutes from now", "Forever", "Stopping..." for the time a model expires."""
    when = parse_time(text)
    if when is None:
        # year 1 and the like mean "not set"; years beyond what datetime holds mean "never"
        return "Forever" if re.match(r"\d{5,}-|9999-", text) else "Stopping..."
    seconds = (when - (now or datetime.now(UTC))).total_seconds()
    if seconds > FAR_FUTURE_YEARS * 365 * 86400:
        return "Forever"
    return f"{span(seconds)} from now" if seconds > 0 else "Stopping..."


def duration(nanoseconds: float) -> str:
    """A measured time: 812.4µs, 12.3ms, 4.56s, 2m3.4s."""
    seconds = nanoseconds / 1e9
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f}µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f}ms"
    if seconds < 60:
        return f"{seconds:.2f}s"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{hours:.0f}h" if hours else "") + f"{minutes:.0f}m{rest:.1f}s"


def width(text: str) -> int:
    """Cells that a terminal uses for the text."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded with four spaces, as people's scripts cut them; with a line end."""
    widths = [max(width(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["".join(cell + " " * (wide - width(cell) + 4) for cell, wide in zip(row, widths)).rstrip() for row in [header, *rows]]
    return "\n".join(lines) + "\n"
