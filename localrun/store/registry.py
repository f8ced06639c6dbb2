"""Models from a registry that speaks Ollama's protocol, which is Docker's: the manifest by name, blobs by digest.

    GET  SCHEME://HOST/v2/NAMESPACE/MODEL/manifests/TAG        401 with a challenge: a token is fetched, once
    GET  SCHEME://HOST/v2/NAMESPACE/MODEL/blobs/DIGEST         by Range, in chunks, several at a time; redirected to a storage as a rule

Chunks land in files of their own and are hashed as they are joined, in order, so an interrupted pull keeps every byte and nothing is
believed before its SHA-256 is. Knows the wire and the blobs; which name a manifest gets is decided in store.py.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from localrun import __version__
from localrun.errors import BadRequest, DownloadFailed, RequestCancelled
from localrun.store.blobs import CHUNK, Blobs, BlobWriter, DigestMismatch
from localrun.store.durable import storage_errors
from localrun.store.manifests import MANIFEST_TYPE, Manifest
from localrun.store.names import Name
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

_POLL_S = 0.1
_LARGEST_MANIFEST = 4 << 20
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


def pull(name: Name, blobs: Blobs, progress: Progress, cancelled: Cancelled, *, insecure: bool = False) -> Manifest:
    """Fetches the manifest of `name` and every blob it needs that is not there yet. Several may ask at once, from several processes: for
    each blob one downloads, the others see it grow, and the next one goes on where a cancelled or killed one stopped.

    insecure: plain HTTP is accepted, for names that begin with http://. Raises DownloadFailed (unknown model, no access, no network),
    BadManifest, DigestMismatch, DiskFull, StorageFailed, RequestCancelled.
    """
    if name.scheme == "http" and not insecure:
        raise BadRequest(f"{name.host} was named with http://, which anyone between can change; say insecure to accept that", param="model")
    with _Session(name) as session:
        manifest = Manifest.parse(session.manifest(), name.short)
        missing = {digest: size for digest, size in manifest.blobs.items() if not blobs.has(digest, size)}
        blobs.require_space(sum(missing.values()) + min((STREAMS + 1) * CHUNK_BYTES, max(missing.values(), default=0)))
        for digest, size in manifest.blobs.items():
            watch = _Watch(digest, size, blobs, progress, cancelled)
            watch.report()
            with blobs.lock(digest, watch.report):
                if not blobs.has(digest, size):
                    _bring(session, digest, size, blobs, watch)
            watch.say(size)
    if missing:
        progress(PullProgress("verifying sha256 digest"))  # it was, as the bytes came; clients wait for the words
    return manifest


class _Watch:
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
        if now - self._last >= _POLL_S:
            self._last = now
            chunks = sum(_length(path) for path in self._staging.glob("*.chunk"))
            self.say(min(self._size, _length(self._partial) + chunks))

    def say(self, completed: int) -> None:
        self._most = max(self._most, completed)
        status = f"pulling {self._digest.removeprefix('sha256:')[:12]}"
        self._progress(PullProgress(status, self._digest, self._size, self._most))


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True)
class _Chunk:
    start: int
    length: int
    path: Path


def _bring(session: _Session, digest: str, size: int, blobs: Blobs, watch: _Watch) -> None:
    """Downloads one blob, for the holder of its lock."""
    for fresh in (False, True):
        if fresh:
            blobs.drop_partial(digest)
        have = _length(blobs.partial(digest))
        with blobs.receive(digest, fresh=fresh) as writer:
            # chunks begin at fixed places; of one that was being appended the file is still there
            start = writer.resume(have if have == size else have // CHUNK_BYTES * CHUNK_BYTES, lambda done: watch.report())
            resumed = start > 0
            if start < size:
                staging = blobs.staging(digest)
                with storage_errors("cannot write the download", staging):
                    staging.mkdir(parents=True, exist_ok=True)
                step = CHUNK_BYTES if session.has_ranges(digest) else size - start
                sizes = [(at, min(step, size - at)) for at in range(start, size, step)]
                chunks = [_Chunk(at, length, staging / f"{at:015}-{length}.chunk") for at, length in sizes]
                resumed |= any(_length(chunk.path) for chunk in chunks)
                _join(session, digest, chunks, writer, watch)
            try:
                writer.commit()
            except DigestMismatch:
                # what an earlier attempt left may be at fault: all over again, once
                if fresh or not resumed:
                    raise
                continue
        break
    shutil.rmtree(blobs.staging(digest), ignore_errors=True)


def _join(session: _Session, digest: str, chunks: list[_Chunk], writer: BlobWriter, watch: _Watch) -> None:
    """Downloads the chunks, several at a time, and appends each to the blob when its turn has come. However this is left, no thread is."""
    stop = _Stop()
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="pull") as pool:
        waiting: list[tuple[_Chunk, Future[None]]] = []
        rest = iter(chunks)
        try:
            while True:
                # a chunk more than there are streams, so that no stream waits for the joining; the disk holds no more than these twice
                while len(waiting) <= STREAMS and (chunk := next(rest, None)) is not None:
                    waiting.append((chunk, pool.submit(_fetch, session, digest, chunk, stop)))
                if not waiting:
                    return
                chunk, future = waiting[0]
                while not future.done():
                    watch.report()
                    stop.wait(_POLL_S / 2)
                    for _, other in waiting:
                        if other.done():
                            other.result()
                future.result()
                _append(chunk, writer, watch)
                waiting.pop(0)
        finally:
            stop.now()


def _append(chunk: _Chunk, writer: BlobWriter, watch: _Watch) -> None:
    with storage_errors("cannot read the download", chunk.path):
        with chunk.path.open("rb") as file:
            while data := file.read(4 * CHUNK):
                writer.write(data)
                watch.report()
        writer.flush()
        chunk.path.unlink()


class _Stop:
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


def _fetch(session: _Session, digest: str, chunk: _Chunk, stop: _Stop) -> None:
    """Fills the chunk's file, from where an earlier attempt left it. Raises DownloadFailed when it brings nothing any more."""
    import httpx

    tries = 0
    while (have := _length(chunk.path)) < chunk.length:
        problem = ""
        try:
            session.read(digest, chunk, have, stop)
        except _Again as error:
            problem = str(error)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            problem = _words(error)
        if stop.wait(0):
            raise RequestCancelled
        if _length(chunk.path) > have:
            tries = 0
            continue
        tries += 1
        if tries >= TRIES:
            raise DownloadFailed(f"{session.host} stopped sending {digest[:19]}: {problem or 'the answer was empty'}; pull again to go on")
        if stop.wait(BACKOFF_S * 2 ** (tries - 1)):
            raise RequestCancelled


class _Again(Exception):
    """An answer that another attempt may better."""


class _Session:
    """One repository of one registry: requests with the token that it wants."""

    def __init__(self, name: Name) -> None:
        import httpx

        self.host = name.host
        self._base = f"{name.scheme}://{name.host}/v2/{name.namespace}/{name.model}"
        self._tag = name.tag
        self._label = name.short
        self._token = ""
        self._token_lock = threading.Lock()
        self._client = httpx.Client(
            timeout=httpx.Timeout(SILENCE_S, connect=10.0),
            limits=httpx.Limits(max_connections=STREAMS + 2),
            follow_redirects=True,
            max_redirects=10,
            headers={"User-Agent": f"localrun/{__version__}", "Accept-Encoding": "identity"},
        )

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def manifest(self) -> bytes:
        """The bytes of the manifest. Raises DownloadFailed."""
        import httpx

        try:
            with self._open(f"manifests/{self._tag}", {"Accept": MANIFEST_TYPE}) as response:
                body = b""
                for data in response.iter_raw():
                    body += data
                    if len(body) > _LARGEST_MANIFEST:
                        raise DownloadFailed(f"pull model manifest: {self.host} sent more than {_LARGEST_MANIFEST} bytes")
        except httpx.TransportError as error:
            raise DownloadFailed(f"pull model manifest: {self.host} could not be reached: {_words(error)}") from error
        except (httpx.TooManyRedirects, httpx.InvalidURL, httpx.DecodingError) as error:
            raise DownloadFailed(f"pull model manifest: {self.host}: {_words(error)}") from error
        except _Again as error:
            raise DownloadFailed(f"pull model manifest: {self.host} answered {error}; try again later") from error
        return body

    def has_ranges(self, digest: str) -> bool:
        """Whether blobs can be fetched in pieces here."""
        import httpx

        try:
            with self._open(f"blobs/{digest}", {"Range": "bytes=0-0"}) as response:
                return response.status_code == 206
        except (httpx.TransportError, _Again):
            # the chunks themselves try again, and say what is wrong
            return True
        except (httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise DownloadFailed(f"{self.host}: {_words(error)}") from error

    def read(self, digest: str, chunk: _Chunk, have: int, stop: _Stop) -> None:
        """Appends to the chunk's file, which has `have` bytes, what one request brings. Raises _Again, DownloadFailed, httpx's errors."""
        first, last = chunk.start + have, chunk.start + chunk.length - 1
        with self._open(f"blobs/{digest}", {"Range": f"bytes={first}-{last}"}) as response, stop.reading(response):
            skip = 0
            if response.status_code == 206:
                said = response.headers.get("content-range", "")
                if not said.startswith(f"bytes {first}-"):
                    raise _Again(f"bytes from {first} were asked for, and {said[:60]!r} came")
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
                    if left == 0:
                        return

    @contextlib.contextmanager
    def _open(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """A streamed answer of status 200 or 206. Raises DownloadFailed for others that mean something, _Again for those that may pass."""
        for attempt in ("without", "with"):
            token = self._token
            sent = headers | ({"Authorization": f"Bearer {token}"} if token else {})
            with self._client.stream("GET", f"{self._base}/{path}", headers=sent) as response:
                if response.status_code == 401 and attempt == "without":
                    self._challenged(response, token)
                    continue
                self._judge(response, path)
                yield response
                return

    def _judge(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if self._base.startswith("https://") and response.url.scheme != "https":
            raise DownloadFailed(f"{self.host} redirected to plain HTTP, which anyone between can change; that is refused")
        if status in (200, 206):
            return
        what = "pull model manifest" if path.startswith("manifests/") else f"pull of blob {path.removeprefix('blobs/')[:19]}"
        if status == 404:
            raise DownloadFailed(f"{what}: file does not exist: {self.host} has no {self._label}")
        if status in (401, 403):
            raise DownloadFailed(f"{what}: unauthorized: {self.host} gives no access to {self._label} ({status})")
        response.read()
        text = " ".join(response.text.split())[:200]
        if status in _AGAIN:
            raise _Again(f"{status}: {text}")
        raise DownloadFailed(f"{what}: {self.host} answered {status}: {text}")

    def _challenged(self, response: httpx.Response, used: str) -> None:
        """Fetches a token as the challenge says. Its realm must lie on the registry itself: elsewhere, whoever can answer for the registry
        once could send us anywhere."""
        header = response.headers.get("www-authenticate", "")
        fields = {key.lower(): value for key, value in _CHALLENGE.findall(header)}
        realm = fields.get("realm", "")
        if not header.lower().startswith("bearer") or not realm:
            raise DownloadFailed(f"unauthorized: {self.host} wants another kind of login than is supported: {header[:80]!r}")
        where, here = urlsplit(realm), urlsplit(self._base)
        if (where.scheme, where.netloc.lower()) != (here.scheme, here.netloc.lower()):
            raise DownloadFailed(f"unauthorized: {self.host} wants a token from {where.netloc[:80]!r}, another host; that is refused")
        with self._token_lock:
            if self._token != used:
                return  # another thread has just fetched one
            asked = {key: fields[key] for key in ("service", "scope") if key in fields}
            answer = self._client.get(realm, params=asked, follow_redirects=False)
            try:
                body = answer.json() if answer.status_code == 200 else None
                token = body.get("token") or body.get("access_token") if isinstance(body, dict) else None
            except ValueError:
                token = None
            if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
                raise DownloadFailed(f"unauthorized: {self.host} gives no token for {self._label} ({answer.status_code})")
            self._token = token


def _words(error: Exception) -> str:
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
