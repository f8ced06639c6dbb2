"""The script that is run on a machine with a card, run here on the emulated one: its code is right, and it notices what is wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.kernels_gpu.emulator import Emulator
from tests.kernels_gpu.running import needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device() -> Emulator:
    return Emulator(Path(os.environ["LOCALRUN_CACHE"]))


def test_products_are_compared(script: Any, device: Emulator) -> None:
    rng = np.random.default_rng(0)
    weights, x = script.random_rows(rng, "Q4_K", 20, 512), rng.normal(0, 1, (3, 512)).astype(np.float32)
    expected = script.reference.matmul(script.BY_NAME["Q4_K"].id, weights, x)
    assert np.array_equal(script.product(device, "Q4_K", weights, x), expected)
    assert not np.array_equal(script.product(device, "Q4_K", weights, -x), expected)
    assert device.free_bytes() == Emulator(Path(os.environ["LOCALRUN_CACHE"])).free_bytes()


def test_models_are_compared_and_timed(script: Any, device: Emulator, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    script.write_random_model(path, script.TINY)
    found = script.check_logits(path, device, os.environ["LOCALRUN_CACHE"], 20)
    assert found == {"layers_on_card": 2, "same_bits": True, "largest_difference": 0.0}
    times = script.time_model(path, device, os.environ["LOCALRUN_CACHE"], 20, 2)
    assert times["weight_bytes"] > 500_000 and times["decode_tokens_per_second"] > 0
    assert script.copy_bandwidth(device, 1 << 12) > 0


def test_without_a_card_it_says_so(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert script.main() == 2
    assert "CuPy is not installed" in capsys.readouterr().err
