"""Manifests: which blobs make up a model. Ollama's JSON and media types, which are Docker's with other layers.

    ROOT/manifests/HOST/NAMESPACE/MODEL/TAG

A manifest's identity is the SHA-256 of its bytes, so bytes that came from elsewhere are kept as they came. Knows the names of models and
the shape of the JSON; what the layers hold is not looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localrun.errors import BadRequest, LocalrunError
from localrun.store.durable import storage_errors, sync_folder, write_file
from localrun.store.names import InvalidName, Name, check_digest

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.ollama.image."
"""Begins every layer's media type; what follows is its kind: model, template, system, params, messages, license, adapter, projector."""

_MOST_BYTES = 4 << 20


class BadManifest(LocalrunError):
    """A manifest cannot be used. The message names the model and the field."""

    code = "bad_manifest"


@dataclass(frozen=True)
class Layer:
    media_type: str
    digest: str
    size: int
    name: str = ""
    """Of the file it came from, where a manifest says so."""

    @property
    def kind(self) -> str:
        """What follows LAYER_TYPE: "model", "system", ...; a media type of another family is returned whole."""
        return self.media_type.removeprefix(LAYER_TYPE).partition(";")[0]

    def to_json(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size} | ({"name": self.name} if self.name else {})


@dataclass(frozen=True)
class Manifest:
    config: Layer
    layers: tuple[Layer, ...]
    raw: bytes
    """The bytes as stored."""

    @classmethod
    def build(cls, config: Layer, layers: list[Layer]) -> Manifest:
        body = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": config.to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
        return cls(config, tuple(layers), json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode())

    @classmethod
    def parse(cls, raw: bytes, where: str) -> Manifest:
        """Raises BadManifest, naming `where` and the field, for anything but a manifest of this kind with sound digests and sizes."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise BadManifest(f"manifest of {where}: it is not JSON: {str(error)[:120]}") from error
        if not isinstance(body, dict) or body.get("schemaVersion") != 2:
            raise BadManifest(f"manifest of {where}: schemaVersion is not 2")
        layers = body.get("layers")
        if not isinstance(layers, list):
            raise BadManifest(f"manifest of {where}: layers is not a list")
        config = _layer(body.get("config"), f"{where}: config")
        return cls(config, tuple(_layer(layer, f"{where}: layers[{index}]") for index, layer in enumerate(layers)), bytes(raw))

    @property
    def digest(self) -> str:
        """64 hex digits: the model's ID."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all layers and the config."""
        return self.config.size + sum(layer.size for layer in self.layers)

    @property
    def blobs(self) -> dict[str, int]:
        """Digest -> size of every blob the model needs. An empty config (Ollama has written such) names none."""
        return {layer.digest: layer.size for layer in (self.config, *self.layers) if layer.digest}

    def of_kind(self, kind: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind == kind]


def _layer(body: Any, where: str) -> Layer:
    if not isinstance(body, dict):
        raise BadManifest(f"manifest of {where} is missing or no object")
    media_type, digest, size, name = body.get("mediaType"), body.get("digest"), body.get("size"), body.get("name", "")
    if not isinstance(media_type, str) or not isinstance(digest, str) or not isinstance(name, str):
        raise BadManifest(f"manifest of {where}: mediaType, digest and name must be text")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
        raise BadManifest(f"manifest of {where}: size {str(size)[:40]} is no number of bytes")
    if digest or not where.endswith(": config"):
        try:
            digest = check_digest(digest)
        except BadRequest as error:
            raise BadManifest(f"manifest of {where}: {error}") from error
    return Layer(media_type, digest, size, name)


class Manifests:
    """The manifests under one root. Whoever changes them holds the store's lock; readers need none, since files are replaced whole."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "manifests"

    def path(self, name: Name) -> Path:
        return self.folder / name.path

    def find(self, name: Name) -> Name | None:
        """The stored name that `name` means, whose letters may differ in case; None when there is none."""
        if self.path(name).is_file() and self._spelled(name):
            return name
        return next((stored for stored in self.names() if stored.same_as(name)), None)

    def _spelled(self, name: Name) -> bool:
        # where the file system itself ignores case, the path exists under other spellings too
        try:
            return self.path(name).resolve().parts[-4:] == name.path.parts
        except OSError:
            return False

    def names(self) -> Iterator[Name]:
        """Of all manifests, in order. Files at other depths and with names that no model has are passed over."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob("*/*/*/*")):
            with contextlib.suppress(InvalidName):
                name = Name.from_path(path.relative_to(self.folder))
                if path.is_file():
                    yield name

    def read(self, name: Name) -> Manifest | None:
        """None when there is none of that name, spelled so. Raises BadManifest, StorageFailed."""
        path = self.path(name)
        with storage_errors("cannot read the manifest", path):
            try:
                if path.stat().st_size > _MOST_BYTES:
                    raise BadManifest(f"manifest of {name.short}: it is larger than {_MOST_BYTES} bytes")
                raw = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Manifest.parse(raw, name.short)

    def modified_at(self, name: Name) -> datetime:
        try:
            return datetime.fromtimestamp(self.path(name).stat().st_mtime, UTC)
        except OSError:
            return datetime.fromtimestamp(0, UTC)

    def write(self, name: Name, manifest: Manifest) -> None:
        with storage_errors("cannot write the manifest", self.folder):
            write_file(self.path(name), manifest.raw)

    def delete(self, name: Name) -> None:
        """Removes the manifest and the folders it leaves empty."""
        path = self.path(name)
        with storage_errors("cannot remove the manifest", path):
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
        for folder in list(path.parents)[:3]:
            try:
                folder.rmdir()
            except OSError:
                break
