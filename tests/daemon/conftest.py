"""Daemons that tests share: starting one costs a runner process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon import serving
from tests.daemon.serving import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model repeats the last user message: You said "...". Tests may add models; they change no setting."""
    with serving.daemon(tmp_path_factory.mktemp("daemon")) as running:
        yield running
