"""The measured speed of memory: taken once, kept, and never made worse by a busy machine."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from localrun.engine.bandwidth import bandwidth


def test_measured_with_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path  # other tests ask for this, too, beside this one: an answer of its own, and the kernels of all
    (cache / "kernels").symlink_to(Path(os.environ["LOCALRUN_CACHE"]) / "kernels")
    first = bandwidth(cache, 1)
    assert 1e8 < first < 1e13
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert bandwidth(cache, 1) == first
    assert bandwidth(cache, 2) == 0.0, "other threads are measured again, which fails here"


def test_an_old_answer_stands_when_a_new_one_is_worse(tmp_path: Path) -> None:
    kept = tmp_path / "bandwidth.json"
    kept.write_text(json.dumps({"threads": 1, "bytes_per_second": 1e15, "at": time.time() - 7200}))
    assert bandwidth(tmp_path, 1) == 1e15
    assert json.loads(kept.read_text())["at"] > time.time() - 600
    kept.write_text("nonsense")
    assert bandwidth(tmp_path, 1) < 1e13
