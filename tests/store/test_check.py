"""`store check`: finds what is wrong, repairs what it can, harms nothing that is sound or under way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.errors import RequestCancelled
from localrun.store import CreateSpec, PullProgress, Store
from localrun.store.catalogue import Entry
from localrun.store.check import Report, check
from localrun.store.names import Name
from tests.store.conftest import Index


def make(store: Store, name: str, gguf: Path, system: str) -> None:
    store.create(name, CreateSpec(path=gguf, system=system, copy=True), lambda line: None)


def kinds(report: Report) -> list[str]:
    return sorted(problem.kind for problem in report.problems)


def layer(store: Store, name: str, kind: str) -> str:
    return next(layer.digest for layer in store.read(name)[1].layers if layer.kind == kind)


def age(store: Store, digest: str) -> None:
    os.utime(store.blobs.path(digest), (1, 1))


def test_sound_store(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, "x")
    lines: list[PullProgress] = []
    report = check(store, True, lines.append)
    assert report.sound and report.problems == []
    assert (report.models, report.blobs) == (1, 3) and report.bytes == store.get("a").size
    assert {line.digest for line in lines} == set(store.blobs.digests())
    assert check(Store(store.root / "nowhere"), True).problems == []


def test_damaged_blob(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, "good")
    make(store, "b", gguf, "other")
    digest = layer(store, "a", "system")
    store.blobs.path(digest).write_bytes(b"evil")
    report = check(store, False)
    assert kinds(report) == ["damaged"] and not report.sound
    assert report.problems[0].text == f"blob {digest} holds other bytes than its name says (needed by a:latest)"
    assert store.blobs.has(digest)
    report = check(store, True)
    assert report.problems[0].repaired == "removed; pull or create the model again"
    assert not store.blobs.has(digest) and store.get("b").system == "other"
    assert kinds(check(store, True)) == ["missing"]
    make(store, "a", gguf, "good")
    assert check(store, True).problems == []


def test_missing_and_short_blobs(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, "good")
    store.blobs.path(layer(store, "a", "model")).unlink()
    store.blobs.path(layer(store, "a", "system")).write_bytes(b"goo")
    report = check(store, False)
    assert kinds(report) == ["damaged", "damaged", "missing"] and not report.sound
    assert any("has 3 bytes, and a:latest says 4" in problem.text for problem in report.problems)


def test_orphans_of_some_age_go(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, "x")
    old, young = store.blobs.put(b"old"), store.blobs.put(b"young")
    age(store, old)
    report = check(store, False)
    assert kinds(report) == ["orphan", "orphan"] and report.sound
    report = check(store, True)
    assert {problem.text.split()[1]: problem.repaired for problem in report.problems} == {old: "removed", young: ""}
    assert not store.blobs.has(old) and store.blobs.has(young)


def test_unreadable_manifest_keeps_orphans(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, "x")
    store.manifests.path(Name.parse("a")).write_bytes(b"{")
    for digest in store.blobs.digests():
        age(store, digest)
    before = set(store.blobs.digests())
    report = check(store, True)
    assert kinds(report) == ["manifest", "orphan", "orphan", "orphan"] and not report.sound
    assert set(store.blobs.digests()) == before


def test_changed_file_behind_a_link(store: Store, gguf: Path) -> None:
    store.create("a", CreateSpec(path=gguf), lambda line: None)
    if not store.blobs.links():
        pytest.skip("this file system clones files")
    os.utime(gguf, ns=(1, 1))
    assert kinds(check(store, False)) == ["changed"]
    with gguf.open("ab") as file:
        file.write(b"x")
    report = check(store, True)
    assert "changed" in kinds(report) and gguf.exists()
    store.create("a", CreateSpec(path=gguf), lambda line: None)


def test_leftovers_go_and_a_download_under_way_stays(store: Store, index: Index, published: Callable[..., Entry]) -> None:
    entry = published()
    index.hold.clear()
    thread = threading.Thread(target=store.pull, args=("tiny", lambda line: None))
    thread.start()
    assert index.halfway.wait(120)
    dead = f"sha256:{'1' * 64}"
    with store.blobs.receive(dead) as writer:
        writer.write(b"12345")
    other = f"sha256:{'2' * 64}"
    store.blobs.staging(other).mkdir()
    (store.blobs.folder / "sha256-abc-partial-0").write_bytes(b"theirs")
    report = check(store, True)
    theirs = {problem.kind: problem.repaired for problem in report.problems if entry.sha256 in problem.text}
    done = {problem.kind: problem.repaired for problem in report.problems if entry.sha256 not in problem.text}
    assert theirs == {"partial": "", "staging": ""}
    assert done == {"partial": "removed", "staging": "removed", "stray": ""}
    index.hold.set()
    thread.join(120)
    assert store.get("tiny").model_digest == entry.digest
    assert store.blobs.partials() == []


def test_can_be_cancelled(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, "x")
    with pytest.raises(RequestCancelled):
        check(store, True, cancelled=lambda: True)
