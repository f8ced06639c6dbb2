"""What a plan says about cards: the driver's tool is a stand-in on the PATH."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from localrun.daemon import cards
from localrun.store import catalogue
from localrun.store.plan import CardMemory, cards_plan, plan

GIB = 1 << 30


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA H200, 141000'; echo 'NVIDIA L4, 12'", [("NVIDIA H200", 141000 << 20), ("NVIDIA L4", 12 << 20)]),
        ("echo 'No devices were found'; exit 6", []),
        ("echo 'NVIDIA H200, [N/A]'", []),
    ],
)
def test_cards_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, expected: list[tuple[str, int]]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cards.cards() == expected


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cards.cards() == []


def test_layers_by_free_memory() -> None:
    facts = catalogue.entries()[0].facts
    assert facts is not None
    made = plan(facts, available=64 * GIB, num_ctx=2048)
    n = sum(count for count, *_ in facts.kv)
    assert cards_plan(made, [], -1, True) is None
    large = cards_plan(made, [CardMemory("large", 80 * GIB)], -1, True)
    assert large is not None and large["layers"] == large["of"] == n and large["size_vram"] > facts.tensor_bytes // 2
    small = cards_plan(made, [CardMemory("small", facts.tensor_bytes)], -1, True)
    assert small is not None and small["layers"] < n
    none = cards_plan(made, [CardMemory("large", 80 * GIB)], 0, True)
    assert none is not None and none["layers"] == none["size_vram"] == 0
    without = cards_plan(made, [CardMemory("large", 80 * GIB)], -1, False)
    assert without is not None and without["layers"] == 0 and "CuPy" in without["note"]
