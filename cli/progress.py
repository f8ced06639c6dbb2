"""The progress of a pull or a create: bars on a terminal, one line for each new status elsewhere. Knows the status objects, not what
causes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localrun.cli.client import CliError, Json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def follow(objects: Iterator[Json], *, quiet: bool = False) -> str:
    """Shows the objects on stderr until they end; the last status. Raises CliError when they end without success."""
    last = ""
    if quiet or not sys.stderr.isatty():
        for item in objects:
            status = str(item.get("status", ""))
            if status != last and not quiet:
                sys.stderr.write(status + "\n")
                sys.stderr.flush()
            last = status
    else:
        with _bars() as bars:
            last = _draw(objects, bars)
    if last != "success":
        raise CliError(f"the daemon stopped before it was done (last it said: {last or 'nothing'})")
    return last


def _draw(objects: Iterator[Json], bars: Progress) -> str:
    """One bar for each digest or step that has a total, a plain line for each other status."""
    tasks: dict[str, TaskID] = {}
    last = ""
    for item in objects:
        status, total = str(item.get("status", "")), item.get("total")
        key = str(item.get("digest") or status)
        if total:
            done = item.get("completed") or 0
            if key not in tasks:
                # what was there before counts as done, not as speed
                tasks[key] = bars.add_task(status, total=total, completed=done)
            bars.update(tasks[key], completed=done, total=total, description=status)
        elif status != last and status != "success" and key not in tasks:
            bars.console.print(status, markup=False, highlight=False)
        last = status
    for task in bars.tasks:
        if last == "success" and task.total is not None:
            bars.update(task.id, completed=task.total)
    return last


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        TaskProgressColumn(),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        expand=True,
    )
