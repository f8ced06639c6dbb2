"""A machine without a card: found out in one line, and nothing but card.py ever imports CuPy. CuPy itself is a stand-in here."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from localrun.kernels_gpu import card

ROOT = Path(__file__).resolve().parents[2]


def stand_in(driver: int, capabilities: list[int]) -> Any:
    """As much of CuPy as looking for cards touches."""
    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(driverGetVersion=lambda: driver, getDeviceCount=lambda: len(capabilities))
    device = lambda i: types.SimpleNamespace(compute_capability=str(capabilities[i]))  # noqa: E731
    cupy.cuda = types.SimpleNamespace(runtime=runtime, Device=device)  # type: ignore[attr-defined]
    return cupy


@pytest.mark.parametrize(
    ("driver", "capabilities", "said"),
    [(0, [], "no NVIDIA driver"),
     (11080, [86], "too old: it knows CUDA 11.8"),
     (12040, [], "no NVIDIA card"), (12040, [52], "6.1 is needed")],
)  # fmt: skip
def test_why_there_is_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: int, capabilities: list[int], said: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", stand_in(driver, capabilities))
    devices, note = card.find(tmp_path)
    assert not devices and said in note and "\n" not in note


def test_cupy_missing_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert card.find(tmp_path) == ([], "CuPy is not installed (pip install localrun[gpu])")
    broken = stand_in(12040, [90])

    def fails() -> int:
        raise RuntimeError("cudaErrorUnknown: something\nmore lines")

    broken.cuda.runtime.getDeviceCount = fails
    monkeypatch.setitem(sys.modules, "cupy", broken)
    assert card.find(tmp_path) == ([], "CUDA cannot be used: cudaErrorUnknown: something")


def test_only_card_py_imports_cupy() -> None:
    folders = ("kernels_cpu", "kernels_gpu", "models", "localrun", "cli")
    importing = [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if any(line.strip().startswith(("import cupy", "from cupy")) for line in path.read_text(encoding="utf-8").splitlines())
    ]
    assert importing == ["kernels_gpu/card.py"]
    code = "import sys, localrun.models.load, localrun.engine.runner; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=600, check=False).returncode == 0
