"""What the programs that write model files share: progress as lines of JSON, and errors as one line and an exit status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from localrun.models.errors import ModelFileError

_EVERY_S = 0.1


class Reporter:
    """Prints a line {"done": values, "total": values} now and then, {"note": text} at once; nothing unless `json`."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._said = 0.0

    def told(self, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._said > _EVERY_S:
            self._said = time.monotonic()
            self._line({"done": done, "total": total})

    def note(self, text: str) -> None:
        self._line({"note": text})

    def _line(self, item: dict[str, Any]) -> None:
        if self._as_json:
            sys.stdout.write(json.dumps(item) + "\n")
            sys.stdout.flush()


def run(work: Callable[[int], None], n_threads: int, target: Path) -> int:
    """Calls `work` with the number of threads (0: physical cores); the exit status. What it raises becomes a line on stderr."""
    try:
        work(n_threads or psutil.cpu_count(logical=False) or 1)
    except (ValueError, ModelFileError) as error:
        sys.stderr.write(f"{error}\n")
    except OSError as error:
        sys.stderr.write(f"cannot write {error.filename or target}: {error.strerror}\n")
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    return 1
