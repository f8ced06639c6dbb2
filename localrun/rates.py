"""Bandwidths as people write them: `5M`, `800k`, `1.5G`, plain bytes a second. Knows the notation and nothing of who uses it."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kmg]?)(?:b?(?:/s)?)", re.ASCII | re.IGNORECASE)


def parse_rate(text: str) -> int:
    """Bytes a second: "5M" is 5,000,000, "0" no bound. Raises ValueError, one line, for anything else and for less than 1,000."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no bandwidth; write bytes a second, as in 800k, 5M or 1G")
    rate = round(float(found[1]) * _UNITS[found[2].lower()])
    if rate < 1000 and float(found[1]):
        raise ValueError(f"{text[:40]!r} is less than 1,000 bytes a second; 5M means 5,000,000")
    return rate
