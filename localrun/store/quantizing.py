"""Makes blobs from other forms of a model: quantized ones, checkpoints and adapters in safetensors. Knows the programs that do it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from localrun.errors import BadRequest
from localrun.quantize.mixes import file_type
from localrun.store.blobs import Blobs
from localrun.store.child import make_blob
from localrun.store.durable import storage_errors
from localrun.store.names import check_digest
from localrun.store.progress import Cancelled, Progress, PullProgress


def checked_type(text: str) -> str:
    """The type that `text` means, in any case. Raises BadRequest listing the types."""
    try:
        return file_type(text)
    except ValueError as error:
        raise BadRequest(str(error), param="quantize") from None


def quantize(blobs: Blobs, digest: str, was: str, name: str, progress: Progress, cancelled: Cancelled) -> tuple[str, int]:
    """Digest and size of a blob that holds the model of blob `digest` as type `name`. was: its type now, for people.

    Raises BadRequest (a source that cannot be quantized), DiskFull, StorageFailed, RequestCancelled.
    """
    blobs.require_space(blobs.size(digest))
    arguments: list[str | Path] = [blobs.path(digest), "OUT", name]
    return make_blob(blobs, "localrun.quantize", arguments, f"quantizing {was} model to {name}", progress, cancelled, param="quantize")


def convert(
    blobs: Blobs, folder: Path, name: str, progress: Progress, cancelled: Cancelled, *, title: str = "", param: str = "from"
) -> tuple[str, int]:
    """Digest and size of a blob made of the checkpoint in `folder`. name: the type; empty: 16 bits. title: what the model is called.

    Raises BadRequest (a checkpoint that cannot be converted), DiskFull, StorageFailed, RequestCancelled.
    """
    with storage_errors("cannot read the checkpoint", folder):
        blobs.require_space(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    progress(PullProgress("converting model"))
    arguments: list[str | Path] = [folder, "OUT", *([name] if name else []), *(["--title", title] if title else [])]
    return make_blob(blobs, "localrun.convert", arguments, "converting model", progress, cancelled, param=param)


def convert_adapter(blobs: Blobs, source: Path, base: str, progress: Progress, cancelled: Cancelled) -> tuple[str, int]:
    """Digest and size of a blob made of the LoRA adapter at `source`, as peft saves them, for the model in blob `base`.

    Raises BadRequest (one that cannot be converted), DiskFull, StorageFailed, RequestCancelled.
    """
    arguments: list[str | Path] = [source, "OUT", "--adapter-for", blobs.path(base)]
    return make_blob(blobs, "localrun.convert", arguments, "converting adapter", progress, cancelled, param="adapters")


@contextlib.contextmanager
def folder_of(blobs: Blobs, files: Mapping[str, str], param: str) -> Iterator[Path]:
    """A folder in which blobs lie under file names, for as long as the block lasts. files: relative name -> digest.

    Raises BadRequest for names that lead elsewhere, and for digests that are none or not in the store.
    """
    with tempfile.TemporaryDirectory(prefix="localrun-files-") as made:
        for name, digest in files.items():
            path = PurePosixPath(name)
            if not name or path.is_absolute() or "\\" in name or "\0" in name or ".." in path.parts or ":" in path.parts[0]:
                raise BadRequest(f"file path must be relative: {name[:80]!r}", param=param)
            digest = check_digest(digest)
            if not blobs.has(digest):
                raise BadRequest(f"blob {digest} is not in the store; send it first", param=param)
            target = Path(made, *path.parts)
            with storage_errors("cannot write the folder", target):
                target.parent.mkdir(parents=True, exist_ok=True)
                if target.exists():
                    raise BadRequest(f"file {name[:80]!r} is there twice", param=param)
                try:
                    target.symlink_to(blobs.path(digest))
                except (OSError, NotImplementedError):
                    shutil.copyfile(blobs.path(digest), target)
        yield Path(made)
