"""The GGUF reader: what is in a file comes out, and what is wrong with one is said in a line."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.models.errors import ModelFileError
from localrun.models.gguf import MAX_ARRAY, GGUFFile, open_gguf
from tests.models.build import Builder, Tensor, string, value


def write(folder: Path, builder: Builder, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(builder.bytes())
    return path


def refused(path: Path, **options: Any) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path.parent))
    return caught.value


# ---- what is in a file comes out ----

_ints = {f"{sign}int{bits}": bits for bits in (8, 16, 32, 64) for sign in ("", "u")}
_single = {
    **{
        kind: st.integers(0, 2**bits - 1) if kind[0] == "u" else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for kind, bits in _ints.items()
    },
    "float32": st.floats(width=32),
    "float64": st.floats(),
    "bool": st.booleans(),
    "string": st.text(st.characters(codec="utf-8")),
}
_kinds = st.sampled_from(sorted(_single))
_values = _kinds.flatmap(lambda k: st.tuples(st.just(k), _single[k])) | _kinds.flatmap(
    lambda k: st.tuples(st.just(f"array[{k}]"), st.lists(_single[k], max_size=20))
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), _values, max_size=8))
def test_every_value_type_comes_back(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, tuple[str, Any]]) -> None:
    keys.pop("general.alignment", None)
    for split in ("split.count", "split.no"):
        keys.pop(split, None)
    path = tmp_path_factory.mktemp("g") / "m.gguf"
    path.write_bytes(Builder([(name, kind, content) for name, (kind, content) in keys.items()]).bytes())
    with open_gguf(path) as gguf:
        assert list(gguf.metadata) == list(keys)
        for name, (kind, content) in keys.items():
            assert gguf.value_types[name] == kind
            # repr: NaN equals itself, and True is not 1
            assert repr(gguf.metadata[name]) == repr(content)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    raw = b"\xff\xfe\xe2\x96"
    keys: list[tuple[str | bytes, str, Any]] = [("general.name", "string", raw), ("tokenizer.ggml.tokens", "array[string]", [raw, "ok"])]
    with open_gguf(write(tmp_path, Builder(keys))) as gguf:
        assert gguf.metadata["general.name"] == raw.decode("utf-8", "replace")
        tokens = gguf.metadata["tokenizer.ggml.tokens"]
        assert [t.encode("utf-8", "surrogateescape") for t in tokens] == [raw, b"ok"]


def _two_tensors(**options: Any) -> Builder:
    tensors = [
        Tensor("a.weight", (4, 2), 0, struct.pack("<8f", *range(8))),
        Tensor("b.weight", (32, 3), 8, bytes(range(102))),
        Tensor("c", (), 0, struct.pack("<f", 2.5)),
    ]
    return Builder([("general.architecture", "string", "llama")], tensors, **options)


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, _two_tensors())
    content = path.read_bytes()
    with open_gguf(path) as gguf:
        assert gguf.architecture == "llama"
        assert [(t.name, t.shape, t.type, t.nbytes) for t in gguf.tensors.values()] == [
            ("a.weight", (4, 2), 0, 32),
            ("b.weight", (32, 3), 8, 102),
            ("c", (), 0, 4),
        ]
        for info in gguf.tensors.values():
            view = gguf.data(info.name)
            assert view.readonly
            assert bytes(view) == content[info.offset : info.offset + info.nbytes]
            view.release()
        assert struct.unpack("<f", gguf.data("c")) == (2.5,)
        gguf.drop_pages("b.weight")
        with pytest.raises(KeyError):
            gguf.data("absent")


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    builder = _two_tensors(alignment=alignment)
    builder.keys.append(("general.alignment", "uint32", alignment))
    with open_gguf(write(tmp_path, builder)) as gguf:
        assert all(info.offset % alignment == 0 for info in gguf.tensors.values())
        assert struct.unpack("<8f", gguf.data("a.weight")) == tuple(range(8))


def test_close_waits_for_views_and_is_idempotent(tmp_path: Path) -> None:
    gguf = open_gguf(write(tmp_path, _two_tensors()))
    view = gguf.data("a.weight")
    gguf.close()
    gguf.close()
    assert struct.unpack("<8f", view) == tuple(range(8))
    with pytest.raises(ValueError, match="closed"):
        gguf.data("a.weight")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's own file table")
def test_a_refused_file_leaves_nothing_open(tmp_path: Path) -> None:
    path = write(tmp_path, _two_tensors())
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:-40])
    refused(broken)
    maps = Path("/proc/self/maps").read_text()
    assert "broken.gguf" not in maps
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and "broken.gguf" in str(fd.readlink())]


def test_agrees_with_the_formats_own_package(shared: Path) -> None:
    from gguf import GGUFReader

    for path in sorted((shared / "arch").glob("*/*.gguf"))[::7]:
        theirs = GGUFReader(path)
        with open_gguf(path) as ours:
            assert set(ours.metadata) == {k for k in theirs.fields if not k.startswith("GGUF.")}
            for key, content in ours.metadata.items():
                if not any(isinstance(c, str) and "\ufffd" in c for c in (content if isinstance(content, list) else [content])):
                    assert content == theirs.fields[key].contents(), key
            assert [(t.name, list(t.shape), t.type, t.offset, t.nbytes) for t in ours.tensors.values()] == [
                (t.name, t.shape.tolist(), int(t.tensor_type), t.data_offset, t.n_bytes) for t in theirs.tensors
            ]


# ---- what is wrong is said in a line ----


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    assert "cannot be opened" in refused(tmp_path / "absent.gguf").problem
    assert "cannot be opened" in refused(tmp_path).problem


def test_messages_stay_on_one_line_whatever_the_file_says(tmp_path: Path) -> None:
    evil = "a\nb\x1b[31m\u2028" + "x" * 500
    error = refused(write(tmp_path, Builder([(evil, "uint32", 1), (evil, "uint32", 2)])))
    assert "twice" in error.problem
    assert "\x1b" not in str(error)
    assert len(str(error).splitlines()) == 1
    assert len(error.field) < 200


def test_version_1_is_named(tmp_path: Path) -> None:
    assert "1 is not supported" in refused(write(tmp_path, Builder(version=1))).problem


def test_array_bound(tmp_path: Path) -> None:
    n = MAX_ARRAY + 1
    raw = Builder([("x", "array[uint8]", [])]).bytes()
    at = raw.index(value("array[uint8]", [])) + 8
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[:at] + struct.pack("<Q", n) + bytes(n))
    assert str(MAX_ARRAY) in refused(path).problem


def test_bools_in_arrays_are_checked(tmp_path: Path) -> None:
    raw = Builder([("x", "array[bool]", [True, True])]).bytes()
    at = raw.index(value("array[bool]", [True, True])) + 17
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[:at] + b"\x02" + raw[at + 1 :])
    assert refused(path).field == "x"


def test_key_that_is_not_utf8(tmp_path: Path) -> None:
    assert refused(write(tmp_path, Builder([(b"\xff\xfe", "uint32", 1)]))).field == "key 1 of 1"


@pytest.mark.parametrize("name", ["general.architecture", None])
def test_architecture_must_be_said(tmp_path: Path, name: str | None) -> None:
    keys: list[tuple[str | bytes, str, Any]] = [] if name is None else [(name, "uint32", 5)]
    with open_gguf(write(tmp_path, Builder(keys))) as gguf, pytest.raises(ModelFileError, match=r"general\.architecture"):
        _ = gguf.architecture


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = _two_tensors().bytes()
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path)


# ---- split files ----


def _split(folder: Path, count: int = 3, stem: str = "big", **changes: Any) -> list[Path]:
    paths = []
    for i in range(count):
        keys: list[tuple[str | bytes, str, Any]] = [
            ("split.no", "uint16", changes.get("numbers", range(count))[i]),
            ("split.count", "uint16", changes.get("counts", [count] * count)[i]),
            ("split.tensors.count", "int32", changes.get("total", count)),
        ]
        if i == 0:
            keys.insert(0, ("general.architecture", "string", "llama"))
        name = changes.get("names", [f"t{j}" for j in range(count)])[i]
        builder = Builder(keys, [Tensor(name, (8,), 0, struct.pack("<8f", *[float(i)] * 8))])
        paths.append(write(folder, builder, f"{stem}-{i + 1:05}-of-{count:05}.gguf"))
    return paths


def _firsts(gguf: GGUFFile) -> list[float]:
    return [struct.unpack("<8f", gguf.data(name))[0] for name in gguf.tensors]


def test_parts_come_as_one(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    with open_gguf(paths[0]) as gguf:
        assert list(gguf.tensors) == ["t0", "t1", "t2"]
        assert [info.file for info in gguf.tensors.values()] == [0, 1, 2]
        assert _firsts(gguf) == [0.0, 1.0, 2.0]
        assert gguf.architecture == "llama"
        assert gguf.file_size == sum(path.stat().st_size for path in paths)


def test_parts_may_lie_elsewhere(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    blobs = [path.rename(tmp_path / f"sha256-{i}") for i, path in enumerate(paths)]
    assert "must be named" in refused(blobs[0]).problem
    with open_gguf(blobs[0], parts=blobs[1:]) as gguf:
        assert _firsts(gguf) == [0.0, 1.0, 2.0]
    assert "3 parts, 2 were given" in refused(blobs[0], parts=blobs[1:2]).problem
    assert "mixed up" in refused(blobs[0], parts=blobs[:0:-1]).problem


def test_what_can_be_wrong_with_parts(tmp_path: Path) -> None:
    for folder in "abcdef":
        (tmp_path / folder).mkdir()
    paths = _split(tmp_path / "a")
    assert "open the first part" in refused(paths[1]).problem
    paths[2].unlink()
    assert paths[2].name in refused(paths[0]).problem
    assert "part" in refused(write(tmp_path, _two_tensors()), parts=paths[1:]).problem
    assert refused(_split(tmp_path / "b", counts=[3, 4, 3])[0]).field == "split.count"
    assert refused(_split(tmp_path / "c", numbers=[0, 2, 1])[0]).field == "split.no"
    assert refused(_split(tmp_path / "d", names=["t", "u", "t"])[0]).field == "tensor t"
    assert refused(_split(tmp_path / "e", total=4)[0]).field == "split.tensors.count"
    paths = _split(tmp_path / "f")
    paths[1].write_bytes(paths[1].read_bytes()[:-8])
    assert paths[1].name in str(refused(paths[0]))


def test_builder_and_reader_disagree_on_nothing_but_the_bytes() -> None:
    """The builder is the other half of these tests: its string and value encodings, spelled out once."""
    assert string("é") == b"\x02\0\0\0\0\0\0\0\xc3\xa9"
    assert value("float32", 1.0) == b"\x06\0\0\0\0\0\x80\x3f"
    assert value("array[uint16]", [1, 2]) == b"\x09\0\0\0\x02\0\0\0\x02\0\0\0\0\0\0\0\x01\0\x02\0"
    assert math.isnan(struct.unpack("<f", value("float32", math.nan)[4:])[0])
