"""Brings a GGUF file from the web into the store as one blob: verified where its SHA-256 is told, joined where it comes in parts.

Knows the order of things; addresses are known in hub.py, transfers in download.py.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from localrun.errors import LocalrunError
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.store.download import bring_all, bring_unverified
from localrun.store.hub import Choice, WebSource, key_of
from localrun.store.merge import merge
from localrun.store.progress import Cancelled, Progress

if TYPE_CHECKING:
    from localrun.store.store import Store


def bring_in(store: Store, source: WebSource, choice: Choice, progress: Progress, cancelled: Cancelled) -> tuple[str, int]:
    """Digest and size of the blob that holds the model. What was brought in and is no model, or is a part of one, is dropped again.

    Raises DownloadFailed, DigestMismatch, ModelFileRejected, DiskFull, StorageFailed, RequestCancelled.
    """
    digests: list[str] = []
    try:
        for file in choice.files:
            known = file if file.size and file.digest else source.seen(file)
            key = key_of(known)
            source.offer(key, known)
            if known.digest:
                bring_all(source, {key: known.size}, store.blobs, progress, cancelled)
                digests.append(key)
            else:
                digests.append(bring_unverified(source, key, known.size, store.blobs, progress, cancelled))
        if len(digests) == 1:
            store.config_of(digests[0])
            return digests[0], store.blobs.size(digests[0])
        paths = [store.blobs.path(digest) for digest in digests]
        return merge(store.blobs, paths[0], progress, cancelled, parts=paths[1:])
    except LocalrunError:
        _drop_broken(store, digests)
        raise
    finally:
        if len(digests) > 1 and len(digests) == len(choice.files):
            store.drop_unneeded(digests)


def _drop_broken(store: Store, digests: list[str]) -> None:
    """Whole files that are no GGUF files are of no use to a later attempt; sound ones are."""
    for digest in digests:
        try:
            with open_gguf(store.blobs.path(digest)):
                pass
        except ModelFileError as error:
            if error.field != "split.count":
                with contextlib.suppress(LocalrunError):
                    store.drop_unneeded([digest])
