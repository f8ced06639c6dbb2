"""Bundles: what goes in comes out, from any offset; what is damaged, short or hostile harms nothing."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrun.errors import BadRequest, LocalrunError, ModelFileRejected, ModelNotFound, RequestCancelled
from localrun.store import CreateSpec, PullProgress, Store
from localrun.store.blobs import DigestMismatch
from localrun.store.bundle import BadBundle, Bundle, import_bundle
from localrun.store.manifests import BadManifest


def quiet(line: PullProgress) -> None:
    """Nobody listens."""


@pytest.fixture
def full(store: Store, gguf: Path) -> Store:
    """Two models that share their weights."""
    store.create("a", CreateSpec(path=gguf, system="one", parameters={"seed": 1}), quiet)
    store.create("me/b:x", CreateSpec(from_name="a", system="two"), quiet)
    return store


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


def exported(store: Store, *names: str) -> bytes:
    return b"".join(Bundle(store, list(names)).chunks())


def contents(store: Store) -> dict[str, bytes]:
    own = store.root / "localrun"
    return {path.relative_to(store.root).as_posix(): path.read_bytes() for path in store.root.rglob("*")
            if path.is_file() and own not in path.parents}  # fmt: skip


def test_round_trip(full: Store, empty: Store) -> None:
    data = exported(full, "a", "me/b:x")
    assert len(data) == Bundle(full, ["A", "me/b:x"]).size and data == exported(full, "a", "me/b:x")
    lines: list[PullProgress] = []
    assert import_bundle(empty, io.BytesIO(data), lines.append) == ["a:latest", "me/b:x"]
    assert contents(empty) == contents(full)
    assert empty.get("me/b:x").digest == full.get("me/b:x").digest
    assert lines[-1].status == "success" and sum(line.status == "writing manifest" for line in lines) == 2
    weights = full.get("a").model_digest
    assert [line.completed for line in lines if line.digest == weights][-1] == len(full.get("a").model_path.read_bytes())


def test_is_a_tar_of_the_folder(full: Store, tmp_path: Path) -> None:
    """Unpacked by any tar, it is a folder of models that works in place."""
    with tarfile.open(fileobj=io.BytesIO(exported(full, "a", "me/b:x"))) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert names[0] == "localrun-bundle.json" and len(names) == len(set(names))
    assert names.index("manifests/registry.ollama.ai/library/a/latest") < names.index("manifests/registry.ollama.ai/me/b/x")
    assert Store(tmp_path / "unpacked").get("me/b:x").system == "two"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_goes_on_at_any_offset(full: Store, data: st.DataObject) -> None:
    bundle = Bundle(full, ["a", "me/b:x"])
    whole = b"".join(bundle.chunks())
    start = data.draw(st.integers(0, len(whole)) | st.sampled_from([0, 511, 512, 513, len(whole) - 1024, len(whole) - 1, len(whole)]))
    assert b"".join(bundle.chunks(start)) == whole[start:]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cut=st.floats(0, 0.999))
def test_cut_short_at_any_place(full: Store, tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    data = exported(full, "a", "me/b:x")
    end = int(cut * (len(data) - 1024))
    target = Store(tmp_path_factory.mktemp("cut"))
    with pytest.raises(BadBundle, match=r"^[^\n]+$"):
        import_bundle(target, io.BytesIO(data[:end]), quiet)
    for model in target.list():
        assert target.get(model.name).digest == full.get(model.name).digest
    assert import_bundle(target, io.BytesIO(data), quiet) == ["a:latest", "me/b:x"]
    assert contents(target) == contents(full)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(place=st.floats(0, 1), value=st.integers(1, 255))
def test_any_changed_byte(full: Store, tmp_path_factory: pytest.TempPathFactory, place: float, value: int) -> None:
    """Whatever is imported of a damaged bundle is what was exported."""
    data = bytearray(exported(full, "a", "me/b:x"))
    data[int(place * (len(data) - 1))] ^= value
    target = Store(tmp_path_factory.mktemp("damaged"))
    try:
        import_bundle(target, io.BytesIO(bytes(data)), quiet)
    except LocalrunError as error:
        assert "\n" not in str(error)
    for model in target.list():
        assert target.get(model.name).digest == full.get(model.name).digest
    good = contents(full)
    for name, content in contents(target).items():
        assert good[name] == content


def test_blobs_that_are_there_are_not_written(full: Store, empty: Store) -> None:
    data = exported(full, "a", "me/b:x")
    import_bundle(empty, io.BytesIO(exported(full, "a")), quiet)
    before = empty.get("a").model_path.stat().st_mtime_ns
    import_bundle(empty, io.BytesIO(data), quiet)
    assert empty.get("a").model_path.stat().st_mtime_ns == before


def test_what_cannot_be_exported(full: Store, gguf: Path) -> None:
    with pytest.raises(BadRequest, match="name the models"):
        Bundle(full, [])
    with pytest.raises(ModelNotFound):
        Bundle(full, ["nowhere"])
    if full.blobs.links():
        with gguf.open("ab") as file:
            file.write(b"x")
        with pytest.raises(ModelFileRejected, match="has changed since"):
            Bundle(full, ["a"])


def test_cancelled(full: Store, empty: Store) -> None:
    with pytest.raises(RequestCancelled):
        import_bundle(empty, io.BytesIO(exported(full, "a")), quiet, lambda: True)
    assert empty.list() == []


def rebuilt(data: bytes, change: dict[str, Any]) -> bytes:
    """The bundle with members renamed, replaced (bytes), or made something else (a tar type)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=out, mode="w") as new:
        for info in old:
            file = old.extractfile(info)
            content = file.read() if file else b""
            what = next((value for part, value in change.items() if part in info.name), None)
            if isinstance(what, str):
                info.name = what
            elif isinstance(what, bytes):
                content = what
            elif isinstance(what, dict):
                content = json.dumps(json.loads(content) | what).encode()
            elif what is tarfile:
                info.type, info.linkname, content = tarfile.SYMTYPE, "/etc/passwd", b""
            info.size = len(content)
            new.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "kind", "line"),
    [
        ({"manifests/": "manifests/../../../../etc/cron.d/x"}, BadRequest, "is no model's manifest|invalid model name"),
        ({"manifests/": "manifests/h/n/m/..%2f"}, BadRequest, "invalid model name"),
        ({"manifests/": "../../x"}, BadBundle, "which no bundle has"),
        ({"manifests/": "/etc/passwd"}, BadBundle, "which no bundle has"),
        ({"manifests/": "manifests/h/n/other/x"}, BadManifest, "not the one that the bundle's index names"),
        ({"manifests/": b"{}"}, BadManifest, "schemaVersion"),
        ({"blobs/": "blobs/../../x"}, BadRequest, "invalid digest format"),
        ({"blobs/": "blobs/sha256-" + "0" * 64}, BadBundle, "index says None"),
        ({"blobs/": b"short"}, BadBundle, "has 5 bytes, and its index says"),
        ({"blobs/": tarfile}, BadBundle, "which is no plain file"),
        ({"localrun-bundle": "other.json"}, BadBundle, "is no bundle of localrun: it begins with 'other.json'"),
        ({"localrun-bundle": b"[]"}, BadBundle, "is damaged"),
        ({"localrun-bundle": {"version": 2}}, BadBundle, "has version 2"),
        ({"localrun-bundle": {"models": []}}, BadBundle, "names no models"),
        ({"localrun-bundle": {"models": [{"name": "../x", "manifest": "sha256:" + "0" * 64}]}}, BadBundle, "is damaged"),
        ({"localrun-bundle": {"blobs": {"sha256:" + "0" * 64: -1}}}, BadBundle, "a size that is none"),
    ],
)
def test_hostile_bundles(full: Store, empty: Store, change: dict[str, Any], kind: type[LocalrunError], line: str) -> None:
    with pytest.raises(kind, match=line) as caught:
        import_bundle(empty, io.BytesIO(rebuilt(exported(full, "a"), change)), quiet)
    assert "\n" not in str(caught.value) and empty.list() == []
    assert {path.name for path in empty.root.parent.iterdir()} <= {"models", "other", "tiny.gguf", "localrun"}


def test_damaged_blob(full: Store, empty: Store) -> None:
    data = exported(full, "a").replace(b"GGUF", b"FUGG")
    with pytest.raises(DigestMismatch, match=r"^the bundle is damaged: digest mismatch, expected"):
        import_bundle(empty, io.BytesIO(data), quiet)
    assert empty.list() == []


@pytest.mark.parametrize("data", [b"", b"no tar", b"\0" * 10240, b"GGUF" * 500])
def test_what_is_no_bundle(empty: Store, data: bytes) -> None:
    with pytest.raises(BadBundle, match=r"^[^\n]+$"):
        import_bundle(empty, io.BytesIO(data), quiet)
