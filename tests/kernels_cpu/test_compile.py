"""The object cache and what happens when library or loading goes wrong."""

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

from localrun.kernels_cpu import compile, isa, library
from localrun.kernels_cpu.executable import CodeMemory
from localrun.kernels_cpu.library import (
    KEEP_FOLDERS,
    KEEP_IMAGES,
    CompileError,
    KernelLibrary,
    cache_folder,
    ensure_compiled,
    image_path,
)
from localrun.kernels_cpu.link import Image, LinkError, image
from localrun.kernels_cpu.spec import KernelSpec

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


def test_the_folder_it_happens_to_start_in_is_not_searched_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("localrun", "numba"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ensure_compiled([FOLLOW], isa.select(), tmp_path / "cache")


def test_progress_counts_what_is_missing(cache: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    ensure_compiled([REPLAY, FOLLOW, REPLAY], isa.select(), tmp_path, progress=lambda *step: steps.append(step))
    assert steps == [("compiling kernels", done, 2) for done in range(3)]
    assert set(cache_folder(tmp_path, isa.select()).iterdir()) == {image_path(tmp_path, isa.select(), spec) for spec in (FOLLOW, REPLAY)}


def test_a_kernel_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    """The error is the first one's; what was compiled beside it is whole."""
    with pytest.raises(CompileError, match="kernel matmul-matmul-Q9_9: KeyError: 'Q9_9'"):
        ensure_compiled([KernelSpec("matmul", "matmul", ("Q9_9",)), FOLLOW], isa.select(), tmp_path)
    assert not list(tmp_path.rglob("*.part"))
    assert KernelLibrary(isa.select(), tmp_path).address(FOLLOW)


def test_what_changed_sources_give_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when somebody edits a kernel while it is compiled: its code would be found under the name of what it was before."""
    monkeypatch.setattr(library, "_fingerprint", lambda module: "of before")
    with pytest.raises(CompileError, match=r"kernel team-follow: .*have changed since it was started; start it again"):
        ensure_compiled([FOLLOW], isa.select(), tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_damaged_object_is_compiled_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one would end the process."""
    whole = image_path(cache, isa.select(), FOLLOW).read_bytes()
    path = image_path(tmp_path, isa.select(), FOLLOW)
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


def linked(text: str, set_name: str = "generic", triple: str | None = None) -> Image:
    """The image of LLVM IR whose entry is `kernel`."""
    machine = compile.target_machine(isa.build(set_name), triple)
    return image(machine.emit_object(compile.optimise(text, machine, triple)), "kernel")


def loaded(text: str) -> CodeMemory:
    return CodeMemory([linked(text)])


TABLE = """
@zero = private constant i64 10
@one = private constant i64 20
@two = private constant i64 31
@places = private constant { i64, [3 x ptr] } { i64 0, [3 x ptr] [ptr @zero, ptr @one, ptr @two] }
declare double @cbrt(double)
define void @kernel(i64 %args, i64 %head, i64 %chunk, i64 %thread) {
  %p = getelementptr { i64, [3 x ptr] }, ptr @places, i64 0, i32 1, i64 %chunk
  %q = load ptr, ptr %p
  %value = load i64, ptr %q
  %x = sitofp i64 %thread to double
  %root = call double @cbrt(double %x)
  %n = fptosi double %root to i64
  %sum = add i64 %value, %n
  %out = inttoptr i64 %args to ptr
  store i64 %sum, ptr %out
  ret void
}"""


def test_an_image_finds_its_constants_its_addresses_and_the_c_library() -> None:
    """A table of addresses, constants elsewhere, a call from outside; twice in one memory, and each with its own."""
    one = linked(TABLE)
    assert one.pointers and set(one.needs) == {"cbrt"}
    memory = CodeMemory([one, one])
    result = ctypes.c_int64()
    for address in memory.addresses:
        kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)
        for chunk, expected in enumerate((10, 20, 31)):
            kernel(ctypes.addressof(result), 0, chunk, 27)
            assert result.value == expected + 3


def test_an_image_for_arm_refers_by_distance() -> None:
    """adrp counts pages from where it stands, so the code is cut by one and asked for what lies in the next."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    body = "\n".join(f"  store volatile i64 {n}, ptr %out" for n in range(2000))
    text = TABLE.replace("  store i64 %sum", body + "\n  store i64 %sum")
    made = linked(text, "neon", "aarch64-linux-gnu")
    words = [int.from_bytes(made.code[i : i + 4], "little") for i in range(0, len(made.code) - 3, 4)]
    assert len(made.code) > 4096
    places = made.pointers[0] - 8
    reached = set()
    for i, word in enumerate(words[:-1]):
        follows = words[i + 1]
        if word & 0x9F000000 == 0x90000000 and follows & 0xFFC00000 == 0x91000000:  # adrp, add
            pages = (word >> 29 & 3) | (word >> 5 & 0x7FFFF) << 2
            reached.add((4 * i // 4096 + pages) * 4096 + (follows >> 10 & 0xFFF))
    assert reached & {places, places + 8}
    stub = made.needs["cbrt"] - 8
    calls = {4 * i + 4 * (word & 0x3FFFFFF) for i, word in enumerate(words) if word >> 26 == 0b100101}
    assert stub in calls


def test_what_an_image_cannot_have_is_refused() -> None:
    written = TABLE.replace("@zero = private constant", "@zero = private global")
    with pytest.raises(LinkError, match=r"has data that is written \(\.(data|bss)"):
        linked(written.replace("  store i64 %sum", "  store i64 1, ptr @zero\n  store i64 %sum"))
    missing = linked(TABLE.replace("cbrt", "no_such_function"))
    with pytest.raises(OSError, match="no no_such_function"):
        CodeMemory([missing])


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
    memory = loaded(compile._SOFT_HALF + loop)
    convert = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(memory.addresses[0])

    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.zeros(1 << 16, np.float32)
    convert(halves.ctypes.data, floats.ctypes.data, len(halves), 0)
    with np.errstate(invalid="ignore"):  # signalling NaNs, of which some machines' own conversions tell
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
    shutil.copytree(Path(library.__file__).parent, tmp_path / "sources")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "sources" / "library.py"))
    modules = ("team", "attention", "experts")

    def read_anew() -> None:
        library._fingerprint.cache_clear()
        library._source.cache_clear()
        library._modules.cache_clear()

    def changed_by(source: str) -> set[str]:
        read_anew()
        before = {module: library._fingerprint(module) for module in modules}
        with (tmp_path / "sources" / source).open("a") as file:
            file.write("\n# changed\n")
        read_anew()
        return {module for module in modules if library._fingerprint(module) != before[module]}

    try:
        assert changed_by("kv.py") == {"attention"}
        assert changed_by("experts.py") == {"experts"}
        assert changed_by("formats/__init__.py") >= {"experts"}
        for change in (lambda path: path.write_text("# of another version\n"), Path.unlink):
            library._fingerprint.cache_clear()
            library._source.cache_clear()  # as in a process that was forked from one that has only imported
            change(tmp_path / "sources" / "kv.py")
            with pytest.raises(CompileError, match="changed since it was started; start it again"):
                library._fingerprint("attention")
            assert library._fingerprint("experts")
        assert changed_by("simd.py") == changed_by("isa_avx2.py") == changed_by("compile.py") == set(modules)
    finally:
        read_anew()


def test_no_import_of_a_kernel_is_overlooked() -> None:
    """What the quick look at a source finds is at least what the parser finds."""
    package = library.__name__.rpartition(".")[0]
    found: set[str] = set()
    for path in Path(library.__file__).parent.rglob("*.py"):
        parsed: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                parsed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parsed |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        own = {name.removeprefix(f"{package}.") for name in parsed if name.startswith(f"{package}.")}
        assert own <= set(library._imports(path.read_text(encoding="utf-8"))), path.name
        found |= own
    assert {"simd", "simd.load_i64", "formats", "formats.BY_NAME", "head"} <= found


def test_only_the_latest_objects_of_a_kernel_are_kept(tmp_path: Path) -> None:
    path = image_path(tmp_path, isa.select(), FOLLOW)
    path.parent.mkdir(parents=True)
    for age in range(KEEP_IMAGES + 5):
        old = path.with_name(f"team-follow.{age}.image")
        old.write_bytes(b"")
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    path.with_name("team-follow.gone.image").symlink_to(tmp_path / "gone")  # as one that another process removes meanwhile
    ensure_compiled([REPLAY], isa.select(), tmp_path)
    assert {old.name for old in path.parent.glob("team-follow.*")} == {f"team-follow.{age}.image" for age in range(KEEP_IMAGES)}


def test_only_the_folders_used_last_are_kept(tmp_path: Path) -> None:
    folder = cache_folder(tmp_path, isa.select())
    for age in range(KEEP_FOLDERS + 5):
        old = folder.parent / f"old-{age}"
        old.mkdir(parents=True)
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    KernelLibrary(isa.select(), tmp_path).load([KernelSpec("team", "replay")])
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, *(f"old-{age}" for age in range(KEEP_FOLDERS - 1))}
