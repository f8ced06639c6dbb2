"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from localrun.models import memory


def test_available_is_what_psutil_says() -> None:
    assert memory.available() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("content", ["", "MemFree: 5 kB\n", "MemAvailable:\n", "MemAvailable: much\n"])
def test_where_the_file_does_not_say_it_psutil_does(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: content)
    known = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: known)
    assert memory.available() == known.available


def test_the_first_number_is_taken_in_kilobytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 90 kB\nMemAvailable:  70 kB\nMemFree: 5 kB\n")
    assert memory.available() == 70 * 1024
