"""Models as one stream of bytes, for a machine without a network: a tar file with the layout of the store.

    localrun-bundle.json                      which models, which blobs, how large
    blobs/sha256-<hex>  ...                   of the first model
    manifests/HOST/NAMESPACE/MODEL/TAG        of the first model, once its blobs have come
    blobs/...  manifests/...                  of the next one; what has been written is not written again

The same models make the same bytes, so an export can go on at any offset. An import believes nothing: each blob is verified as it comes,
each name checked, and a model appears when all of it is there. Knows nothing of files in parts, which is for whoever stores the stream.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from localrun.errors import BadRequest, RequestCancelled
from localrun.store.blobs import CHUNK, DigestMismatch
from localrun.store.durable import StorageFailed, storage_errors
from localrun.store.manifests import BadManifest, Manifest
from localrun.store.names import InvalidName, Name, check_digest
from localrun.store.progress import Cancelled, Progress, PullProgress
from localrun.store.store import Store

INDEX = "localrun-bundle.json"
VERSION = 1
_BLOCK = 512
_LARGEST_INDEX = 16 << 20
_LARGEST_MANIFEST = 4 << 20


class BadBundle(BadRequest):
    """A stream is no bundle, or not all of one."""

    code = "bad_bundle"


@dataclass(frozen=True)
class _Member:
    header: bytes
    size: int
    content: bytes | Path

    @property
    def length(self) -> int:
        """In the stream: header, content, and zeros up to the next block."""
        return len(self.header) + self.size + -self.size % _BLOCK


class Bundle:
    """Some models of a store, about to be exported."""

    def __init__(self, store: Store, names: list[str]) -> None:
        """Raises InvalidName, ModelNotFound, and what Store.get raises for a model that cannot be used; BadRequest for no names."""
        if not names:
            raise BadRequest("name the models that the bundle is to hold", param="models")
        models: dict[Name, Manifest] = {}
        for text in names:
            store.get(text)
            name, manifest = store.read(text)
            models[name] = manifest
        self._members = list(_members(store, models))
        self.size = sum(member.length for member in self._members) + 2 * _BLOCK
        """Bytes of the whole stream."""

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """The stream from byte `start` on, in pieces of at most a megabyte. Raises StorageFailed when a blob has gone or become shorter."""
        for member in self._members:
            if start >= member.length:
                start -= member.length
                continue
            yield from _from(member, start)
            start = 0
        end = bytes(2 * _BLOCK)[start:]
        if end:
            yield end


def _members(store: Store, models: dict[Name, Manifest]) -> Iterator[_Member]:
    written: set[str] = set()
    index = {
        "version": VERSION,
        "models": [{"name": str(name), "manifest": f"sha256:{manifest.digest}"} for name, manifest in models.items()],
        "blobs": {digest: size for manifest in models.values() for digest, size in manifest.blobs.items()},
    }
    yield _member(INDEX, json.dumps(index, indent=1).encode())
    for name, manifest in models.items():
        for digest, size in manifest.blobs.items():
            if digest not in written:
                written.add(digest)
                yield _member(f"blobs/{digest.replace(':', '-')}", store.blobs.path(digest), size)
        yield _member(f"manifests/{name.host}/{name.namespace}/{name.model}/{name.tag}", manifest.raw)


def _member(name: str, content: bytes | Path, size: int | None = None) -> _Member:
    info = tarfile.TarInfo(name)
    info.size = len(content) if isinstance(content, bytes) else size or 0
    # nothing of when and by whom: the same models make the same bytes
    info.mode = 0o644
    return _Member(info.tobuf(tarfile.PAX_FORMAT), info.size, content)


def _from(member: _Member, start: int) -> Iterator[bytes]:
    """The member's part of the stream from its byte `start` on."""
    if start < len(member.header):
        yield member.header[start:]
    start = max(0, start - len(member.header))
    if start < member.size:
        if isinstance(member.content, bytes):
            yield member.content[start:]
        else:
            yield from _blob(member.content, start, member.size)
    padding = bytes(-member.size % _BLOCK)[max(0, start - member.size) :]
    if padding:
        yield padding


def _blob(path: Path, start: int, size: int) -> Iterator[bytes]:
    with storage_errors("cannot read a blob", path), path.open("rb") as file:
        file.seek(start)
        left = size - start
        while left:
            data = file.read(min(CHUNK, left))
            if not data:
                raise StorageFailed(f"{path} has become shorter while it was exported")
            left -= len(data)
            yield data


# ---- import ---------------------------------------------------------------------------------------------------------------------


def import_bundle(store: Store, stream: BinaryIO, progress: Progress, cancelled: Cancelled = lambda: False) -> list[str]:
    """Takes in the models of a bundle, read once from front to back, and returns their names. A model of the same name is replaced.

    Blobs that are there already are passed over, so an import that was interrupted goes on from the last whole blob, and the models that
    came whole stay. Raises BadBundle (no bundle, damaged, ends early), DigestMismatch, BadManifest, DiskFull, StorageFailed,
    RequestCancelled.
    """
    names: list[str] = []
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            index: _Index | None = None
            for info in archive:
                if not info.isreg():
                    raise BadBundle(f"the bundle holds {info.name[:80]!r}, which is no plain file")
                if index is None:
                    index = _read_index(archive, info)
                    missing = [size for digest, size in index.blobs.items() if not store.blobs.has(digest, size)]
                    store.blobs.require_space(sum(missing))
                    continue
                kind, _, rest = info.name.partition("/")
                if kind == "blobs":
                    _import_blob(store, index, archive, info, rest, progress, cancelled)
                elif kind == "manifests":
                    names.append(_import_manifest(store, index, archive, info, rest, progress))
                else:
                    raise BadBundle(f"the bundle holds {info.name[:80]!r}, which no bundle has")
    except (tarfile.TarError, EOFError) as error:
        came = f"; {', '.join(names)} came whole" if names else ""
        raise BadBundle(f"this is no bundle, or not all of one ({error}){came}") from error
    if index is None or len(names) < len(index.models):
        come = ", ".join(names) or "none"
        raise BadBundle(f"the bundle ends early: of {len(index.models) if index else 'its'} models these came: {come}")
    progress(PullProgress("success"))
    return names


@dataclass(frozen=True)
class _Index:
    models: dict[Name, str]
    """Name -> digest of the manifest."""
    blobs: dict[str, int]


def _read(archive: tarfile.TarFile, info: tarfile.TarInfo, limit: int) -> bytes:
    if info.size > limit:
        raise BadBundle(f"{info.name[:80]!r} in the bundle has {info.size} bytes; at most {limit} are sensible")
    file = archive.extractfile(info)
    data = file.read() if file is not None else b""
    if len(data) != info.size:
        raise tarfile.ReadError("unexpected end of data")
    return data


def _read_index(archive: tarfile.TarFile, info: tarfile.TarInfo) -> _Index:
    if info.name != INDEX:
        raise BadBundle(f"this tar file is no bundle of localrun: it begins with {info.name[:80]!r}, not with {INDEX}")
    try:
        body = json.loads(_read(archive, info, _LARGEST_INDEX))
        if body["version"] != VERSION:
            raise BadBundle(f"the bundle has version {str(body['version'])[:20]}, and this program reads version {VERSION}; update it")
        models = {Name.parse(one["name"]): check_digest(one["manifest"]) for one in body["models"]}
        blobs = {check_digest(digest): size for digest, size in body["blobs"].items()}
        sizes = [size for size in blobs.values() if type(size) is not int or size < 0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidName) as error:
        raise BadBundle(f"{INDEX} in the bundle is damaged: {str(error)[:120]}") from error
    if sizes or not models:
        raise BadBundle(f"{INDEX} in the bundle is damaged: it names no models, or a size that is none")
    return _Index(models, blobs)


def _import_blob(
    store: Store, index: _Index, archive: tarfile.TarFile, info: tarfile.TarInfo, name: str, progress: Progress, cancelled: Cancelled
) -> None:
    digest = check_digest(name)
    if index.blobs.get(digest) != info.size:
        raise BadBundle(f"the bundle's blob {digest} has {info.size} bytes, and its index says {index.blobs.get(digest)}")
    status = f"importing {digest.removeprefix('sha256:')[:12]}"

    def waiting() -> None:
        if cancelled():
            raise RequestCancelled

    waiting()
    with store.blobs.lock(digest, waiting):
        if store.blobs.has(digest, info.size):
            progress(PullProgress(status, digest, info.size, info.size))
            return
        file = archive.extractfile(info)
        with store.blobs.receive(digest, fresh=True) as writer:
            while file is not None and (data := file.read(CHUNK)):
                writer.write(data)
                progress(PullProgress(status, digest, info.size, writer.offset))
                waiting()
            if writer.offset != info.size:
                raise tarfile.ReadError("unexpected end of data")
            try:
                writer.commit()
            except DigestMismatch as error:
                raise DigestMismatch(f"the bundle is damaged: {error}") from None


def _import_manifest(
    store: Store, index: _Index, archive: tarfile.TarFile, info: tarfile.TarInfo, path: str, progress: Progress
) -> str:
    parts = PurePosixPath(path).parts
    if len(parts) != 4:
        raise BadBundle(f"the bundle holds {info.name[:80]!r}, which is no model's manifest")
    name = Name.parse(f"{parts[0]}/{parts[1]}/{parts[2]}:{parts[3]}")
    manifest = Manifest.parse(_read(archive, info, _LARGEST_MANIFEST), name.short)
    if index.models.get(name) != f"sha256:{manifest.digest}":
        raise BadManifest(f"manifest of {name.short}: it is not the one that the bundle's index names")
    progress(PullProgress("writing manifest"))
    store.keep(name, manifest)
    return name.short
