"""Sizes, times and columns in words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from localrun.cli.format import ago, duration, parse_time, size, span, table, until

NOW = datetime(2026, 6, 15, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_362_432, "98 MB"), (9_949_999, "9.9 MB"), (9_999_999, "10 MB"),
        (1_117_320_768, "1.1 GB"), (3 * 10**12, "3.0 TB"),
    ],
)  # fmt: skip
def test_size(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "Less than a second"), (1, "1 second"), (59, "59 seconds"), (60, "About a minute"), (119, "About a minute"),
        (120, "2 minutes"), (3599, "59 minutes"), (3600, "About an hour"), (7200, "2 hours"), (86400, "24 hours"), (2 * 86400, "2 days"),
        (13 * 86400, "13 days"),
        (14 * 86400, "2 weeks"), (60 * 86400, "2 months"), (700 * 86400, "23 months"), (731 * 86400, "2 years"),
    ],
)  # fmt: skip
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    "text", ["2026-06-15T11:00:00.123456789Z", "2026-06-15T20:00:00.1+09:00", "2026-06-15T11:00:00Z", "2026-06-15t11:00:00.5z"]
)
def test_times_of_any_precision_and_zone(text: str) -> None:
    when = parse_time(text)
    assert when is not None
    assert abs(when - datetime(2026, 6, 15, 11, tzinfo=UTC)) < timedelta(seconds=1)


def test_ago() -> None:
    assert ago("2026-06-15T09:00:00.123456789Z", NOW) == "3 hours ago"


def test_no_time_at_all() -> None:
    assert ago("0001-01-01T00:00:00Z", NOW) == ago("", NOW) == "Never"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-06-15T12:04:30Z", "4 minutes from now"),
        ("2026-06-15T11:59:59Z", "Stopping..."),
        ("2318-01-01T00:00:00Z", "Forever"),
        ("9999-12-31T23:59:59Z", "Forever"),
        ("0001-01-01T00:00:00Z", "Stopping..."),
    ],
)
def test_until(text: str, words: str) -> None:
    assert until(text, NOW) == words


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0.0µs"), (1_500, "1.5µs"), (12_340_000, "12.3ms"), (4_560_000_000, "4.56s"), (123_400_000_000, "2m3.4s"), (3_723e9, "1h2m3.0s")],
)
def test_duration(ns: float, text: str) -> None:
    assert duration(ns) == text


def test_columns_line_up_for_wide_characters() -> None:
    assert table(("NAME", "SIZE"), [("모델", "1"), ("abcdef", "2")]) == "NAME      SIZE\n모델      1\nabcdef    2\n"
