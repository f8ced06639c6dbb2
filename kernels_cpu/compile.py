"""From a kernel's Python to machine code in memory, through a cache of object files.

A kernel is made by a factory, `factory(isa, *params)`, that returns a function `f(args, head, chunk, thread)` of four int64 for Numba.
Numba types and lowers it, LLVM optimises it for the chosen instruction set (not for the host, so that every set can be tried on one
machine), and the object file is kept under a name that holds a hash of everything the code depends on: the sources of the kernel's module
and of what it imports, Numba, llvmlite and the CPU's features.
Loading from the cache needs llvmlite only, neither Numba nor a compiler.

    void kernel(i64 args, i64 head, i64 chunk, i64 thread)

args: address of the instruction's int64 arguments; head: address of the step header; chunk: which part of the work; thread: which
thread runs it (for scratch memory). What the arguments mean is said by each kernel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from localrun.kernels_cpu import isa as isas
from localrun.kernels_cpu.isa import Isa

Progress = Callable[[str, int, int], None]
COMPILE_TIMEOUT_S = 300
KEEP_FOLDERS = 10
KEEP_OBJECTS = 10
"""Of one kernel, made from different sources."""
ENTRY = "kernel"

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


@dataclass(frozen=True)
class KernelSpec:
    """Which kernel: `factory` in module `module` of this package, with its compile-time parameters."""

    module: str
    factory: str
    params: tuple[int | str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.module, self.factory, *map(str, self.params)])


class CompileError(Exception):
    """A kernel could not be compiled or loaded."""


# ---- compiling ----------------------------------------------------------------------------------------------------------------


def kernel_ir(spec: KernelSpec, isa: Isa) -> str:
    """LLVM IR, not yet optimised, of the kernel's whole call tree, with one visible function, ENTRY. Imports Numba."""
    import numba
    from numba.core import config
    from numba.core.compiler import Flags, compile_extra
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    # Optimising is done once, below, for the instruction set asked for; the loop vectoriser has nothing to add to explicit vectors.
    config.OPT = config._OptLevel("0")
    config.LOOP_VECTORIZE = 0
    config.SLP_VECTORIZE = 0
    factory = getattr(importlib.import_module(f"localrun.kernels_cpu.{spec.module}"), spec.factory)
    function = factory(isa, *spec.params)
    flags = Flags()
    flags.nrt = False
    flags.error_model = "numpy"
    flags.enable_pyobject = False
    flags.noalias = False
    with _lowering_only(), global_compiler_lock:
        result = compile_extra(
            cpu_target.typing_context, cpu_target.target_context, function, (numba.int64,) * 4, numba.void, flags, {}
        )
        result.library.finalize()  # links in what it calls
        text = result.library.get_llvm_str()
    return _with_entry(text, result.fndesc.llvm_func_name) + (_SOFT_HALF if isa.name == "generic" else "")


@contextlib.contextmanager
def _lowering_only() -> Iterator[None]:
    """Keeps Numba from making machine code of every function for this machine, which nobody would run, and from wrapping it for Python.

    It would take a quarter of the compile time, and fail for another architecture's intrinsics. Functions compiled inside can be called by
    kernels, not by Python.
    """
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.core.cpu import CPUContext
    from numba.core.lowering import Lower

    changes: list[tuple[type, str, Callable[..., Any]]] = [
        (JITCodeLibrary, "_finalize_specific", lambda library: None),
        (JITCPUCodegen, "_add_module", lambda codegen, module: None),
        (Lower, "create_cpython_wrapper", lambda lower, release_gil=False: None),
        # What identifies a function to Numba must be built in and unique.
        (CPUContext, "get_executable", lambda context, library, fndesc, env: [].append),
    ]
    before = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, change in changes:
        setattr(owner, name, change)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


def _with_entry(text: str, function: str) -> str:
    """Adds ENTRY, which calls the Numba function (return slot and exception slot first) and ignores its status: kernels do not raise."""
    entry = f"""
define void @{ENTRY}(i64 %args, i64 %head, i64 %chunk, i64 %thread) {{
  %r = alloca ptr
  %e = alloca ptr
  %s = call i32 @"{function}"(ptr %r, ptr %e, i64 %args, i64 %head, i64 %chunk, i64 %thread)
  ret void
}}
"""
    return text + entry


_SOFT_HALF = """
define float @__extendhfsf2(half %h) {
  %b = bitcast half %h to i16
  %w = zext i16 %b to i32
  %s = and i32 %w, 32768
  %sign = shl i32 %s, 16
  %m = and i32 %w, 32767
  %shifted = shl i32 %m, 13
  %tiny = bitcast i32 %shifted to float
  %scaled = fmul float %tiny, 0x46F0000000000000
  %finite = bitcast float %scaled to i32
  %special = or i32 %shifted, 2139095040
  %isspecial = icmp uge i32 %m, 31744
  %magnitude = select i1 %isspecial, i32 %special, i32 %finite
  %bits = or i32 %magnitude, %sign
  %r = bitcast i32 %bits to float
  ret float %r
}

define half @__truncsfhf2(float %f) {
  %u = bitcast float %f to i32
  %high = lshr i32 %u, 16
  %sign = and i32 %high, 32768
  %a = and i32 %u, 2147483647
  %af = bitcast i32 %a to float
  %sum = fadd float %af, 5.0e-01
  %sumbits = bitcast float %sum to i32
  %small = sub i32 %sumbits, 1056964608
  %last = lshr i32 %a, 13
  %odd = and i32 %last, 1
  %rounding = add i32 %odd, 3355447295
  %rounded = add i32 %a, %rounding
  %normal = lshr i32 %rounded, 13
  %issmall = icmp ult i32 %a, 947912704
  %finite = select i1 %issmall, i32 %small, i32 %normal
  %islarge = icmp uge i32 %a, 1199570944
  %orinf = select i1 %islarge, i32 31744, i32 %finite
  %payload = and i32 %last, 1023
  %nan = or i32 %payload, 32256
  %isnan = icmp ugt i32 %a, 2139095040
  %magnitude = select i1 %isnan, i32 %nan, i32 %orinf
  %bits = or i32 %magnitude, %sign
  %half = trunc i32 %bits to i16
  %r = bitcast i16 %half to half
  ret half %r
}
"""
"""What LLVM calls to convert between halves and floats on a machine without instructions for it; not every process has it from elsewhere.

Widening: shifting a half's bits into a float's place makes it too small by 2**112, subnormal or not. Narrowing: a float below 2**-14 is
rounded to a half's subnormal by adding 0.5, whose last bit is worth as much; others by adding all but one of the bits to be cut off, one
more if the last that stays is odd, and by the difference of the exponents' biases.
"""
_HELPERS = (ENTRY, "__extendhfsf2", "__truncsfhf2")


def target_machine(isa: Isa, triple: str | None = None) -> llvm.TargetMachine:
    """LLVM's code generator for that instruction set."""
    target = llvm.Target.from_triple(triple) if triple else llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3, reloc="default", codemodel="jitdefault", jit=True)


def optimise(text: str, machine: llvm.TargetMachine, triple: str | None = None) -> llvm.ModuleRef:
    """Parses IR and runs LLVM's -O3 over it with everything but ENTRY (and what only the code generator calls) made internal."""
    module = llvm.parse_assembly(text)
    module.triple = triple or llvm.get_default_triple()
    module.data_layout = str(machine.target_data)
    for function in module.functions:
        if not function.is_declaration and function.name not in _HELPERS:
            function.linkage = "internal"
            if " x " in str(function.global_value_type):
                # Takes vectors: passing them through memory would cost more than the work.
                function.add_function_attribute("alwaysinline")
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.inlining_threshold = 100_000
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def compile_object(spec: KernelSpec, isa: Isa) -> bytes:
    """The kernel's object file. Imports Numba; takes from a few tenths of a second to a few seconds."""
    machine = target_machine(isa)
    return machine.emit_object(optimise(kernel_ir(spec, isa), machine))


def inspect_asm(spec: KernelSpec, isa: Isa, triple: str | None = None) -> str:
    """The kernel's assembly, to be read; `triple` for another machine's, e.g. 'aarch64-linux-gnu'."""
    if triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    machine = target_machine(isa, triple)
    return machine.emit_assembly(optimise(kernel_ir(spec, isa), machine, triple))


# ---- the cache ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _fingerprint(module: str) -> str:
    """Hash of the sources that a kernel of that module is made from: the module and, of this package, whatever it imports, directly or not.

    So a change in one kernel leaves the objects of the others valid.
    """
    here = Path(__file__).parent
    seen: dict[str, bytes] = {}
    waiting = [module, "compile", "isa", *(path.stem for path in here.glob("isa_*.py"))]
    while waiting:
        name = waiting.pop()
        if name not in seen and (found := _source(here, name)) is not None:
            seen[name], imports = found
            waiting.extend(imports)
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + seen[name])
    return digest.hexdigest()[:16]


@functools.cache
def _source(here: Path, name: str) -> tuple[bytes, tuple[str, ...]] | None:
    """What a module of this package holds and which others it may import; None: there is no such module."""
    path = here.joinpath(*name.split(".")).with_suffix(".py")
    if not path.exists():
        path = here.joinpath(*name.split("."), "__init__.py")
        if not path.exists():
            return None
    source = path.read_bytes()
    return source, tuple(_imports(source.decode()))


_IMPORT = re.compile(rf"\b{re.escape(__name__.rpartition('.')[0])}(?:\.([\w.]+))?(?:\s+import\s+(\([^)]*\)|[^\n]*))?")


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
    """Versions of the libraries that make machine code of a kernel."""
    from importlib.metadata import version

    return version("numba"), llvmlite.__version__


def cache_folder(root: Path, isa: Isa) -> Path:
    """Where object files for this instruction set are kept under `root`, those of the installed Numba and llvmlite."""
    libraries = (*_installed(), sys.platform, sys.maxsize, isa.name, isa.cpu, isa.features)
    return root / "kernels" / f"{isa.name}-{hashlib.sha256(repr(libraries).encode()).hexdigest()[:16]}"


def object_path(root: Path, isa: Isa, spec: KernelSpec) -> Path:
    """Where the kernel's object is kept under `root`, as it is made from the sources as they are now."""
    return cache_folder(root, isa) / f"{spec.name}.{_fingerprint(spec.module)}.o"


def _write(path: Path, data: bytes) -> None:
    """An object behind its hash; whole or not at all, also when two processes compile the same kernel."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(hashlib.sha256(data).digest() + data)
    part.replace(path)


def _read(path: Path) -> bytes | None:
    """The object in a file of the cache; None when there is none or it is damaged (loading it would end the process)."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:32], content[32:]
    return data if digest == hashlib.sha256(data).digest() else None


def _worker() -> None:
    """A compiling process: specs as JSON lines on stdin, one answer line each on stdout."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            spec = KernelSpec(job["module"], job["factory"], tuple(job["params"]))
            _write(Path(job["path"]), compile_object(spec, isas.build(job["isa"])))
            answer: dict[str, str] = {}
        except Exception as error:  # reported to the parent, which raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _feed(jobs: queue.SimpleQueue[dict[str, Any]], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Runs one compiling process until there are no jobs left."""
    command = [sys.executable, "-c", "from localrun.kernels_cpu.compile import _worker; _worker()"]
    package_root = str(Path(importlib.import_module("localrun").__file__ or "").parent.parent)
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
    versions: dict[str, list[Path]] = {}
    for path in folder.glob("*.o"):
        versions.setdefault(path.name.rsplit(".", 2)[0], []).append(path)
    for paths in versions.values():
        for old in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_OBJECTS:]:
            old.unlink(missing_ok=True)
    folders = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in folders[KEEP_FOLDERS:]:
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def ensure_compiled(specs: Iterable[KernelSpec], isa: Isa, root: Path, *, n_workers: int = 2, progress: Progress | None = None) -> None:
    """Compiles, in parallel processes, those of `specs` that the cache (see `object_path`) does not hold undamaged.

    progress: called with ('compiling kernels', done, total) as each one is finished.
    Raises CompileError naming the first kernel that failed.
    """
    folder = cache_folder(root, isa)
    missing = [spec for spec in dict.fromkeys(specs) if _read(object_path(root, isa, spec)) is None]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    _forget_oldest(folder)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for spec in missing:
        jobs.put(
            {"name": spec.name, "module": spec.module, "factory": spec.factory, "params": list(spec.params), "isa": isa.name,
             "path": str(object_path(root, isa, spec))}
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


class KernelLibrary:
    """Kernels of one instruction set, loaded into this process; addresses stay valid as long as the object lives."""

    def __init__(self, isa: Isa, root: Path, *, n_workers: int = 2) -> None:
        self.isa = isa
        self._root = root
        self._n_workers = n_workers
        self._engines: list[Any] = []
        self._addresses: dict[KernelSpec, int] = {}

    def compile(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Compiles what is not cached, for a later `load` to be quick. Raises CompileError. Any thread may call it."""
        ensure_compiled(specs, self.isa, self._root, n_workers=self._n_workers, progress=progress)

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> dict[KernelSpec, int]:
        """Addresses of the kernels, compiling what is not cached. Raises CompileError."""
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._addresses]
        self.compile(wanted, progress)
        for spec in wanted:
            self._addresses[spec] = self._link(spec, object_path(self._root, self.isa, spec))
        return dict(self._addresses)

    def address(self, spec: KernelSpec) -> int:
        """Address of one kernel, see `load`."""
        return self.load([spec])[spec]

    def _link(self, spec: KernelSpec, path: Path) -> int:
        data = _read(path)
        if data is None:
            raise CompileError(f"kernel {spec.name}: the object just written to {path} cannot be read back")
        try:
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(self.isa))
            engine.add_object_file(llvm.ObjectFileRef.from_data(data))
            engine.finalize_object()
            address = int(engine.get_function_address(ENTRY))
        except RuntimeError as error:
            raise CompileError(f"kernel {spec.name}: the object {path} cannot be loaded: {error}") from error
        if not address:
            raise CompileError(f"kernel {spec.name}: the object {path} holds no kernel")
        self._engines.append(engine)
        return address
