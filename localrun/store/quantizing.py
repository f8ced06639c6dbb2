"""Quantizes a blob into a new one, in a process of its own: the daemon loads no NumPy. Knows that program's arguments and its lines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from localrun.errors import BadRequest, RequestCancelled
from localrun.quantize.mixes import file_type
from localrun.store.blobs import Blobs
from localrun.store.progress import Cancelled, Progress, PullProgress

_POLL_S = 0.1


def checked_type(text: str) -> str:
    """The type that `text` means, in any case. Raises BadRequest listing the types."""
    try:
        return file_type(text)
    except ValueError as error:
        raise BadRequest(str(error), param="quantize") from None


def quantize(blobs: Blobs, digest: str, was: str, name: str, progress: Progress, cancelled: Cancelled) -> tuple[str, int]:
    """Digest and size of a blob that holds the model of blob `digest` as type `name`. was: its type now, for people.

    Raises BadRequest (a source that cannot be quantized), DiskFull, StorageFailed, RequestCancelled.
    """
    status = f"quantizing {was} model to {name}"
    blobs.require_space(blobs.size(digest))
    draft = blobs.draft()
    try:
        _run(blobs.path(digest), draft, name, lambda done, total: progress(PullProgress(status, None, total, done)), cancelled)
        return blobs.take(draft)
    finally:
        for left in draft.parent.glob(f".{draft.name}.*"):
            left.unlink(missing_ok=True)
        draft.unlink(missing_ok=True)


def _run(source: Path, target: Path, name: str, told: Callable[[int, int], None], cancelled: Cancelled) -> None:
    command = [sys.executable, "-m", "localrun.quantize", str(source), str(target), name, "--json"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        lines: list[str] = []
        reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
        reader.start()
        try:
            while child.poll() is None:
                if cancelled():
                    raise RequestCancelled
                if lines:
                    last = json.loads(lines[-1])
                    told(last["done"], last["total"])
                reader.join(_POLL_S)
                if not reader.is_alive():
                    child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            reader.join()
        if child.returncode:
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
            raise BadRequest(said[-1][:400] if said else f"the quantizing process ended with status {child.returncode}", param="quantize")
        if lines:
            last = json.loads(lines[-1])
            told(last["done"], last["total"])


def _read(child: subprocess.Popen[str], lines: list[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines[:] = [line]
