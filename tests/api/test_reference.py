"""docs/api.md is what the code makes of itself."""

from __future__ import annotations

from pathlib import Path

from localrun.api.reference import api_markdown


def test_the_page_is_not_stale(repository: Path) -> None:
    page = (repository / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == api_markdown(), "run: python -m localrun.api.reference > docs/api.md"
