"""Files that survive a crash: written whole or not at all, locked between processes, and failing with one clear line.

Knows the file system of three platforms and nothing of models.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from localrun.errors import DiskFull, LocalrunError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_POLL_S = 0.05


class StorageFailed(LocalrunError):
    """The folder of models could not be read or written."""

    code = "storage_failed"


@contextlib.contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turns an OSError inside into DiskFull or StorageFailed. `what` begins the sentence: "cannot write the model", say."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        if error.errno in _FULL:
            raise DiskFull(f"{what}: no space left on the disk that holds {path}; free some, or set LOCALRUN_MODELS to another") from error
        if error.errno in _FORBIDDEN:
            who = f" (running as user {os.getuid()})" if hasattr(os, "getuid") else ""
            raise StorageFailed(f"{what}: {place} may not be written{who}: {error.strerror}") from error
        raise StorageFailed(f"{what}: {place}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power failure, where the platform can (Windows has no such call and needs none)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot; the rename is still atomic for running programs
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def replace_file(source: Path, target: Path) -> None:
    """Moves a finished file to its name in one step, over what is there. Both lie on one file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    last = time.monotonic() + 5.0
    while True:
        try:
            source.replace(target)
            break
        except PermissionError:
            # on Windows a virus scanner or an indexer may hold either file for a moment
            if os.name != "nt" or time.monotonic() > last:
                raise
            time.sleep(_POLL_S)
    sync_folder(target.parent)


def write_file(target: Path, data: bytes) -> None:
    """Writes `data` so that `target` holds either what it held or all of it, whatever happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_file(draft, target)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None, timeout: float = 60.0) -> Iterator[None]:
    """Holds the lock file `path` inside the block: against other threads and other processes; the system frees it when a holder dies.

    While another holds it, `waiting` is called about 20 times a second and may raise to give up; without it StorageFailed is raised after
    `timeout` seconds. Lock files are left behind: removing one that another has opened would let two holders in.
    """
    with storage_errors("cannot lock the models", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        last = time.monotonic() + timeout
        while True:
            try:
                lock.acquire(timeout=0)
                break
            except Timeout:
                if waiting is not None:
                    waiting()
                elif time.monotonic() > last:
                    raise StorageFailed(f"another process has held {path} for {timeout:.0f} s; is one hanging?") from None
                time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()
