"""Compiled kernels: a cache of images in files, and their addresses once loaded.

An image (link.py) is kept under a name that holds a hash of everything the code depends on: the sources of the kernel's module and of what
it imports, Numba, llvmlite and the processor. What is not there is compiled by processes of their own (compile.py), so a process
whose kernels are all cached loads neither Numba nor LLVM.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import localrun
from localrun.kernels_cpu import isa as isas
from localrun.kernels_cpu.executable import CodeMemory
from localrun.kernels_cpu.isa import Isa
from localrun.kernels_cpu.link import Image
from localrun.kernels_cpu.spec import KernelSpec

Progress = Callable[[str, int, int], None]
COMPILE_TIMEOUT_S = 300
KEEP_FOLDERS = 10
KEEP_IMAGES = 10
"""Of one kernel, made from different sources."""
DIGEST_BYTES = 32


CHANGED = "localrun's own files have changed since it was started; start it again"
"""By an upgrade, for instance: new kernels and old Python around them would not understand each other."""


class CompileError(Exception):
    """A kernel could not be compiled or loaded."""


# ---- the cache ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _fingerprint(module: str) -> str:
    """Hash of the sources that a kernel of that module is made from: the module and, of this package, whatever it imports, directly or not.

    So a change in one kernel leaves the images of the others valid.
    """
    files = _modules()
    seen: dict[str, bytes] = {}
    waiting = [module, "compile", "isa", *(name for name in files if name.startswith("isa_"))]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in files:
            seen[name], imports = _source(*files[name])
            waiting.extend(imports)
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + seen[name])
    return digest.hexdigest()[:16]


@functools.cache
def _modules() -> dict[str, tuple[str, int, int]]:
    """The modules of this package and the files that hold them, with the time and size that tell whether a file has been changed."""
    here = str(Path(__file__).parent)
    found: dict[str, tuple[str, int, int]] = {}
    for folder, _, names in os.walk(here):
        prefix = os.path.relpath(folder, here).replace(os.sep, ".") + "."
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)  # noqa: PTH118 quicker
                found[f"{prefix}{name[:-3]}".removeprefix("..").removesuffix(".__init__")] = path, *_stamp(path)
    return found


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)  # noqa: PTH116 quicker
    return found.st_mtime_ns, found.st_size


@functools.cache
def _source(path: str, mtime_ns: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    """What a module of this package holds and which others it may import. Raises CompileError when it is no longer what it was."""
    try:
        source = Path(path).read_bytes()
        same = _stamp(path) == (mtime_ns, size)
    except FileNotFoundError:
        same = False
    if not same:
        raise CompileError(CHANGED)
    return source, tuple(_imports(source.decode()))


_modules()  # now: what is imported now is what runs


_IMPORT = re.compile(rf"{re.escape(__name__.rpartition('.')[0])}(?:\.([\w.]+))?(?:\s+import\s+(\([^)]*\)|[^\n]*))?")


def _imports(source: str) -> Iterator[str]:
    """Modules of this package that a source names, and names taken from them, which may be modules too.

    Every mention counts, also one in a text: a dependency too many does no harm, and each load of a model waits for this, which parsing
    would make thirty times slower.
    """
    for module, names in _IMPORT.findall(source):
        if module:
            yield module
        prefix = f"{module}." if module else ""
        yield from (prefix + name for name in re.findall(r"\w+", names))


@functools.cache
def _installed() -> tuple[str, ...]:
    """Versions of the libraries that make machine code of a kernel, told without importing them or what reads all of their metadata."""
    found = []
    for name in ("numba", "llvmlite"):
        spec = importlib.util.find_spec(name)
        beside = Path(spec.origin).parent.parent if spec and spec.origin else Path()
        folders = [path.name for path in beside.glob(f"{name}-*.dist-info")]
        if len(folders) == 1:
            found.append(folders[0])
        else:
            from importlib.metadata import version

            found.append(version(name))
    return tuple(found)


def cache_folder(root: Path, isa: Isa) -> Path:
    """Where images for this instruction set are kept under `root`, those of the installed Numba and llvmlite."""
    target = isas.processor() if isa.by_processor else isa.target
    made_by = (*_installed(), sys.platform, sys.maxsize, isa.name, *target)
    return root / "kernels" / f"{isa.name}-{hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]}"


def image_path(root: Path, isa: Isa, spec: KernelSpec) -> Path:
    """Where the kernel's image is kept under `root`, as it is made from the sources as they are now."""
    return cache_folder(root, isa) / _file_name(spec)


def _file_name(spec: KernelSpec) -> str:
    return f"{spec.name}.{_fingerprint(spec.module)}.image"


def _write(path: Path, image: Image) -> None:
    """An image behind its hash and a line of what it needs; whole or not at all, also when two processes compile the same kernel."""
    data = json.dumps({"entry": image.entry, "pointers": image.pointers, "needs": image.needs}).encode() + b"\n" + image.code
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(hashlib.sha256(data).digest() + data)
    part.replace(path)


def _read(path: Path) -> Image | None:
    """The image in a file of the cache; None when there is none or it is damaged (running it would end the process)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if digest != hashlib.sha256(data).digest():
        return None
    line, _, code = data.partition(b"\n")
    return Image(code, **json.loads(line))


def worker() -> None:
    """A compiling process: specs as JSON lines on stdin, one answer line each on stdout."""
    from localrun.kernels_cpu.compile import compile_image

    for line in sys.stdin:
        job = json.loads(line)
        try:
            spec = KernelSpec(job["module"], job["factory"], tuple(job["params"]))
            made = compile_image(spec, isas.build(job["isa"]))
            # Who works on kernels changes them while they are compiled; what then came out must not be taken for what was asked for.
            if Path(job["path"]).name != _file_name(spec):
                raise CompileError(CHANGED)
            _write(Path(job["path"]), made)
            answer: dict[str, str] = {}
        except Exception as error:  # reported to the parent, which raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _feed(jobs: queue.SimpleQueue[dict[str, Any]], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Runs one compiling process until there are no jobs left."""
    import subprocess

    command = [sys.executable, "-P", "-c", "from localrun.kernels_cpu.library import worker; worker()"]
    package_root = str(Path(localrun.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdin and process.stdout
            while True:
                job = jobs.get_nowait()
                watchdog = threading.Timer(COMPILE_TIMEOUT_S, process.kill)
                watchdog.start()
                try:
                    process.stdin.write(json.dumps(job) + "\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                finally:
                    watchdog.cancel()
                answers.put({"name": job["name"], **(json.loads(line) if line else {"error": "the compiling process ended"})})
                if not line:
                    return
    except queue.Empty:
        pass
    except OSError as error:
        answers.put({"name": "", "error": f"the compiling process ended: {error}"})


def _forget_oldest(folder: Path) -> None:
    """Removes the folders of earlier libraries and settings beyond the KEEP_FOLDERS used last, and objects of earlier sources likewise."""
    import shutil

    def age(path: Path) -> float:
        try:
            return -path.stat().st_mtime
        except FileNotFoundError:  # another process forgets, too
            return 0.0

    versions: dict[str, list[Path]] = {}
    for path in folder.glob("*.image"):
        versions.setdefault(path.name.rsplit(".", 2)[0], []).append(path)
    for paths in versions.values():
        for old in sorted(paths, key=age)[KEEP_IMAGES:]:
            old.unlink(missing_ok=True)
    for old in sorted(folder.parent.iterdir(), key=age)[KEEP_FOLDERS:]:
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def ensure_compiled(specs: Iterable[KernelSpec], isa: Isa, root: Path, *, n_workers: int = 2, progress: Progress | None = None) -> None:
    """Compiles, in parallel processes, those of `specs` that the cache (see `image_path`) does not hold undamaged.

    progress: called with ('compiling kernels', done, total) as each one is finished.
    Raises CompileError naming the first kernel that failed.
    """
    missing = [spec for spec in dict.fromkeys(specs) if _read(image_path(root, isa, spec)) is None]
    if missing:
        _compile(missing, isa, root, n_workers, progress)


def _compile(missing: Sequence[KernelSpec], isa: Isa, root: Path, n_workers: int, progress: Progress | None) -> None:
    folder = cache_folder(root, isa)
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    _forget_oldest(folder)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for spec in missing:
        jobs.put(
            {"name": spec.name, "module": spec.module, "factory": spec.factory, "params": list(spec.params), "isa": isa.name,
             "path": str(image_path(root, isa, spec))}
        )
    workers = [threading.Thread(target=_feed, args=(jobs, answers)) for _ in range(min(n_workers, len(missing)))]
    for worker in workers:
        worker.start()
    failures = []
    if progress:
        progress("compiling kernels", 0, len(missing))
    for done in range(1, len(missing) + 1):
        answer = answers.get(timeout=2 * COMPILE_TIMEOUT_S)
        if "error" in answer:
            failures.append(f"kernel {answer['name']}: {answer['error']}")
            with contextlib.suppress(queue.Empty):  # what is not begun need not be
                while True:
                    jobs.get_nowait()
            break
        if progress:
            progress("compiling kernels", done, len(missing))
    for worker in workers:
        worker.join()
    if failures:
        raise CompileError(failures[0])


# ---- loading ------------------------------------------------------------------------------------------------------------------


def brief(address: int) -> Callable[[int, int, int, int], None]:
    """The kernel at `address`, to be called from Python: one that takes microseconds, too short for the interpreter to be given away."""
    return ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)


class KernelLibrary:
    """Kernels of one instruction set, loaded into this process; addresses stay valid as long as the object lives."""

    def __init__(self, isa: Isa, root: Path, *, n_workers: int = 2) -> None:
        self.isa = isa
        self._root = root
        self._n_workers = n_workers
        self._memory: list[CodeMemory] = []
        self._addresses: dict[KernelSpec, int] = {}

    def compile(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Compiles what is not cached, for a later `load` to be quick. Raises CompileError. Any thread may call it."""
        ensure_compiled(specs, self.isa, self._root, n_workers=self._n_workers, progress=progress)

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> dict[KernelSpec, int]:
        """Addresses of the kernels, compiling what is not cached. Raises CompileError."""
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._addresses]
        paths = {spec: image_path(self._root, self.isa, spec) for spec in wanted}
        images = {spec: _read(path) for spec, path in paths.items()}
        if missing := [spec for spec, image in images.items() if image is None]:
            _compile(missing, self.isa, self._root, self._n_workers, progress)
            images |= {spec: _read(paths[spec]) for spec in missing}
        found: list[Image] = []
        for spec, image in images.items():
            if image is None:
                raise CompileError(f"kernel {spec.name}: what has just been written to {paths[spec]} cannot be read back")
            found.append(image)
        if found:
            try:
                memory = CodeMemory(found)
            except OSError as error:
                raise CompileError(f"compiled kernels cannot be brought into memory: {error}") from error
            self._memory.append(memory)
            self._addresses |= dict(zip(wanted, memory.addresses, strict=True))
        return dict(self._addresses)

    def address(self, spec: KernelSpec) -> int:
        """Address of one kernel, see `load`."""
        return self.load([spec])[spec]
