"""The object cache and what happens when compiling or loading goes wrong."""

from __future__ import annotations

import ast
import ctypes
import os
import shutil
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from localrun.kernels_cpu import compile, isa
from localrun.kernels_cpu import compile as compiling
from localrun.kernels_cpu.compile import (
    KEEP_FOLDERS,
    KEEP_OBJECTS,
    CompileError,
    KernelLibrary,
    KernelSpec,
    cache_folder,
    ensure_compiled,
    object_path,
)

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
    assert set(cache_folder(tmp_path, isa.select()).iterdir()) == {object_path(tmp_path, isa.select(), spec) for spec in (FOLLOW, REPLAY)}


def test_a_kernel_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    """The error is the first one's; what was compiled beside it is whole."""
    with pytest.raises(CompileError, match="kernel matmul-matmul-Q9_9: KeyError: 'Q9_9'"):
        ensure_compiled([KernelSpec("matmul", "matmul", ("Q9_9",)), FOLLOW], isa.select(), tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    assert KernelLibrary(isa.select(), tmp_path).address(FOLLOW)


def test_a_damaged_object_is_compiled_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one would end the process."""
    whole = object_path(cache, isa.select(), FOLLOW).read_bytes()
    path = object_path(tmp_path, isa.select(), FOLLOW)
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


def test_halves_without_instructions_for_them() -> None:
    """Both conversions of the generic set: every half, and floats on, beside and halfway between halves."""
    loop = """
define void @kernel(i64 %halves, i64 %floats, i64 %n, i64 %narrow) {
entry:
  %h = inttoptr i64 %halves to ptr
  %f = inttoptr i64 %floats to ptr
  %narrowing = icmp ne i64 %narrow, 0
  br label %next
next:
  %i = phi i64 [0, %entry], [%j, %next]
  %ph = getelementptr half, ptr %h, i64 %i
  %pf = getelementptr float, ptr %f, i64 %i
  %half = load half, ptr %ph
  %float = load float, ptr %pf
  %wide = call float @__extendhfsf2(half %half)
  %small = call half @__truncsfhf2(float %float)
  %newhalf = select i1 %narrowing, half %small, half %half
  %newfloat = select i1 %narrowing, float %float, float %wide
  store half %newhalf, ptr %ph
  store float %newfloat, ptr %pf
  %j = add i64 %i, 1
  %more = icmp ult i64 %j, %n
  br i1 %more, label %next, label %done
done:
  ret void
}"""
    machine = compile.target_machine(isa.build("generic"))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), compile.target_machine(isa.build("generic")))
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine.emit_object(compile.optimise(compile._SOFT_HALF + loop, machine))))
    engine.finalize_object()
    convert = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(engine.get_function_address("kernel"))

    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.zeros(1 << 16, np.float32)
    convert(halves.ctypes.data, floats.ctypes.data, len(halves), 0)
    expected = halves.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(floats.view(np.uint32)[number], expected.view(np.uint32)[number])
    assert np.isnan(floats[~number]).all()

    near = expected.view(np.uint32)[:, None].astype(np.int64) + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001])
    floats = np.concatenate([near.ravel(), np.random.default_rng(0).integers(0, 1 << 32, 100_000)]).astype(np.uint32).view(np.float32)
    halves = np.zeros(len(floats), np.uint16)
    convert(halves.ctypes.data, floats.ctypes.data, len(floats), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = floats.astype(np.float16)
    number = ~np.isnan(floats)
    np.testing.assert_array_equal(halves[number], narrow.view(np.uint16)[number])
    assert np.isnan(halves.view(np.float16)[~number]).all()


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LOCALRUN_ISA=mmx: this machine executes .*generic"):
        isa.select("mmx")


def test_a_change_of_a_source_leaves_kernels_that_do_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried on copies of the sources, one changed at a time; `compile` itself is part of every kernel."""
    shutil.copytree(Path(compiling.__file__).parent, tmp_path / "sources")
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "sources" / "compile.py"))
    modules = ("team", "attention", "experts")

    def read_anew() -> None:
        compiling._fingerprint.cache_clear()
        compiling._source.cache_clear()

    def changed_by(source: str) -> set[str]:
        read_anew()
        before = {module: compiling._fingerprint(module) for module in modules}
        with (tmp_path / "sources" / source).open("a") as file:
            file.write("\n# changed\n")
        read_anew()
        return {module for module in modules if compiling._fingerprint(module) != before[module]}

    try:
        assert changed_by("kv.py") == {"attention"}
        assert changed_by("experts.py") == {"experts"}
        assert changed_by("formats/__init__.py") >= {"experts"}
        assert changed_by("simd.py") == changed_by("isa_avx2.py") == changed_by("compile.py") == set(modules)
    finally:
        read_anew()


def test_no_import_of_a_kernel_is_overlooked() -> None:
    """What the quick look at a source finds is at least what the parser finds."""
    package = compiling.__name__.rpartition(".")[0]
    found: set[str] = set()
    for path in Path(compiling.__file__).parent.rglob("*.py"):
        parsed: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                parsed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parsed |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        own = {name.removeprefix(f"{package}.") for name in parsed if name.startswith(f"{package}.")}
        assert own <= set(compiling._imports(path.read_text(encoding="utf-8"))), path.name
        found |= own
    assert {"simd", "simd.load_i64", "formats", "formats.BY_NAME", "head"} <= found


def test_only_the_latest_objects_of_a_kernel_are_kept(tmp_path: Path) -> None:
    path = object_path(tmp_path, isa.select(), FOLLOW)
    path.parent.mkdir(parents=True)
    for age in range(KEEP_OBJECTS + 5):
        old = path.with_name(f"team-follow.{age}.o")
        old.write_bytes(b"")
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    ensure_compiled([REPLAY], isa.select(), tmp_path)
    assert {old.name for old in path.parent.glob("team-follow.*")} == {f"team-follow.{age}.o" for age in range(KEEP_OBJECTS)}


def test_only_the_folders_used_last_are_kept(tmp_path: Path) -> None:
    folder = cache_folder(tmp_path, isa.select())
    for age in range(KEEP_FOLDERS + 5):
        old = folder.parent / f"old-{age}"
        old.mkdir(parents=True)
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    KernelLibrary(isa.select(), tmp_path).load([KernelSpec("team", "replay")])
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, *(f"old-{age}" for age in range(KEEP_FOLDERS - 1))}
