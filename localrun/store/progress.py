"""What a long operation on models tells whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PullProgress:
    """One line of a pull's or a create's progress. The words of `status` are those that clients of Ollama's API parse."""

    status: str
    digest: str | None = None
    """`sha256:<hex>` of what is moving."""
    total: int | None = None
    """Bytes."""
    completed: int | None = None
    """Bytes so far; never less than the line before said."""


Progress = Callable[[PullProgress], None]
Cancelled = Callable[[], bool]
