"""The file of tile shapes: what is written is read, by whom it is meant for; what is damaged or foreign is ignored; processes do not hurt
one another."""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

import pytest

from localrun.kernels_cpu import isa, shapes
from localrun.kernels_cpu.shapes import NEVER, Shape, ShapesFile

ONE, TWO = Shape(5, 21, 2, 3), Shape(NEVER, 9, 4, 1)


def file(root: Path, threads: int = 2, *, packed: bool = True) -> ShapesFile:
    return ShapesFile(root, isa.select("generic"), threads, packed=packed)


def test_what_is_written_is_read_by_those_whom_it_is_meant_for(tmp_path: Path) -> None:
    assert file(tmp_path).read(["Q4_K"]) == {}
    file(tmp_path).write({"Q4_K": ONE, "Q6_K": TWO})
    file(tmp_path, threads=4).write({"Q4_K": TWO})
    file(tmp_path).write({"Q6_K": ONE})
    assert file(tmp_path).read(["Q4_K", "Q6_K", "Q8_0"]) == {"Q4_K": ONE, "Q6_K": ONE}
    assert file(tmp_path, threads=4).read(["Q4_K", "Q6_K"]) == {"Q4_K": TWO}
    assert file(tmp_path, packed=False).read(["Q4_K"]) == {}


def test_another_processor_and_other_kernels_know_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path).write({"Q4_K": ONE})
    with monkeypatch.context() as patched:
        patched.setattr(isa, "processor", lambda: ("another",))
        assert file(tmp_path).read(["Q4_K"]) == {}
        file(tmp_path).write({"Q4_K": TWO})
        assert file(tmp_path).read(["Q4_K"]) == {"Q4_K": TWO}
    with monkeypatch.context() as patched:
        patched.setattr(shapes, "image_path", lambda root, isa, spec: Path(f"{spec.name}.other.image"))
        assert file(tmp_path).read(["Q4_K"]) == {}
        file(tmp_path).write({"Q4_K": TWO})
    assert file(tmp_path).read(["Q4_K"]) == {}, "timed with other kernels, which are those in the file now"
    assert len(json.loads(file(tmp_path).path.read_text())["shapes"]) == 2, "one of each processor"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"null", b"[]", b'{"shapes": 3}', b'{"shapes": [3]}', b'{"shapes": [{}]}', b'{"shapes": ' * 5000,
        b'{"shapes": [{"wide_from": 6, "matrix_from": 13, "share": 0, "quarters": 4}]}',
        b'{"shapes": [{"wide_from": 6, "matrix_from": 1, "share": 1, "quarters": 4}]}',
        b'{"shapes": [{"wide_from": [6], "matrix_from": 13, "share": 1, "quarters": 4}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_made_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    known = file(tmp_path)
    known.path.parent.mkdir(parents=True)
    known.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert known.read(["Q4_K"]) == {}
    assert str(known.path) in caplog.text
    known.write({"Q4_K": ONE})
    caplog.clear()
    assert known.read(["Q4_K"]) == {"Q4_K": ONE}
    assert not caplog.text


def test_a_file_that_cannot_be_written_or_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = file(tmp_path)
    known.path.mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        known.write({"Q4_K": ONE})
        assert known.read(["Q4_K"]) == {}
    assert "cannot be kept" in caplog.text
    assert "cannot be read" in caplog.text
    assert [path.name for path in known.path.parent.iterdir()] == [known.path.name], "nothing is left lying about"


def _write_often(root: Path, name: str) -> None:
    for _ in range(50):
        file(root).write({name: ONE})


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_write_often, args=(tmp_path, name)) for name in ("Q4_K", "Q6_K")]
    for writer in writers:
        writer.start()
    with caplog.at_level(logging.WARNING):
        while any(writer.is_alive() for writer in writers):
            found = file(tmp_path).read(["Q4_K", "Q6_K"])
            assert set(found.values()) <= {ONE}
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert not caplog.text
    assert file(tmp_path).read(["Q4_K", "Q6_K"])
    assert [path.name for path in file(tmp_path).path.parent.iterdir()] == ["shapes.json"]
