"""GGUF files on the web: of a Hugging Face repository by the name of a quantization, or by their https address.

    GET  ENDPOINT/api/models/OWNER/REPO/tree/main?recursive=true     the files, with size and SHA-256; pages linked by a Link header
    GET  ENDPOINT/OWNER/REPO/resolve/main/PATH                       a file, by Range; redirected to a storage as a rule

A token, where one is set, goes to the endpoint and to nobody else. Knows addresses and names of files; how blobs come in is known in
download.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from localrun.errors import BadRequest, DownloadFailed
from localrun.store.download import AGAIN, Again, Source, http_client, words
from localrun.store.names import Name

if TYPE_CHECKING:
    import httpx

HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q5_K_S", "Q8_0")
"""What a name without a quantization means: the first of these that there is."""

_QUANT = re.compile(r"(?:^|[-_./])((?:UD-)?(?:IQ|TQ|Q|MXFP|NVFP)\d+(?:_[A-Z0-9]+)*|BF16|F16|FP16|F32)(?=$|[-./])", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_MOST_PAGES = 50
_LARGEST_PAGE = 8 << 20


@dataclass(frozen=True)
class Web:
    """Where Hugging Face is, and who asks."""

    endpoint: str = "https://huggingface.co"
    token: str = ""


@dataclass(frozen=True)
class RemoteFile:
    url: str
    name: str
    """Path in the repository, or the last part of the address."""
    size: int = 0
    """0: not known before it is asked for."""
    digest: str = ""
    """`sha256:<hex>` where the repository or the server says so."""
    version: str = ""
    """The server's word for this state of the file (ETag)."""


@dataclass(frozen=True)
class Choice:
    """One model of a repository: a file, or the parts of one in order."""

    label: str
    """Of its quantization: "Q4_K_M"; the file's name where that says none."""
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class WebSource(Source):
    """Files by address. A context manager."""

    def __init__(self, web: Web, *, insecure: bool = False) -> None:
        """insecure: plain HTTP is accepted for addresses that begin with http://."""
        self._web = web
        self._insecure = insecure
        self._client = http_client()
        self._urls: dict[str, str] = {}

    def __enter__(self) -> WebSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    def offer(self, digest: str, file: RemoteFile) -> None:
        """Says where the blob of that digest is."""
        self._urls[digest] = file.url
        self.host = urlsplit(file.url).netloc

    @contextlib.contextmanager
    def open_blob(self, digest: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """See Source."""
        with self.open(self._urls[digest], headers) as response:
            yield response

    @contextlib.contextmanager
    def open(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """A streamed answer of status 200 or 206. Raises BadRequest for plain HTTP, DownloadFailed, Again, httpx's errors."""
        where, mine = urlsplit(url), urlsplit(self._web.endpoint)
        at_endpoint = (where.scheme, where.netloc.lower()) == (mine.scheme, mine.netloc.lower())
        if where.scheme == "http" and not self._insecure and not at_endpoint:
            text = f"{where.netloc} was named with http://, which anyone between can change; say insecure to accept that"
            raise BadRequest(text, param="model")
        sent = dict(headers)
        if self._web.token and at_endpoint:
            sent["Authorization"] = f"Bearer {self._web.token}"
        with self._client.stream("GET", url, headers=sent) as response:
            self._judge(url, response)
            yield response

    def _judge(self, url: str, response: httpx.Response) -> None:
        status, host = response.status_code, urlsplit(url).netloc
        if url.startswith("https://") and response.url.scheme != "https":
            raise DownloadFailed(f"{host} redirected to plain HTTP, which anyone between can change; that is refused")
        if status in (200, 206):
            return
        response.read()
        text = response.headers.get("x-error-message") or " ".join(response.text.split())
        if status in (401, 403):
            advice = "the token in HF_TOKEN gives no access to it" if self._web.token else "it is private, gated or not there: set HF_TOKEN"
            raise DownloadFailed(f"unauthorized: {host} does not give {urlsplit(url).path} ({status}): {advice}")
        if status == 404:
            raise DownloadFailed(f"file does not exist: {host} has no {urlsplit(url).path}")
        if status in AGAIN:
            raise Again(f"{status}: {text[:200]}")
        raise DownloadFailed(f"{host} answered {status}: {text[:200]}")

    def get(self, url: str, headers: dict[str, str], limit: int) -> tuple[bytes, httpx.Response]:
        """The first `limit` bytes of an answer at most, and the answer. Raises DownloadFailed."""
        import httpx

        host = urlsplit(url).netloc
        try:
            with self.open(url, headers) as response:
                body = bytearray()
                for data in response.iter_raw():
                    body += data
                    if len(body) >= limit:
                        break
                return bytes(body[:limit]), response
        except httpx.TransportError as error:
            raise DownloadFailed(f"{host} could not be reached: {words(error)}") from error
        except (httpx.TooManyRedirects, httpx.InvalidURL, httpx.DecodingError) as error:
            raise DownloadFailed(f"{host}: {words(error)}") from error
        except Again as error:
            raise DownloadFailed(f"{host} answered {error}; try again later") from error

    def head_of(self, file: RemoteFile, count: int) -> tuple[bytes, int]:
        """The first `count` bytes of a file, and the size of all of it. Raises DownloadFailed."""
        body, response = self._head(file, count)
        return body, _length(file, response)

    def seen(self, file: RemoteFile) -> RemoteFile:
        """With size, version and digest, as far as the server tells them. Raises DownloadFailed."""
        _, response = self._head(file, 1)
        told = [one for answer in (*response.history, response) if (one := answer.headers.get("x-linked-etag", "").strip('"'))]
        digest = next((f"sha256:{one}" for one in told if re.fullmatch(r"[0-9a-f]{64}", one)), file.digest)
        return replace(file, size=_length(file, response), digest=digest, version=response.headers.get("etag", "")[:200])

    def _head(self, file: RemoteFile, count: int) -> tuple[bytes, httpx.Response]:
        return self.get(file.url, {"Range": f"bytes=0-{count - 1}"}, count)

    # ---- a repository ---------------------------------------------------------------------------------------------------------

    def choices(self, owner: str, repo: str) -> list[Choice]:
        """The models of a Hugging Face repository, in the order of their names. Raises DownloadFailed."""
        import json

        base = self._web.endpoint.rstrip("/")
        url = f"{base}/api/models/{quote(owner)}/{quote(repo)}/tree/main?recursive=true"
        files: list[RemoteFile] = []
        for _ in range(_MOST_PAGES):
            body, response = self.get(url, {"Accept": "application/json"}, _LARGEST_PAGE)
            try:
                entries = json.loads(body)
                files += [found for entry in entries if (found := _remote_file(base, owner, repo, entry))]
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise DownloadFailed(f"{urlsplit(base).netloc} sent no list of files for {owner}/{repo}") from error
            following = _NEXT.search(response.headers.get("link", ""))
            if not following:
                break
            url = urljoin(url, following[1])
            if not url.startswith(f"{base}/"):
                raise DownloadFailed(f"{urlsplit(base).netloc} sent a list of files that goes on at another host; that is refused")
        return grouped(files)


def _length(file: RemoteFile, response: httpx.Response) -> int:
    said = response.headers.get("content-range", "").rpartition("/")[2] if response.status_code == 206 else ""
    length = said or (response.headers.get("content-length", "") if response.status_code == 200 else "")
    if not length.isdigit():
        raise DownloadFailed(f"{urlsplit(file.url).netloc} does not say how large {file.name} is")
    return int(length)


def _remote_file(base: str, owner: str, repo: str, entry: dict[str, Any]) -> RemoteFile | None:
    path, size, lfs = entry.get("path"), entry.get("size"), entry.get("lfs") or {}
    if entry.get("type") != "file" or not isinstance(path, str) or not path.lower().endswith(".gguf") or type(size) is not int:
        return None
    found = lfs.get("oid", "")
    digest = f"sha256:{found}" if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{64}", found) else ""
    return RemoteFile(f"{base}/{quote(owner)}/{quote(repo)}/resolve/main/{quote(path)}", path, size, digest)


def grouped(files: list[RemoteFile]) -> list[Choice]:
    """Models made of these files: parts are put together, projectors and calibration data left out; incomplete sets of parts too."""
    singles: dict[str, RemoteFile] = {}
    parts: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        stem = file.name[: -len(".gguf")]
        lowered = PurePosixPath(file.name).name.lower()
        if lowered.startswith("mmproj") or "imatrix" in lowered:
            continue
        found = _PART.search(stem)
        if found:
            parts.setdefault((stem[: found.start()], int(found[2])), {})[int(found[1])] = file
        else:
            singles[stem] = file
    sets: list[tuple[str, tuple[RemoteFile, ...]]] = [(stem, (file,)) for stem, file in singles.items()]
    for (stem, count), numbered in parts.items():
        if sorted(numbered) == list(range(1, count + 1)):
            sets.append((stem, tuple(numbered[number] for number in range(1, count + 1))))
    return [Choice(label_of(stem), members) for stem, members in sorted(sets, key=lambda one: one[0].casefold())]


def label_of(stem: str) -> str:
    """The quantization that a file's name tells, in capitals; the name itself where it tells none."""
    found = _QUANT.findall(stem.rpartition("/")[2]) or _QUANT.findall(stem)
    return str(found[-1]).upper().replace("FP16", "F16") if found else stem.rpartition("/")[2]


def choose(choices: list[Choice], tag: str, where: str) -> Choice:
    """The model that `tag` means: a quantization in any case, or a file's name; "latest": the first of PREFERRED, or the only one.

    Raises DownloadFailed, saying what there is, when nothing or more than one thing is meant.
    """
    listed = ", ".join(sorted({choice.label for choice in choices}))
    if not choices:
        raise DownloadFailed(f"{where} has no GGUF files; a repository whose name ends in -GGUF may have them")
    if tag == "latest":
        for label in PREFERRED:
            fitting = [choice for choice in choices if choice.label == label]
            if fitting:
                return _only(fitting, label, where)
        if len(choices) == 1:
            return choices[0]
        raise DownloadFailed(f"{where} has several models; name one of {listed}, as in {where}:{choices[0].label}")
    wanted = tag.casefold().removesuffix(".gguf")
    fitting = [choice for choice in choices if choice.label.casefold() == wanted]
    fitting = fitting or [choice for choice in choices if _stem(choice).casefold() == wanted]
    if not fitting:
        raise DownloadFailed(f"{where} has no {tag}; it has {listed}")
    return _only(fitting, tag, where)


def _stem(choice: Choice) -> str:
    return _PART.sub("", PurePosixPath(choice.files[0].name).name[: -len(".gguf")])


def _only(fitting: list[Choice], tag: str, where: str) -> Choice:
    if len(fitting) > 1:
        raise DownloadFailed(f"{where} has {len(fitting)} files that are {tag}; name one of {', '.join(_stem(one) for one in fitting)}")
    return fitting[0]


# ---- addresses ------------------------------------------------------------------------------------------------------------------


def is_address(text: str) -> bool:
    """Whether `text` is the web address of a GGUF file, rather than a model's name."""
    where = urlsplit(text) if text.lower().startswith(("https://", "http://")) else None
    return where is not None and where.path.lower().endswith(".gguf")


def at_address(text: str) -> Choice:
    """The file there, and where its name is that of a first part, those beside it. Raises BadRequest for a part that is not the first."""
    where = urlsplit(text)
    name = unquote(where.path.rpartition("/")[2])
    found = _PART.search(name[: -len(".gguf")])
    first = RemoteFile(text, name)
    if not found:
        return Choice(label_of(name[: -len(".gguf")]), (first,))
    if int(found[1]) != 1:
        raise BadRequest(f"{name} is part {int(found[1])} of a split model; give the address of part 1", param="model")
    count, files = int(found[2]), []
    for number in range(1, count + 1):
        part = f"{name[: found.start()]}-{number:05}-of-{count:05}.gguf"
        path = f"{where.path.rpartition('/')[0]}/{quote(part)}"
        files.append(RemoteFile(where._replace(path=path).geturl(), part))
    return Choice(label_of(name[: found.start()]), tuple(files))


def name_for(text: str) -> Name:
    """What a model from that address is called: its file's name. Raises InvalidName when that can be no model's."""
    stem = _PART.sub("", unquote(urlsplit(text).path.rpartition("/")[2])[: -len(".gguf")])
    return Name.parse(re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.").lower()[:80] or "model")


def key_of(file: RemoteFile) -> str:
    """The file's digest; where it is not known yet, one that stands for it, so that what has come of it is found again."""
    return file.digest or f"sha256:{hashlib.sha256(f'{file.url} {file.size} {file.version}'.encode()).hexdigest()}"
