"""Blobs: files named by the SHA-256 of what they hold.

    ROOT/blobs/sha256-<hex>              content, whole and verified when it got there
    ROOT/localrun/partial/<hex>          beginning of a blob that is being received; kept when that is interrupted
    ROOT/localrun/locks/<hex>.lock       held by whoever receives that blob
    ROOT/localrun/links/<hex>.json       the blob is a link to someone's file: its size and time when it was linked

The first line is Ollama's layout; what is ours lies in a folder of its own, which Ollama leaves alone. Knows nothing of manifests: who
needs a blob is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localrun.errors import BadRequest, DiskFull, DownloadFailed, ModelFileRejected
from localrun.store.durable import StorageFailed, locked, replace_file, storage_errors, sync_folder, write_file
from localrun.store.names import check_digest

CHUNK = 1 << 20
_SPARE = 64 << 20
"""Bytes that a download leaves free on the disk."""


class DigestMismatch(DownloadFailed):
    """What came is not what the digest promised."""

    code = "digest_mismatch"


class BlobWriter:
    """Receives one blob. Made by `Blobs.receive`, which holds the lock; bytes are hashed as they are written."""

    def __init__(self, partial: Path, target: Path, digest: str) -> None:
        self._partial = partial
        self._target = target
        self._digest = digest
        self._hash = hashlib.sha256()
        self._file = partial.open("ab")
        self.offset = 0
        """Bytes received so far, those of earlier attempts included once `resume` has been called."""

    def resume(self, keep: int | None = None, progress: Callable[[int], None] | None = None) -> int:
        """Takes up what an earlier attempt left, at most `keep` bytes of it (None: all); the rest is dropped. Returns `offset`.

        Call it once, before `write`. What is kept is read again to be hashed; `progress` is told how far that is.
        """
        size = self._partial.stat().st_size
        kept = size if keep is None else min(size, keep)
        self._hash = hashlib.sha256()
        self._file.truncate(kept)
        self.offset = 0
        with self._partial.open("rb") as file:
            while self.offset < kept:
                chunk = file.read(min(CHUNK, kept - self.offset))
                if not chunk:
                    break
                self._hash.update(chunk)
                self.offset += len(chunk)
                if progress:
                    progress(self.offset)
        return self.offset

    def write(self, data: bytes) -> None:
        with storage_errors("cannot write the model", self._target.parent):
            self._file.write(data)
        self._hash.update(data)
        self.offset += len(data)

    def flush(self) -> None:
        """Makes the size of the partial file tell how far this is."""
        with storage_errors("cannot write the model", self._target.parent):
            self._file.flush()

    def cut(self, size: int) -> None:
        """Drops what came after the first `size` bytes, and ends this attempt: a later one can resume there."""
        with storage_errors("cannot write the model", self._target.parent):
            self._file.flush()
            self._file.truncate(size)
            self._file.close()

    def commit(self) -> None:
        """Verifies the digest and puts the blob in its place. Raises DigestMismatch, and forgets what came, when it is another's."""
        found = f"sha256:{self._hash.hexdigest()}"
        if found != self._digest:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            raise DigestMismatch(f'digest mismatch, expected "{self._digest}", got "{found}"')
        with storage_errors("cannot write the model", self._target.parent):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            replace_file(self._partial, self._target)

    def settle(self, place: Callable[[str], Path]) -> str:
        """For a blob whose digest was not known: puts it where `place` says that one with the digest it has lies; returns that."""
        found = f"sha256:{self._hash.hexdigest()}"
        with storage_errors("cannot write the model", self._target.parent):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            replace_file(self._partial, place(found))
        return found

    def close(self) -> None:
        # an error here (disk full) was raised by the write before it, or loses bytes that a resume will miss and fetch again
        with contextlib.suppress(OSError):
            self._file.close()


class Composer:
    """Receives a blob whose digest is known only when all of it is there. Made by `Blobs.compose`."""

    def __init__(self, draft: Path) -> None:
        self._draft = draft
        self._hash = hashlib.sha256()
        self._file = draft.open("w+b")
        self.offset = 0

    @property
    def digest(self) -> str:
        """Of what has come so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, data: bytes) -> None:
        with storage_errors("cannot write the model", self._draft):
            self._file.write(data)
        self._hash.update(data)
        self.offset += len(data)

    def settle(self, target: Path) -> None:
        with storage_errors("cannot write the model", target):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            replace_file(self._draft, target)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class Blobs:
    """The blobs under one root. Every digest is checked before it becomes part of a path."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "blobs"
        self._own = root / "localrun"

    def path(self, digest: str) -> Path:
        """Where the blob lies or would lie. Raises BadRequest when `digest` is none."""
        hexadecimal = check_digest(digest).removeprefix("sha256:")
        path = self.folder / f"sha256-{hexadecimal}"
        if os.name != "nt" and not path.exists():
            # how Ollama wrote it before 2024, until it starts again in that folder
            older = self.folder / f"sha256:{hexadecimal}"
            if older.exists():
                return older
        return path

    def partial(self, digest: str) -> Path:
        return self._own / "partial" / check_digest(digest).removeprefix("sha256:")

    def staging(self, digest: str) -> Path:
        """A folder for whatever receiving this blob needs besides; belongs to whoever holds the blob's lock."""
        return self._own / "staging" / check_digest(digest).removeprefix("sha256:")

    def _link_record(self, digest: str) -> Path:
        return self._own / "links" / f"{check_digest(digest).removeprefix('sha256:')}.json"

    def has(self, digest: str, size: int | None = None) -> bool:
        """Whether the blob is there (and, when `size` is given, has that many bytes)."""
        try:
            found = self.path(digest).stat().st_size
        except OSError:
            return False
        return size is None or size == found

    def size(self, digest: str) -> int:
        """Bytes. Raises StorageFailed when the blob is missing."""
        try:
            return self.path(digest).stat().st_size
        except OSError as error:
            raise StorageFailed(f"blob {digest} is missing from the store ({error.strerror}); pull or create the model again") from error

    def read(self, digest: str, limit: int = 16 << 20) -> bytes:
        """All bytes of a small blob. Raises StorageFailed when it is missing, unreadable or larger than `limit`."""
        size = self.size(digest)
        if size > limit:
            raise StorageFailed(f"blob {digest} has {size} bytes where at most {limit} are sensible")
        try:
            return self.path(digest).read_bytes()
        except OSError as error:
            raise StorageFailed(f"blob {digest} cannot be read: {error.strerror}") from error

    def put(self, data: bytes) -> str:
        """Keeps `data` and returns its digest. Writing what is there already costs nothing."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if not self.has(digest, len(data)):
            with storage_errors("cannot write the model", self.folder):
                write_file(self.path(digest), data)
        return digest

    @contextlib.contextmanager
    def lock(self, digest: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Held by whoever brings this blob in. `waiting` as in durable.locked."""
        with locked(self._own / "locks" / f"{check_digest(digest).removeprefix('sha256:')}.lock", waiting):
            yield

    @contextlib.contextmanager
    def receive(self, digest: str, *, fresh: bool = False) -> Iterator[BlobWriter]:
        """A writer for the blob, for whoever holds its `lock`. What was written stays, unless committed, for a later attempt; `fresh` drops
        what an earlier one left."""
        partial = self.partial(digest)
        with storage_errors("cannot write the model", self.folder):
            partial.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                partial.unlink(missing_ok=True)
            target = self.path(digest)
            writer = BlobWriter(partial, target, check_digest(digest))
        try:
            yield writer
        finally:
            writer.close()

    @contextlib.contextmanager
    def compose(self) -> Iterator[Composer]:
        """A writer for a blob that is made here. The blob is there when the block has been left; left by an exception, nothing is."""
        draft = self.draft()
        with storage_errors("cannot write the model", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            writer = Composer(draft)
        try:
            yield writer
            with self.lock(writer.digest):
                writer.settle(self.path(writer.digest))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def draft(self) -> Path:
        """A new name in the folder where `take` takes files from. Whoever makes the file removes it when it comes to nothing."""
        path = self._own / "partial" / f"new-{os.getpid()}-{secrets.token_hex(8)}"
        with storage_errors("cannot write the model", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def take(self, draft: Path, progress: Callable[[int, int], None] | None = None) -> tuple[str, int]:
        """Makes a file that was written under a name from `draft` a blob, by moving it; digest and size."""
        with storage_errors("cannot read the model", draft):
            size = draft.stat().st_size
            digest = _digest_of(draft, size, progress)
        with self.lock(digest), storage_errors("cannot write the model", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._link_record(digest).unlink(missing_ok=True)
            replace_file(draft, self.path(digest))
        return digest, size

    def require_space(self, needed: int) -> None:
        """Raises DiskFull, with both numbers, when `needed` more bytes will not fit."""
        folder = self.folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if needed + _SPARE > free:
            raise DiskFull(f"{needed / 1e9:.1f} GB more are needed on the disk that holds {self.folder}, and {free / 1e9:.1f} GB are free")

    def delete(self, digest: str) -> None:
        """Removes the blob; of one that is a link, only the link. Missing ones are no error."""
        with storage_errors("cannot remove a blob", self.folder):
            self.path(digest).unlink(missing_ok=True)
            self._link_record(digest).unlink(missing_ok=True)

    def drop_partial(self, digest: str) -> None:
        """Forgets what an interrupted attempt left. For whoever holds the lock."""
        with storage_errors("cannot remove a partial download", self._own):
            self.partial(digest).unlink(missing_ok=True)
            shutil.rmtree(self.staging(digest), ignore_errors=True)

    def digests(self) -> Iterator[str]:
        """Of all blobs that are there, in no order. Other files in the folder are passed over."""
        if not self.folder.is_dir():
            return
        for entry in os.scandir(self.folder):
            with contextlib.suppress(BadRequest):
                yield check_digest(entry.name)

    def partials(self) -> list[tuple[str, int]]:
        """Digest and size of each interrupted download."""
        folder = self._own / "partial"
        if not folder.is_dir():
            return []
        found = []
        for entry in os.scandir(folder):
            with contextlib.suppress(BadRequest, OSError):
                found.append((check_digest(f"sha256:{entry.name}"), entry.stat().st_size))
        return sorted(found)

    def drafts(self, age: float) -> list[Path]:
        """What `compose` left when its process was killed: files that nothing has written to for `age` seconds."""
        folder = self._own / "partial"
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.glob("new-*") if time.time() - path.stat().st_mtime >= age)

    # ---- files of other people, taken in without a copy ------------------------------------------------------------------------

    def adopt(self, source: Path, *, copy: bool = False, progress: Callable[[int, int], None] | None = None) -> tuple[str, int]:
        """Takes the file at `source` in: as a clone where the file system makes them, else as a hard link, else as a symbolic link, else
        (or with `copy`) as a copy. Returns digest and size.

        `progress(done, size)` while it is read. A link remembers the file's size and time, so that `unchanged` can tell later.
        Raises StorageFailed when the file cannot be read or changes meanwhile.
        """
        source = source.resolve()
        with storage_errors("cannot read the file", source):
            before = source.stat()
            digest = _digest_of(source, before.st_size, progress)
            after = source.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StorageFailed(f"{source} changed while it was read; try again when nothing writes to it")
        with self.lock(digest):
            if self.has(digest, after.st_size) and self._is_sound(digest):
                return digest, after.st_size
            with storage_errors("cannot write the model", self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                partial = self.partial(digest)
                partial.parent.mkdir(parents=True, exist_ok=True)
                partial.unlink(missing_ok=True)
                record = self._link_record(digest)
                linked = not copy and not _clone(source, partial) and _link(source, partial)
                if linked:
                    facts = {"path": str(source), "size": after.st_size, "mtime_ns": after.st_mtime_ns}
                    write_file(record, json.dumps(facts).encode())
                elif not partial.exists():
                    self.require_space(after.st_size)
                    shutil.copyfile(source, partial)
                if not linked:
                    record.unlink(missing_ok=True)
                replace_file(partial, self.path(digest))
                # a rename between two hard links of one file does nothing, by POSIX
                partial.unlink(missing_ok=True)
        return digest, after.st_size

    def _is_sound(self, digest: str) -> bool:
        try:
            self.unchanged(digest)
        except ModelFileRejected:
            return False
        return True

    def unchanged(self, digest: str) -> None:
        """Raises ModelFileRejected when the blob is a link and the file behind it is gone or is no longer the one that was linked."""
        try:
            record: dict[str, Any] = json.loads(self._link_record(digest).read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise StorageFailed(f"{self._link_record(digest)} cannot be read: {error}; create the model again") from error
        try:
            now = self.path(digest).stat()
        except OSError as error:
            raise ModelFileRejected(f"{record['path']}, which the model was created from, is gone; create the model again") from error
        if (now.st_size, now.st_mtime_ns) != (record["size"], record["mtime_ns"]):
            raise ModelFileRejected(
                f"{record['path']}, which the model was created from, has changed since (it had {record['size']} bytes, now {now.st_size}, "
                "or was written to); create the model again"
            )

    def links(self) -> dict[str, str]:
        """Digest -> path of the file it was linked from."""
        folder = self._own / "links"
        found = {}
        for entry in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            with contextlib.suppress(OSError, ValueError, KeyError):
                found[f"sha256:{entry.stem}"] = str(json.loads(entry.read_bytes())["path"])
        return found

    def verify(self, digest: str, progress: Callable[[int, int], None] | None = None) -> bool:
        """Whether the blob's bytes still are what its name says. Reads all of it. Raises StorageFailed when it is missing or unreadable."""
        path = self.path(digest)
        with storage_errors("cannot read a blob", path):
            return _digest_of(path, path.stat().st_size, progress) == check_digest(digest)


def _digest_of(path: Path, size: int, progress: Callable[[int, int], None] | None) -> str:
    found = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(4 * CHUNK):
            found.update(chunk)
            done += len(chunk)
            if progress:
                progress(done, size)
    return f"sha256:{found.hexdigest()}"


def _clone(source: Path, target: Path) -> bool:
    """A copy that shares its blocks until either is written to (btrfs, xfs and others on Linux). False where that cannot be had."""
    if sys.platform != "linux":
        return False
    import fcntl

    ficlone = 0x40049409  # linux/fs.h
    try:
        with source.open("rb") as old, target.open("xb") as new:
            fcntl.ioctl(new.fileno(), ficlone, old.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def _link(source: Path, target: Path) -> bool:
    """A hard link, or a symbolic one to another disk. False where neither may be made."""
    try:
        os.link(source, target)
    except (OSError, NotImplementedError):
        try:
            target.symlink_to(source)
        except (OSError, NotImplementedError):
            return False
    sync_folder(target.parent)
    return True
