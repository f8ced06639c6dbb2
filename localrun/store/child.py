"""Runs one of our programs that write model files in a process of its own, since the daemon loads no NumPy. Knows their lines."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from localrun.errors import BadRequest, RequestCancelled
from localrun.store.blobs import Blobs
from localrun.store.progress import Cancelled, Progress, PullProgress

_POLL_S = 0.1


def make_blob(
    blobs: Blobs, module: str, arguments: list[str | Path], status: str, progress: Progress, cancelled: Cancelled, *, param: str
) -> tuple[str, int]:
    """Digest and size of the blob that `python -m module ARGUMENTS` writes; in `arguments` "OUT" stands for the file. status: what its
    progress is called; its notes are passed on. param: the request's field at fault when it fails.

    Raises BadRequest with the program's own line, DiskFull, StorageFailed, RequestCancelled.
    """
    draft = blobs.draft()
    try:
        command = [str(draft) if one == "OUT" else str(one) for one in arguments]
        _run([sys.executable, "-P", "-m", module, *command, "--json"], status, progress, cancelled, param)
        return blobs.take(draft)
    finally:
        for left in draft.parent.glob(f".{draft.name}.*"):
            left.unlink(missing_ok=True)
        draft.unlink(missing_ok=True)


def _run(command: list[str], status: str, progress: Progress, cancelled: Cancelled, param: str) -> None:
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
        reader.start()
        try:
            while reader.is_alive():
                if cancelled():
                    raise RequestCancelled
                reader.join(_POLL_S)
                _tell(lines, status, progress)
            child.wait()
            _tell(lines, status, progress)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            reader.join()
        if child.returncode:
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
            raise BadRequest(said[-1][:400] if said else f"{command[2]} ended with status {child.returncode}", param=param)


def _read(child: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)


def _tell(lines: queue.SimpleQueue[str], status: str, progress: Progress) -> None:
    """Passes on all notes, and of the counts the latest."""
    latest: dict[str, int] = {}
    while not lines.empty():
        item = json.loads(lines.get())
        if "note" in item:
            progress(PullProgress(f"note: {item['note']}"))
        else:
            latest = item
    if latest:
        progress(PullProgress(status, None, latest["total"], latest["done"]))
