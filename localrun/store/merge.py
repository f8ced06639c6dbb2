"""Makes one GGUF file of a model that comes in parts, since a model in the store is one blob. Weights are copied, nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localrun.errors import ModelFileRejected, RequestCancelled
from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, open_gguf
from localrun.models.gguf_write import OutTensor, alignment_of, header
from localrun.store.blobs import CHUNK, Blobs
from localrun.store.progress import Cancelled, Progress, PullProgress


def merge(blobs: Blobs, first: Path, progress: Progress, cancelled: Cancelled, parts: Sequence[Path] | None = None) -> tuple[str, int]:
    """Digest and size of the blob that holds all parts. parts: the second and later ones, where they do not lie beside the first.

    Raises ModelFileRejected (a part is missing, damaged or another model's), DiskFull, StorageFailed, RequestCancelled.
    """
    try:
        with open_gguf(first, parts=parts) as gguf:
            return _write(blobs, gguf, progress, cancelled)
    except ModelFileError as error:
        raise ModelFileRejected(str(error)) from error


def _write(blobs: Blobs, gguf: GGUFFile, progress: Progress, cancelled: Cancelled) -> tuple[str, int]:
    metadata = {key: value for key, value in gguf.metadata.items() if not key.startswith("split.")}
    tensors = [OutTensor(info.name, info.shape, info.type) for info in gguf.tensors.values()]
    total = sum(tensor.nbytes for tensor in tensors)
    blobs.require_space(total)
    alignment = alignment_of(metadata)
    done = 0
    with blobs.compose() as writer:
        writer.write(header(metadata, gguf.value_types, tensors))
        for tensor in tensors:
            data = gguf.data(tensor.name)
            for at in range(0, len(data), CHUNK):
                if cancelled():
                    raise RequestCancelled
                piece = bytes(data[at : at + CHUNK])
                writer.write(piece)
                done += len(piece)
                progress(PullProgress("merging the parts", None, total, done))
            data.release()
            writer.write(bytes(-tensor.nbytes % alignment))
    return writer.digest, writer.offset
