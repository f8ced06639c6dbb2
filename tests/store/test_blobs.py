"""Blobs: whole and verified, or not there; taken in without a copy; locked."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import DiskFull, ModelFileRejected, RequestCancelled
from localrun.store.blobs import Blobs, DigestMismatch
from localrun.store.durable import StorageFailed, locked, write_file


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "models")


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_put_and_read(blobs: Blobs) -> None:
    digest = blobs.put(b"hello")
    assert digest == digest_of(b"hello") == blobs.put(b"hello")
    assert blobs.read(digest) == b"hello" and blobs.size(digest) == 5
    assert blobs.has(digest) and blobs.has(digest, 5) and not blobs.has(digest, 4)
    assert list(blobs.digests()) == [digest]
    blobs.delete(digest)
    blobs.delete(digest)
    assert not blobs.has(digest) and list(blobs.digests()) == []
    with pytest.raises(StorageFailed, match="missing"):
        blobs.read(digest)


def test_read_has_a_limit(blobs: Blobs) -> None:
    with pytest.raises(StorageFailed, match="10 bytes where at most 9"):
        blobs.read(blobs.put(b"0123456789"), limit=9)


def test_received_blob_appears_at_commit_only(blobs: Blobs) -> None:
    data = b"x" * 1000
    digest = digest_of(data)
    with blobs.lock(digest), blobs.receive(digest) as writer:
        writer.write(data)
        writer.flush()
        assert not blobs.has(digest)
        writer.commit()
    assert blobs.read(digest) == data
    assert blobs.partials() == []


def test_another_content_is_refused_and_forgotten(blobs: Blobs) -> None:
    digest = digest_of(b"right")
    with blobs.receive(digest) as writer:
        writer.write(b"wrong")
        with pytest.raises(DigestMismatch) as caught:
            writer.commit()
    assert str(caught.value) == f'digest mismatch, expected "{digest}", got "{digest_of(b"wrong")}"'
    assert not blobs.has(digest) and blobs.partials() == []


@given(data=st.binary(max_size=300), cut=st.integers(0, 300), keep=st.none() | st.integers(0, 300))
def test_resume_at_any_point(tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, keep: int | None) -> None:
    blobs = Blobs(tmp_path_factory.mktemp("resume"))
    digest = digest_of(data)
    with blobs.receive(digest) as writer:
        writer.write(data[:cut])
    with blobs.receive(digest) as writer:
        start = writer.resume(keep)
        assert start == min(len(data[:cut]), len(data) if keep is None else keep)
        writer.write(data[start:])
        assert writer.offset == len(data)
        writer.commit()
    assert blobs.read(digest) == data


def test_fresh_drops_what_an_earlier_attempt_left(blobs: Blobs) -> None:
    digest = digest_of(b"abc")
    with blobs.receive(digest) as writer:
        writer.write(b"zzz")
    assert blobs.partials() == [(digest, 3)]
    with blobs.receive(digest, fresh=True) as writer:
        writer.write(b"abc")
        writer.commit()
    assert blobs.read(digest) == b"abc"


def test_cut_keeps_the_beginning(blobs: Blobs) -> None:
    digest = digest_of(b"abcdef")
    with blobs.receive(digest) as writer:
        writer.write(b"abcXX")
        writer.cut(3)
    with blobs.receive(digest) as writer:
        assert writer.resume() == 3
        writer.write(b"def")
        writer.commit()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_disk_is_one_clear_line(blobs: Blobs) -> None:
    digest = digest_of(b"never")
    blobs.partial(digest).parent.mkdir(parents=True)
    blobs.partial(digest).symlink_to("/dev/full")
    line = r"^cannot write the model: no space left on the disk that holds [^\n]+$"
    with pytest.raises(DiskFull, match=line), blobs.receive(digest) as writer:
        writer.write(b"x" * (1 << 20))
        writer.flush()
    assert not blobs.has(digest)


def test_space_is_asked_for_before(blobs: Blobs) -> None:
    blobs.require_space(1)
    with pytest.raises(DiskFull, match="GB more are needed"):
        blobs.require_space(shutil.disk_usage(Path.home()).total * 2)


@pytest.mark.skipif(os.name == "nt", reason="needs a folder this user may not write")
def test_forbidden_folder(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(root, os.W_OK):
        # a superuser: there are places where even that one makes no folders
        root = Path("/sys/localrun-test")
        if not root.parent.is_dir():
            pytest.skip("no place that this user may not write")
    with pytest.raises(StorageFailed, match=r"^cannot write the model: [^\n]+ may not be written \(running as user [0-9]+\): [^\n]+$"):
        Blobs(root).put(b"x")


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(StorageFailed, match=r"^cannot write the model: [^\n]+$"):
        Blobs(tmp_path / "models").put(b"x")


def test_old_spelling_of_blob_files_is_read(blobs: Blobs) -> None:
    if os.name == "nt":
        pytest.skip("no file there can have such a name")
    digest = digest_of(b"old")
    blobs.folder.mkdir(parents=True)
    (blobs.folder / digest).write_bytes(b"old")
    assert blobs.read(digest) == b"old" and list(blobs.digests()) == [digest]


# ---- files of other people ----------------------------------------------------------------------------------------------------


def test_adopted_file_costs_no_copy(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"weights" * 1000)
    seen: list[tuple[int, int]] = []
    digest, size = blobs.adopt(source, progress=lambda done, total: seen.append((done, total)))
    assert (digest, size) == (digest_of(source.read_bytes()), 7000) and seen[-1] == (7000, 7000)
    assert blobs.read(digest) == source.read_bytes()
    if blobs.links():
        assert blobs.path(digest).samefile(source)
        assert blobs.links() == {digest: str(source.resolve())}
    blobs.unchanged(digest)
    assert blobs.adopt(source) == (digest, size)
    assert not list(blobs.partials())


def test_changed_file_is_noticed_and_can_be_taken_in_again(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"a" * 100)
    digest, _ = blobs.adopt(source)
    if digest not in blobs.links():
        pytest.skip("this file system clones files")
    with source.open("ab") as file:
        file.write(b"b")
    line = r"w\.gguf, which the model was created from, has changed since \(it had 100 bytes, now 101"
    with pytest.raises(ModelFileRejected, match=line):
        blobs.unchanged(digest)
    assert not blobs.verify(digest)
    source.unlink()
    source.write_bytes(b"a" * 100)
    assert blobs.adopt(source) == (digest, 100)
    blobs.unchanged(digest)
    assert blobs.verify(digest)


def test_same_content_with_another_time_is_taken_in_again(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"a" * 100)
    digest, _ = blobs.adopt(source)
    if digest not in blobs.links():
        pytest.skip("this file system clones files")
    os.utime(source, ns=(1, 1))
    with pytest.raises(ModelFileRejected, match="has changed since"):
        blobs.unchanged(digest)
    blobs.adopt(source)
    blobs.unchanged(digest)
    assert blobs.partials() == []


def test_replaced_or_removed_original_does_no_harm(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"first")
    digest, _ = blobs.adopt(source)
    source.unlink()
    if blobs.path(digest).is_symlink():
        with pytest.raises(ModelFileRejected, match="is gone"):
            blobs.unchanged(digest)
        return
    source.write_bytes(b"second")
    blobs.unchanged(digest)
    assert blobs.read(digest) == b"first"


def test_delete_leaves_the_original(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"mine")
    digest, _ = blobs.adopt(source)
    blobs.delete(digest)
    assert source.read_bytes() == b"mine" and files(blobs.folder.parent) == []


def test_symbolic_link_where_no_hard_one_can_be(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_disk(*paths: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("localrun.store.blobs.os.link", another_disk)
    monkeypatch.setattr("localrun.store.blobs._clone", lambda source, target: False)
    source = tmp_path / "w.gguf"
    source.write_bytes(b"there")
    digest, _ = blobs.adopt(source)
    if not blobs.path(digest).is_symlink():
        pytest.skip("this user may not make symbolic links")
    blobs.unchanged(digest)
    source.unlink()
    with pytest.raises(ModelFileRejected, match="is gone; create the model again"):
        blobs.unchanged(digest)
    blobs.delete(digest)
    assert not blobs.path(digest).is_symlink()


def test_copy_is_a_file_of_its_own(blobs: Blobs, tmp_path: Path) -> None:
    source = tmp_path / "w.gguf"
    source.write_bytes(b"a" * 100)
    digest, _ = blobs.adopt(source, copy=True)
    source.write_bytes(b"b" * 100)
    blobs.unchanged(digest)
    assert blobs.read(digest) == b"a" * 100 and not blobs.links()


# ---- locks --------------------------------------------------------------------------------------------------------------------


def test_lock_keeps_threads_apart_and_tells_who_waits(blobs: Blobs) -> None:
    digest = digest_of(b"")
    inside, let_go, waited = threading.Event(), threading.Event(), threading.Event()
    order = []

    def first() -> None:
        with blobs.lock(digest):
            inside.set()
            let_go.wait(120)
            order.append("first")

    def second() -> None:
        with blobs.lock(digest, waited.set):
            order.append("second")

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert inside.wait(120)
    two.start()
    assert waited.wait(120)
    let_go.set()
    one.join(120)
    two.join(120)
    assert order == ["first", "second"]


def test_who_waits_can_give_up(blobs: Blobs) -> None:
    digest = digest_of(b"")

    def cancelled() -> None:
        raise RequestCancelled

    failed: list[Exception] = []

    def other() -> None:
        try:
            with blobs.lock(digest, cancelled):
                pass
        except RequestCancelled as error:
            failed.append(error)

    with blobs.lock(digest):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(120)
    assert len(failed) == 1


def test_lock_has_a_bound(tmp_path: Path) -> None:
    failed: list[Exception] = []

    def other() -> None:
        try:
            with locked(tmp_path / "x.lock", timeout=0.1):
                pass
        except StorageFailed as error:
            failed.append(error)

    with locked(tmp_path / "x.lock"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(120)
    assert "another process has held" in str(failed[0])


def test_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from localrun.store.durable import locked
with locked(Path({str(tmp_path / "x.lock")!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StorageFailed), locked(tmp_path / "x.lock", timeout=0.1):
            pass
        holder.kill()
        holder.wait(120)
        with locked(tmp_path / "x.lock", timeout=120):
            pass
    finally:
        holder.kill()
        holder.communicate()


def test_written_file_is_never_half(tmp_path: Path) -> None:
    """A reader who looks all the time sees one whole content or the other."""
    target = tmp_path / "file"
    contents = [b"a" * 200_000, b"b" * 300_000]
    write_file(target, contents[0])
    stop = threading.Event()
    bad: list[int] = []

    def look() -> None:
        while not stop.is_set():
            try:
                found = target.read_bytes()
            except PermissionError:
                continue  # Windows, in the middle of the replacement
            if found not in contents:
                bad.append(len(found))

    thread = threading.Thread(target=look)
    thread.start()
    last = time.monotonic() + 0.5
    while time.monotonic() < last:
        for content in contents:
            write_file(target, content)
    stop.set()
    thread.join(120)
    assert bad == [] and files(tmp_path) == ["file"]
