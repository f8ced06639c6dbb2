"""Sends a model to a registry that speaks Ollama's protocol, which is Docker's.

    HEAD  blobs/DIGEST                               200: it is there
    POST  blobs/uploads/?mount=DIGEST&from=REPO      201: taken over from another repository of that registry; 202: where to send it
    PATCH LOCATION   Content-Range: FIRST-LAST       a chunk; the answer says where the next one goes
    PUT   LOCATION?digest=DIGEST                     the blob is complete
    PUT   manifests/TAG                              last, so that whoever pulls finds all of it

Knows the wire; sessions and tokens are registry.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from localrun.errors import BadRequest, LocalrunError, RequestCancelled, Unsupported
from localrun.store import download
from localrun.store.blobs import CHUNK
from localrun.store.download import AGAIN, words
from localrun.store.durable import StorageFailed, storage_errors
from localrun.store.manifests import MANIFEST_TYPE, Manifest
from localrun.store.names import DEFAULT_HOST, Name
from localrun.store.progress import Cancelled, Progress, PullProgress
from localrun.store.registry import Session

if TYPE_CHECKING:
    import httpx

    from localrun.store.store import Store

CHUNK_BYTES = 16 << 20
SIGNED = (DEFAULT_HOST, "ollama.com")
"""Registries that know their users by signatures."""
_STEP = 64 << 10


class UploadFailed(LocalrunError):
    """A registry did not take a model; the message says which step failed and why."""

    status = 502
    code = "upload_failed"


class _Passing(Exception):
    """An answer that another attempt may better."""


def push(store: Store, name: str, progress: Progress, cancelled: Cancelled = lambda: False, *, insecure: bool = False) -> None:
    """Sends the stored model `name` to the registry on its host. What the registry has already is not sent again.

    insecure: plain HTTP is accepted, for names that begin with http://. Raises InvalidName, ModelNotFound, Unsupported (Ollama's own
    registry), UploadFailed (no access, no network, refused), StorageFailed, RequestCancelled.
    """
    wanted = Name.parse(name)
    if wanted.host in SIGNED:
        raise Unsupported(
            f"{wanted.host} takes models only with requests signed by an account's key, which is not supported; push to another registry "
            "(localrun cp MODEL HOST/NAMESPACE/MODEL, then push that name), or move the model with localrun export",
            param="model",
        )
    if wanted.scheme == "http" and not insecure:
        text = f"{wanted.host} was named with http://, which anyone between can change; say insecure to accept that"
        raise BadRequest(text, param="model")
    progress(PullProgress("retrieving manifest"))
    store.get(name)
    _, manifest = store.read(name)
    with Session(wanted) as session:
        upload = _Upload(store, session, wanted, progress, cancelled)
        for digest, size in manifest.blobs.items():
            upload.blob(digest, size)
        progress(PullProgress("pushing manifest"))
        upload.manifest(manifest)
    progress(PullProgress("success"))


class _Upload:
    def __init__(self, store: Store, session: Session, name: Name, progress: Progress, cancelled: Cancelled) -> None:
        self._store = store
        self._session = session
        self._name = name
        self._progress = progress
        self._cancelled = cancelled

    def blob(self, digest: str, size: int) -> None:
        """Until the registry has it. Raises UploadFailed, StorageFailed, RequestCancelled."""

        def say(done: int) -> None:
            self._check()
            self._progress(PullProgress(f"pushing {digest.removeprefix('sha256:')[:12]}", digest, size, done))

        say(0)
        if self._call("HEAD", f"blobs/{digest}", {200, 404}, f"blob {digest[:19]}").status_code == 200:
            say(size)
            return
        location = self._begin(digest)
        sent = 0
        while location and sent < size:
            count = min(CHUNK_BYTES, size - sent)
            location, sent = self._chunk(digest, location, sent, count, say)
            say(sent)
        if location:
            mark = "&" if urlsplit(location).query else "?"
            self._call("PUT", f"{location}{mark}{urlencode({'digest': digest})}", {201, 204}, f"the end of blob {digest[:19]}")
        say(size)

    def manifest(self, manifest: Manifest) -> None:
        self._check()
        where = f"manifests/{self._name.tag}"
        self._call("PUT", where, {200, 201}, "the manifest", {"Content-Type": MANIFEST_TYPE}, manifest.raw)

    def _check(self) -> None:
        if self._cancelled():
            raise RequestCancelled

    def _begin(self, digest: str) -> str:
        """Where the blob's bytes go; empty when the registry took it over from another of its repositories."""
        other = self._elsewhere(digest)
        query = f"?{urlencode({'mount': digest, 'from': other})}" if other else ""
        response = self._call("POST", f"blobs/uploads/{query}", {201, 202}, f"the upload of blob {digest[:19]}")
        if response.status_code == 201 and other:
            return ""
        return self._location(response)

    def _elsewhere(self, digest: str) -> str:
        """Another repository of that registry which has the blob, as far as the models here tell; empty when none does."""
        for name in self._store.manifests.names():
            if name.host == self._name.host and (name.namespace, name.model) != (self._name.namespace, self._name.model):
                try:
                    manifest = self._store.manifests.read(name)
                except LocalrunError:
                    continue
                if manifest is not None and digest in manifest.blobs:
                    return f"{name.namespace}/{name.model}"
        return ""

    def _location(self, response: httpx.Response) -> str:
        location: str = response.headers.get("location", "")
        if not location:
            raise UploadFailed(f"{self._session.host} did not say where to send the model")
        return str(response.url.join(location))

    def _chunk(self, digest: str, location: str, start: int, count: int, say: Callable[[int], None]) -> tuple[str, int]:
        """Sends bytes from `start` on; where the next go, and how many the registry has. After a broken connection it is asked."""
        path = self._store.blobs.path(digest)

        def content() -> Iterator[bytes]:
            with storage_errors("cannot read a blob", path), path.open("rb") as file:
                file.seek(start)
                left = count
                while left:
                    data = file.read(min(CHUNK, left))
                    if not data:
                        raise StorageFailed(f"{path} has become shorter while it was pushed")
                    for at in range(0, len(data), _STEP):
                        say(start + count - left + at)
                        yield data[at : at + _STEP]
                    left -= len(data)

        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{start}-{start + count - 1}",
            "Content-Length": str(count),
        }
        tries = 0
        while True:
            try:
                response = self._once("PATCH", location, {202}, f"blob {digest[:19]}", headers, content)
                return self._location(response), start + count
            except _Passing as error:
                tries += 1
                if tries >= download.TRIES:
                    raise UploadFailed(f"push of blob {digest[:19]}: {error}; push again") from None
                self._wait(tries)
            state = self._call("GET", location, {204}, f"the upload of blob {digest[:19]}")
            found = state.headers.get("range", "0-0").rpartition("-")[2]
            have = int(found) + 1 if found.isdigit() and int(found) else 0
            if have != start:
                if not 0 <= have <= start + count:
                    raise UploadFailed(f"push of blob {digest[:19]}: the registry says that it has {have} bytes; push again")
                return (self._location(state) if state.headers.get("location") else location), have

    def _call(
        self, method: str, url: str, good: set[int], what: str, headers: dict[str, str] | None = None, content: bytes = b""
    ) -> httpx.Response:
        """Again, a few times, while that may help."""
        for attempt in range(1, download.TRIES + 1):
            self._check()
            try:
                return self._once(method, url, good, what, headers, content)
            except _Passing as error:
                if attempt == download.TRIES:
                    raise UploadFailed(f"push of {what}: {error}") from None
                self._wait(attempt)
        raise AssertionError

    def _once(
        self, method: str, url: str, good: set[int], what: str, headers: dict[str, str] | None,
        content: bytes | Callable[[], Iterator[bytes]],
    ) -> httpx.Response:
        """Raises UploadFailed, _Passing."""
        import httpx

        host = self._session.host
        try:
            response = self._session.call(method, url, headers, content)
        except httpx.ConnectError as error:
            raise UploadFailed(f"push of {what}: {host} could not be reached: {words(error)}") from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise _Passing(f"{host}: {words(error)}") from error
        status = response.status_code
        if status in good:
            return response
        text = " ".join(response.text.split())[:200]
        if status in AGAIN:
            raise _Passing(f"{host} answered {status}: {text}")
        if status in (401, 403):
            where = f"{self._name.namespace}/{self._name.model}"
            raise UploadFailed(f"push of {what}: unauthorized: {host} does not let us write to {where} ({status})")
        raise UploadFailed(f"push of {what}: {host} answered {status}: {text}")

    def _wait(self, attempt: int) -> None:
        end = time.monotonic() + download.BACKOFF_S * 2 ** (attempt - 1)
        while time.monotonic() < end:
            self._check()
            time.sleep(min(0.05, download.BACKOFF_S))
