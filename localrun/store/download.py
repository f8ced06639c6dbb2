"""Brings a blob in from the network: ranges of it in chunks, several at a time, hashed as they are joined.

Chunks land in files of their own, so an interrupted transfer keeps every byte and nothing is believed before its SHA-256 is. Where the
bytes come from is a `Source`: a registry (registry.py), or a file on a web server (hub.py).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localrun import __version__
from localrun.errors import DownloadFailed, RequestCancelled
from localrun.store.bandwidth import Bandwidth
from localrun.store.blobs import CHUNK, Blobs, BlobWriter, DigestMismatch
from localrun.store.durable import storage_errors
from localrun.store.progress import Cancelled, Progress, PullProgress

if TYPE_CHECKING:
    import httpx

CHUNK_BYTES = 64 << 20
STREAMS = 4
"""Chunks under way at once."""
TRIES = 6
"""Attempts at one chunk that bring no byte, before the pull is given up."""
BACKOFF_S = 1.0
"""Before the second attempt; doubled for each one after it."""
SILENCE_S = 30.0
"""A connection that brings nothing for so long is begun again."""

POLL_S = 0.1
AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Statuses that another attempt may better."""


class Again(Exception):
    """An answer that another attempt may better."""


class Source:
    """Where a blob can be read by ranges. Subclasses say how a request for one is made."""

    host = ""
    """For messages."""
    bounds: tuple[Bandwidth, ...] = ()
    """Kept while blobs are read."""

    def open_blob(self, digest: str, headers: dict[str, str]) -> contextlib.AbstractContextManager[httpx.Response]:
        """A streamed answer of status 200 or 206. Raises DownloadFailed for others that mean something, Again for those that may pass."""
        raise NotImplementedError

    def has_ranges(self, digest: str) -> bool:
        """Whether blobs can be fetched in pieces here."""
        import httpx

        try:
            with self.open_blob(digest, {"Range": "bytes=0-0"}) as response:
                return response.status_code == 206
        except (httpx.TransportError, Again):
            # the chunks themselves try again, and say what is wrong
            return True
        except (httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise DownloadFailed(f"{self.host}: {words(error)}") from error

    def read(self, digest: str, chunk: Chunk, have: int, stop: Stop) -> None:
        """Appends to the chunk's file, which has `have` bytes, what one request brings. Raises Again, DownloadFailed, httpx's errors."""
        first, last = chunk.start + have, chunk.start + chunk.length - 1
        with self.open_blob(digest, {"Range": f"bytes={first}-{last}"}) as response, stop.reading(response):
            skip = 0
            if response.status_code == 206:
                said = response.headers.get("content-range", "")
                if not said.startswith(f"bytes {first}-"):
                    raise Again(f"bytes from {first} were asked for, and {said[:60]!r} came")
            else:
                skip = first
            left = chunk.length - have
            with storage_errors("cannot write the download", chunk.path), chunk.path.open("ab") as file:
                # no chunk size: httpx would keep back, and lose with the connection, what does not fill one
                for data in response.iter_raw():
                    if stop.wait(0):
                        raise RequestCancelled
                    piece = data[skip : skip + left]
                    skip = max(0, skip - len(data))
                    file.write(piece)
                    file.flush()
                    left -= len(piece)
                    self._wait(len(data), stop)
                    if left == 0:
                        return

    def _wait(self, count: int, stop: Stop) -> None:
        """Waits as long as the bounds ask for after `count` more bytes. Raises RequestCancelled."""
        seconds = max((bound.spend(count) for bound in self.bounds), default=0.0)
        if seconds and stop.wait(seconds):
            raise RequestCancelled


def http_client() -> httpx.Client:
    """With the timeouts, connections and headers of a download."""
    import httpx

    return httpx.Client(
        timeout=httpx.Timeout(SILENCE_S, connect=10.0),
        limits=httpx.Limits(max_connections=STREAMS + 2),
        follow_redirects=True,
        max_redirects=10,
        headers={"User-Agent": f"localrun/{__version__}", "Accept-Encoding": "identity"},
    )


def bring_all(source: Source, wanted: dict[str, int], blobs: Blobs, progress: Progress, cancelled: Cancelled) -> None:
    """Brings in those of `wanted` (digest -> size) that are not there yet. Several may ask at once, from several processes: for each blob
    one downloads, the others see it grow, and the next one goes on where a cancelled or killed one stopped.

    Raises DownloadFailed, DigestMismatch, DiskFull, StorageFailed, RequestCancelled.
    """
    missing = {digest: size for digest, size in wanted.items() if not blobs.has(digest, size)}
    blobs.require_space(sum(missing.values()) + min((STREAMS + 1) * CHUNK_BYTES, max(missing.values(), default=0)))
    for digest, size in wanted.items():
        watch = Watch(digest, size, blobs, progress, cancelled)
        watch.report()
        with blobs.lock(digest, watch.report):
            if not blobs.has(digest, size):
                bring(source, digest, size, blobs, watch)
        watch.say(size)
    if missing:
        progress(PullProgress("verifying sha256 digest"))  # it was, as the bytes came; clients wait for the words


class Watch:
    """Tells how far a blob is, which everybody can read off the disk: what is joined, and the chunks that wait to be."""

    def __init__(self, digest: str, size: int, blobs: Blobs, progress: Progress, cancelled: Cancelled) -> None:
        self._digest = digest
        self._size = size
        self._partial = blobs.partial(digest)
        self._staging = blobs.staging(digest)
        self._progress = progress
        self._cancelled = cancelled
        self._most = 0
        self._last = 0.0

    def report(self) -> None:
        """Called often. Raises RequestCancelled when nobody wants the model any more."""
        if self._cancelled():
            raise RequestCancelled
        now = time.monotonic()
        if now - self._last >= POLL_S:
            self._last = now
            chunks = sum(length_of(path) for path in self._staging.glob("*.chunk"))
            self.say(min(self._size, length_of(self._partial) + chunks))

    def say(self, completed: int) -> None:
        self._most = max(self._most, completed)
        status = f"pulling {self._digest.removeprefix('sha256:')[:12]}"
        self._progress(PullProgress(status, self._digest, self._size, self._most))


def length_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True)
class Chunk:
    start: int
    length: int
    path: Path


def bring_unverified(source: Source, key: str, size: int, blobs: Blobs, progress: Progress, cancelled: Cancelled) -> str:
    """Brings in a file whose digest nobody has told; returns the one that it has. `key`, a digest's look-alike, names it until then."""
    blobs.require_space(size + min((STREAMS + 1) * CHUNK_BYTES, size))
    watch = Watch(key, size, blobs, progress, cancelled)
    with blobs.lock(key, watch.report):
        digest = bring(source, key, size, blobs, watch, verify=False)
    watch.say(size)
    return digest


def bring(source: Source, digest: str, size: int, blobs: Blobs, watch: Watch, *, verify: bool = True) -> str:
    """Downloads one blob, for the holder of its lock; returns its digest, which is another than `digest` only if that is not verified."""
    for fresh in (False, True):
        if fresh:
            blobs.drop_partial(digest)
        have = length_of(blobs.partial(digest))
        with blobs.receive(digest, fresh=fresh) as writer:
            # chunks begin at fixed places; of one that was being appended the file is still there
            start = writer.resume(have if have == size else have // CHUNK_BYTES * CHUNK_BYTES, lambda done: watch.report())
            resumed = start > 0
            if start < size:
                staging = blobs.staging(digest)
                with storage_errors("cannot write the download", staging):
                    staging.mkdir(parents=True, exist_ok=True)
                step = CHUNK_BYTES if source.has_ranges(digest) else size - start
                sizes = [(at, min(step, size - at)) for at in range(start, size, step)]
                chunks = [Chunk(at, length, staging / f"{at:015}-{length}.chunk") for at, length in sizes]
                resumed |= any(length_of(chunk.path) for chunk in chunks)
                _join(source, digest, chunks, writer, watch)
            if not verify:
                digest_found = writer.settle(blobs.path)
                break
            try:
                writer.commit()
                digest_found = digest
            except DigestMismatch:
                # what an earlier attempt left may be at fault: all over again, once
                if fresh or not resumed:
                    raise
                continue
        break
    shutil.rmtree(blobs.staging(digest), ignore_errors=True)
    return digest_found


def _join(source: Source, digest: str, chunks: list[Chunk], writer: BlobWriter, watch: Watch) -> None:
    """Downloads the chunks, several at a time, and appends each to the blob when its turn has come. However this is left, no thread is."""
    stop = Stop()
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="pull") as pool:
        waiting: list[tuple[Chunk, Future[None]]] = []
        rest = iter(chunks)
        try:
            while True:
                # a chunk more than there are streams, so that no stream waits for the joining; the disk holds no more than these twice
                while len(waiting) <= STREAMS and (chunk := next(rest, None)) is not None:
                    waiting.append((chunk, pool.submit(_fetch, source, digest, chunk, stop)))
                if not waiting:
                    return
                chunk, future = waiting[0]
                while not future.done():
                    watch.report()
                    stop.wait(POLL_S / 2)
                    for _, other in waiting:
                        if other.done():
                            other.result()
                future.result()
                _append(chunk, writer, watch)
                waiting.pop(0)
        finally:
            stop.now()


def _append(chunk: Chunk, writer: BlobWriter, watch: Watch) -> None:
    with storage_errors("cannot read the download", chunk.path):
        with chunk.path.open("rb") as file:
            while data := file.read(4 * CHUNK):
                writer.write(data)
                watch.report()
        writer.flush()
        chunk.path.unlink()


class Stop:
    """Tells threads that read from the network to end, and wakes those that wait for bytes."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def now(self) -> None:
        with self._lock:
            self._event.set()
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    @contextlib.contextmanager
    def reading(self, response: httpx.Response) -> Iterator[None]:
        stream = response.extensions.get("network_stream")
        connection = stream.get_extra_info("socket") if stream is not None else None
        with self._lock:
            if self._event.is_set():
                raise RequestCancelled
            if connection is not None:
                self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


def _fetch(source: Source, digest: str, chunk: Chunk, stop: Stop) -> None:
    """Fills the chunk's file, from where an earlier attempt left it. Raises DownloadFailed when it brings nothing any more."""
    import httpx

    tries = 0
    while (have := length_of(chunk.path)) < chunk.length:
        problem = ""
        try:
            source.read(digest, chunk, have, stop)
        except Again as error:
            problem = str(error)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            problem = words(error)
        if stop.wait(0):
            raise RequestCancelled
        if length_of(chunk.path) > have:
            tries = 0
            continue
        tries += 1
        if tries >= TRIES:
            raise DownloadFailed(f"{source.host} stopped sending {digest[:19]}: {problem or 'the answer was empty'}; pull again to go on")
        if stop.wait(BACKOFF_S * 2 ** (tries - 1)):
            raise RequestCancelled


def words(error: Exception) -> str:
    """What a transport error was, on one line."""
    kinds = {
        "ConnectTimeout": "no answer within 10 s",
        "ReadTimeout": f"silence for {SILENCE_S:.0f} s",
        "ConnectError": "no connection",
        "TooManyRedirects": "redirected more than 10 times",
    }
    kind = kinds.get(type(error).__name__, type(error).__name__)
    text = " ".join(str(error).split())[:200]
    return f"{kind} ({text})" if text else kind
