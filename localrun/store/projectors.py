"""Projectors: the files (mmproj, GGUF) with which a language model sees images, and which of them fit which model.

    general.architecture = "clip", clip.projector_type = how an image becomes tokens, one way for each family of language models

Knows headers; the shapes are checked by the one who loads the file.
"""

from __future__ import annotations

from pathlib import Path

from localrun.errors import BadRequest, ModelFileRejected
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf, printable
from localrun.store.blobs import Blobs
from localrun.store.manifests import LAYER_TYPE, Layer
from localrun.store.names import check_digest
from localrun.store.progress import Progress, PullProgress

SUPPORTED = {"gemma3": "gemma3"}
"""The projector type of each architecture that can see images here."""


def is_projector(gguf: GGUFFile) -> bool:
    """Whether the file is a projector of any kind, and no model."""
    return gguf.metadata.get("general.architecture") == "clip"


def type_of(gguf: GGUFFile) -> str:
    """How it makes tokens of an image, in the format's word."""
    return str(gguf.metadata.get("clip.projector_type", gguf.metadata.get("clip.vision.projector_type", "")))


def problem(projector: GGUFFile, base: GGUFFile) -> str:
    """Why the model cannot see with this projector; empty when it can."""
    if not is_projector(projector):
        named = printable(repr(projector.metadata.get("general.architecture")))
        return f'general.architecture is {named}; a projector for images says "clip"'
    architecture = str(base.metadata.get("general.architecture", ""))
    if architecture not in SUPPORTED:
        return f"images are not supported in models of architecture {printable(architecture)}; they are in {', '.join(sorted(SUPPORTED))}"
    if type_of(projector) != SUPPORTED[architecture]:
        return f'its type is "{printable(type_of(projector))}"; {architecture} models need "{SUPPORTED[architecture]}"'
    return ""


def usable(projectors: list[Path], base: GGUFFile) -> Path | None:
    """The first of a model's projectors that it can see with here."""
    for path in projectors:
        try:
            with open_gguf(path) as gguf:
                if not problem(gguf, base):
                    return path
        except ModelFileError:
            continue
    return None


def take_in(blobs: Blobs, source: Path | str, base: str, copy: bool, progress: Progress) -> Layer:
    """The layer of a projector (a file, or the digest of a blob) for the model whose GGUF file is the blob `base`; a file is linked like a
    model's. Raises ModelFileRejected, BadRequest, DiskFull, StorageFailed.
    """
    if isinstance(source, Path) and source.resolve().parent == blobs.folder.resolve():
        source = source.name  # a path that `show --modelfile` printed
    if isinstance(source, str):
        digest = check_digest(source)
        if not blobs.has(digest):
            raise BadRequest(f"blob {digest} is not in the store; send it first", param="from")
        _check(blobs.path(digest), blobs, base, digest)
    else:
        _check(source, blobs, base, str(source))
        status = f"reading {source.name}"
        digest, _ = blobs.adopt(source, copy=copy, progress=lambda done, size: progress(PullProgress(status, None, size, done)))
    progress(PullProgress(f"using projector layer {digest}"))
    return Layer(f"{LAYER_TYPE}projector", digest, blobs.size(digest))


def _check(path: Path, blobs: Blobs, base: str, name: str) -> None:
    try:
        with open_gguf(path) as projector, open_gguf(blobs.path(base)) as model:
            text = problem(projector, model)
    except ModelFileError as error:
        raise ModelFileRejected(f"projector {name}: {error.field or 'file'}: {error.problem}", param="from") from error
    if text:
        raise ModelFileRejected(f"projector {name}: {text}", param="from")
