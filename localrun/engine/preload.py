"""What the forkserver imports before any runner starts, so that a runner's life begins with its model and not with its imports.

Imported for its effect only. It starts no thread and opens nothing: what a process is forked from must hold neither.
"""

from __future__ import annotations

import localrun.engine.grammar
import localrun.engine.runner
import localrun.models.load  # noqa: F401
