"""Looks a whole store over: is every blob what its name says, has every manifest its blobs, what lies about that nobody needs.

Knows the layout of the folder. Changes nothing unless asked to repair, and never removes a model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from localrun.errors import LocalrunError, ModelFileRejected, RequestCancelled
from localrun.store.durable import StorageFailed
from localrun.store.manifests import BadManifest
from localrun.store.progress import Cancelled, Progress, PullProgress
from localrun.store.store import Store

_REPORT_S = 0.1
_STALE_S = 3600.0


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `repaired` says what was done about it, and is empty when nothing was."""

    kind: str
    """damaged, missing, changed, manifest, orphan, partial, staging or stray."""
    text: str
    """One line: what, where, and which models suffer."""
    harm: bool
    """Whether a model cannot be used because of it; the rest is only space."""
    bytes: int = 0
    """That it takes."""
    repaired: str = ""


@dataclass
class Report:
    models: int = 0
    blobs: int = 0
    """Verified."""
    bytes: int = 0
    """Verified."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """No model is harmed, or whatever harmed one has been repaired."""
        return not any(problem.harm and not problem.repaired for problem in self.problems)


def check(store: Store, repair: bool, progress: Progress = lambda line: None, cancelled: Cancelled = lambda: False) -> Report:
    """Reads every blob of the store and compares it with its digest.

    With `repair`: damaged blobs go (a pull of the model then brings that blob again, and no other), orphans and what interrupted downloads
    left go. A manifest that cannot be read is named and left: what it was may be known to its owner; while there is one, no orphan goes.
    Downloads that are under way are left alone. Raises StorageFailed where a repair fails, RequestCancelled.
    """
    report = Report()
    users = _users(store, report)
    _verify(store, users, report, repair, progress, cancelled)
    _missing(store, users, report)
    unread = any(problem.kind == "manifest" for problem in report.problems)
    _orphans(store, users, report, repair and not unread)
    _leftovers(store, report, repair)
    return report


def _users(store: Store, report: Report) -> dict[str, list[tuple[str, int]]]:
    """Digest -> the models that need it, each with the size that it says."""
    users: dict[str, list[tuple[str, int]]] = {}
    for name in store.manifests.names():
        try:
            manifest = store.manifests.read(name)
        except (BadManifest, StorageFailed) as error:
            report.problems.append(Problem("manifest", str(error), True))
            continue
        report.models += 1
        for digest, size in manifest.blobs.items() if manifest else ():
            users.setdefault(digest, []).append((name.short, size))
    return users


def _needed_by(users: dict[str, list[tuple[str, int]]], digest: str) -> str:
    names = [name for name, _ in users.get(digest, [])]
    return f" (needed by {', '.join(names)})" if names else " (needed by no model)"


def _verify(
    store: Store, users: dict[str, list[tuple[str, int]]], report: Report, repair: bool, progress: Progress, cancelled: Cancelled
) -> None:
    for digest in sorted(store.blobs.digests()):
        whose = _needed_by(users, digest)
        said = 0.0

        def tell(done: int, size: int, digest: str = digest) -> None:
            nonlocal said
            if cancelled():
                raise RequestCancelled
            if done == size or time.monotonic() - said > _REPORT_S:
                said = time.monotonic()
                progress(PullProgress(f"verifying {digest.removeprefix('sha256:')[:12]}", digest, size, done))

        try:
            sound = store.blobs.verify(digest, tell)
            size = store.blobs.size(digest)
        except StorageFailed as error:
            report.problems.append(Problem("damaged", f"{error}{whose}", digest in users))
            continue
        report.blobs += 1
        report.bytes += size
        if sound:
            with _noted(report, users, digest):
                store.blobs.unchanged(digest)
            continue
        kind = "changed" if digest in store.blobs.links() else "damaged"
        repaired = ""
        if repair:
            with store.blobs.lock(digest):
                store.blobs.delete(digest)
            repaired = "removed; pull or create the model again"
        report.problems.append(Problem(kind, f"blob {digest} holds other bytes than its name says{whose}", digest in users, size, repaired))


@contextlib.contextmanager
def _noted(report: Report, users: dict[str, list[tuple[str, int]]], digest: str) -> Iterator[None]:
    try:
        yield
    except ModelFileRejected as error:
        # the bytes are right all the same: only the time differs
        report.problems.append(Problem("changed", f"{error}{_needed_by(users, digest)}", True))


def _missing(store: Store, users: dict[str, list[tuple[str, int]]], report: Report) -> None:
    for digest, needed in sorted(users.items()):
        if not store.blobs.has(digest):
            report.problems.append(Problem("missing", f"blob {digest} is not there{_needed_by(users, digest)}", True))
            continue
        found = store.blobs.size(digest)
        for name, size in needed:
            if size != found:
                text = f"blob {digest} has {found} bytes, and {name} says {size}"
                report.problems.append(Problem("damaged", text, True))


def _orphans(store: Store, users: dict[str, list[tuple[str, int]]], report: Report, repair: bool) -> None:
    sizes = {digest: store.blobs.size(digest) for digest in store.blobs.digests() if digest not in users}
    removed = set(store.prune()) if repair and sizes else set()
    for digest, size in sorted(sizes.items()):
        done = "removed" if digest in removed else ""
        report.problems.append(Problem("orphan", f"blob {digest} is needed by no model", False, size, done))


def _leftovers(store: Store, report: Report, repair: bool) -> None:
    for digest, size in store.blobs.partials():
        done = ""
        if repair and _drop(store, digest):
            done = "removed"
        report.problems.append(Problem("partial", f"{size} bytes of an interrupted download of {digest}", False, size, done))
    for draft in store.blobs.drafts(_STALE_S):
        size = draft.stat().st_size
        if repair:
            draft.unlink(missing_ok=True)
        text = f"{draft} was being made when its process ended"
        report.problems.append(Problem("partial", text, False, size, "removed" if repair else ""))
    staging = store.blobs.staging(f"sha256:{'0' * 64}").parent
    for folder in sorted(staging.iterdir()) if staging.is_dir() else ():
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        done = ""
        with contextlib.suppress(LocalrunError):
            if repair and _drop(store, f"sha256:{folder.name}"):
                done = "removed"
        report.problems.append(Problem("staging", f"{folder} is left of an interrupted download", False, size, done))
    for path in _strays(store):
        report.problems.append(Problem("stray", f"{path} belongs to no model", False, path.stat().st_size))


def _strays(store: Store) -> Iterator[Path]:
    """Files among the blobs that are none: Ollama's own partial downloads, say. They are named, and left."""
    blobs = {store.blobs.path(digest).name for digest in store.blobs.digests()}
    for path in sorted(store.blobs.folder.iterdir()) if store.blobs.folder.is_dir() else ():
        if path.name not in blobs and path.is_file():
            yield path


def drop_partials(store: Store, digest: str = "") -> list[tuple[str, int]]:
    """Forgets what interrupted downloads left, of one digest or of all; those under way stay. Returns digest and size of each."""
    found = [one for one in store.blobs.partials() if digest in ("", one[0])]
    return [one for one in found if _drop(store, one[0])]


class _InUse(Exception):
    """Somebody is downloading this."""


def _drop(store: Store, digest: str) -> bool:
    """Removes what is left of a download, unless that is under way."""

    def give_up() -> None:
        raise _InUse

    try:
        with store.blobs.lock(digest, give_up):
            store.blobs.drop_partial(digest)
    except _InUse:
        return False
    return True
