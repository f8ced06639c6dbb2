"""Durations as people write them for this field's tools: Go's `5m`, `1h30m`, `-1m`, and plain seconds.

Knows the two notations and nothing of who uses them.
"""

from __future__ import annotations

import math
import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)

FOREVER = math.inf


def parse_duration(text: str) -> float:
    """Seconds in `text`: Go's syntax (https://pkg.go.dev/time#ParseDuration), or a number without a unit, taken as seconds.

    Raises ValueError, one line, for anything else. The sign is kept: what a negative duration means is the caller's business.
    """
    stripped = text.strip()
    if _PLAIN.fullmatch(stripped):
        return float(stripped)
    sign = -1.0 if stripped.startswith("-") else 1.0
    rest = stripped[1:] if stripped[:1] in ("+", "-") else stripped
    seconds = 0.0
    at = 0
    while at < len(rest):
        part = _PART.match(rest, at)
        if part is None:
            break
        seconds += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    if not rest or at < len(rest):
        raise ValueError(f"{text!r} is no duration: write seconds (300) or units h, m, s, ms as in 5m or 1h30m")
    return sign * seconds


def parse_keep_alive(value: object) -> float:
    """Seconds a model stays loaded, from a JSON value or a setting: 0 unloads at once, anything negative is `FOREVER`.

    Numbers are seconds, strings are `parse_duration`'s. Raises ValueError, one line, for other types and for numbers that are not finite.
    """
    if isinstance(value, str):
        seconds = parse_duration(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.nan
        if not math.isfinite(seconds):
            raise ValueError(f"keep_alive must be a finite number of seconds, not {value}")
    else:
        raise ValueError(f"keep_alive must be a number of seconds or a duration such as \"5m\", not {type(value).__name__}")
    return FOREVER if seconds < 0 else seconds
