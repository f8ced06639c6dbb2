"""From the command line to the kernels and back: the starter model, a daemon of its own, nothing replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.test_autostart import listeners, port
from tests.conftest import TEST_CACHE

__all__ = ["port"]

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture
def starter(real_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, port: int) -> Iterator[str]:
    """The name of the starter model, in a store that has it, for a daemon that is ended afterwards."""
    real_model("smollm2")
    monkeypatch.setenv("LOCALRUN_MODELS", str(TEST_CACHE / "models"))
    monkeypatch.setenv("LOCALRUN_IDLE_EXIT", "60")
    yield "smollm2"
    for process in listeners(port):
        process.terminate()
        process.wait(120)


def test_starter_answers(starter: str, localrun: Run) -> None:
    done = localrun("run", "--verbose", starter, "What is the capital of France?", timeout=500)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\w{3,}", done.stdout), "no words"
    assert "\x1b" not in done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"^(prompt eval count|eval count): +(\d+) token", done.stderr, re.MULTILINE)}
    assert counts["prompt eval count"] > 10
    assert counts["eval count"] > 1
    loaded = localrun("ps")
    assert loaded.stdout.splitlines()[1].startswith("smollm2:latest")
    assert "100% CPU" in loaded.stdout
    assert localrun("stop", starter).returncode == 0
    assert len(localrun("ps").stdout.splitlines()) == 1
