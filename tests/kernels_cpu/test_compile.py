"""The object cache and what happens when compiling or loading goes wrong."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from localrun.kernels_cpu import isa
from localrun.kernels_cpu.compile import CompileError, KernelLibrary, KernelSpec, cache_folder, ensure_compiled

FOLLOW = KernelSpec("team", "follow")
REPLAY = KernelSpec("team", "replay")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds FOLLOW."""
    root = tmp_path_factory.mktemp("cache")
    ensure_compiled([FOLLOW], isa.select(), root)
    return root


def test_what_is_cached_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(cache / "no-python"))
    steps: list[tuple[str, int, int]] = []
    assert KernelLibrary(isa.select(), cache).load([FOLLOW, FOLLOW], lambda *step: steps.append(step))[FOLLOW]
    assert steps == []
    with pytest.raises(CompileError, match=r"the compiling process ended: .*no-python"):
        ensure_compiled([FOLLOW, REPLAY], isa.select(), cache)


def test_progress_counts_what_is_missing(cache: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    ensure_compiled([REPLAY, FOLLOW, REPLAY], isa.select(), tmp_path, progress=lambda *step: steps.append(step))
    assert steps == [("compiling kernels", done, 2) for done in range(3)]
    assert {path.name for path in cache_folder(tmp_path, isa.select()).iterdir()} == {"team-follow.o", "team-replay.o"}


def test_a_kernel_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    """The error is the first one's; what was compiled beside it is whole."""
    with pytest.raises(CompileError, match="kernel matmul-matmul-Q9_9: KeyError: 'Q9_9'"):
        ensure_compiled([KernelSpec("matmul", "matmul", ("Q9_9",)), FOLLOW], isa.select(), tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    assert KernelLibrary(isa.select(), tmp_path).address(FOLLOW)


def test_a_damaged_object_is_compiled_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one would end the process."""
    whole = (cache_folder(cache, isa.select()) / "team-follow.o").read_bytes()
    path = cache_folder(tmp_path, isa.select()) / "team-follow.o"
    path.parent.mkdir(parents=True)
    for damaged in (b"", whole[: len(whole) // 3], whole[:-1] + b"?"):
        path.write_bytes(damaged)
        with monkeypatch.context() as patch, pytest.raises(CompileError, match="the compiling process ended"):
            patch.setattr(sys, "executable", str(tmp_path / "no-python"))
            ensure_compiled([FOLLOW], isa.select(), tmp_path)
    assert KernelLibrary(isa.select(), tmp_path).address(FOLLOW)
    assert path.read_bytes() == whole


def test_instruction_sets_do_not_share_objects(tmp_path: Path) -> None:
    folders = {cache_folder(tmp_path, isa.build(name)) for name in isa.available()}
    assert len(folders) == len(isa.available())


def test_a_loaded_kernel_runs(cache: Path) -> None:
    """`follow` leaves by itself when no pass is published."""
    state = (ctypes.c_int64 * 32)()
    library = KernelLibrary(isa.select(), cache)
    assert library.address(FOLLOW) == library.address(FOLLOW)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(library.address(FOLLOW))(ctypes.addressof(state), 0, 0, 0)
    assert list(state) == [0] * 32


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LOCALRUN_ISA=mmx: this machine executes .*generic"):
        isa.select("mmx")
