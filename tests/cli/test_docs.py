"""docs/cli.md says what the commands say."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_cli_page_is_not_stale(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("cli_docs", repository / "scripts" / "cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (repository / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == module.document(), "run: python scripts/cli_docs.py"
    assert "## localrun run" in written


def test_serve_help_has_the_settings() -> None:
    from typer.testing import CliRunner

    from localrun.cli.main import app

    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "LOCALRUN_KEEP_ALIVE, OLLAMA_KEEP_ALIVE" in shown and "LOCALRUN_MAX_QUEUE, OLLAMA_MAX_QUEUE" in shown
