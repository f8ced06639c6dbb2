"""Models from a registry that speaks Ollama's protocol, which is Docker's: the manifest by name, blobs by digest.

    GET  SCHEME://HOST/v2/NAMESPACE/MODEL/manifests/TAG        401 with a challenge: a token is fetched, once
    GET  SCHEME://HOST/v2/NAMESPACE/MODEL/blobs/DIGEST         by Range, in chunks, several at a time; redirected to a storage as a rule

Knows the wire; how blobs come in is known in download.py, and which name a manifest gets is decided in store.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from localrun.errors import BadRequest, DownloadFailed
from localrun.store.bandwidth import Bandwidth
from localrun.store.blobs import Blobs
from localrun.store.download import AGAIN, Again, Source, bring_all, http_client, words
from localrun.store.manifests import MANIFEST_TYPE, Manifest
from localrun.store.names import Name
from localrun.store.progress import Cancelled, Progress

if TYPE_CHECKING:
    import httpx

_LARGEST_MANIFEST = 4 << 20
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def pull(
    name: Name, blobs: Blobs, progress: Progress, cancelled: Cancelled, *, insecure: bool = False, bounds: tuple[Bandwidth, ...] = ()
) -> Manifest:
    """Fetches the manifest of `name` and every blob it needs that is not there yet. Several may ask at once, from several processes: for
    each blob one downloads, the others see it grow, and the next one goes on where a cancelled or killed one stopped.

    insecure: plain HTTP is accepted, for names that begin with http://. bounds: of the bandwidth, all of which are kept.
    Raises DownloadFailed (unknown model, no access, no network), BadManifest, DigestMismatch, DiskFull, StorageFailed, RequestCancelled.
    """
    if name.scheme == "http" and not insecure:
        raise BadRequest(f"{name.host} was named with http://, which anyone between can change; say insecure to accept that", param="model")
    with Session(name) as session:
        session.bounds = bounds
        manifest = Manifest.parse(session.manifest(), name.short)
        bring_all(session, manifest.blobs, blobs, progress, cancelled)
    return manifest


class Session(Source):
    """One repository of one registry: requests with the token that it wants."""

    def __init__(self, name: Name) -> None:
        self.host = name.host
        self._base = f"{name.scheme}://{name.host}/v2/{name.namespace}/{name.model}"
        self._tag = name.tag
        self._label = name.short
        self._token = ""
        self._token_lock = threading.Lock()
        self._client = http_client()

    def __enter__(self) -> Session:
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
            raise DownloadFailed(f"pull model manifest: {self.host} could not be reached: {words(error)}") from error
        except (httpx.TooManyRedirects, httpx.InvalidURL, httpx.DecodingError) as error:
            raise DownloadFailed(f"pull model manifest: {self.host}: {words(error)}") from error
        except Again as error:
            raise DownloadFailed(f"pull model manifest: {self.host} answered {error}; try again later") from error
        return body

    def call(
        self, method: str, url: str, headers: dict[str, str] | None = None, content: bytes | Callable[[], Iterator[bytes]] = b""
    ) -> httpx.Response:
        """A request that changes something, and its whole answer, whatever its status. url: relative to the repository, or one that the
        registry has sent. content: a function makes the bytes, once for each attempt.

        Raises DownloadFailed when the token that is asked for is not to be had, httpx's errors.
        """
        url = urljoin(f"{self._base}/", url)
        home = (where := urlsplit(url)).netloc.lower() == (here := urlsplit(self._base)).netloc.lower()
        if here.scheme == "https" and where.scheme != "https":
            raise DownloadFailed(f"{self.host} sent us to plain HTTP, which anyone between can change; that is refused")
        for attempt in ("without", "with"):
            token = self._token
            sent = (headers or {}) | ({"Authorization": f"Bearer {token}"} if token and home else {})
            body = content if isinstance(content, bytes) else content()
            response = self._client.request(method, url, headers=sent, content=body, follow_redirects=False)
            if response.status_code == 401 and attempt == "without" and home:
                self._challenged(response, token)
                continue
            break
        return response

    @contextlib.contextmanager
    def open_blob(self, digest: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """See Source."""
        with self._open(f"blobs/{digest}", headers) as response:
            yield response

    @contextlib.contextmanager
    def _open(self, path: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """A streamed answer of status 200 or 206. Raises DownloadFailed for others that mean something, Again for those that may pass."""
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
        if status in AGAIN:
            raise Again(f"{status}: {text}")
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
