"""The floors of the house: who may import whom, read from the source, and what a start must not load, seen in a process of its own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels_cpu", "kernels_gpu", "models", "localrun", "cli")

# What each room may import besides itself and the version number. An import never points up, and the terminal knows only HTTP.
ALLOWED: dict[str, set[str]] = {
    "kernels_cpu": set(),
    "kernels_gpu": {"kernels_cpu"},
    "models": {"kernels_cpu", "kernels_gpu"},
    "base": set(),
    "quantize": {"base", "models", "kernels_cpu"},
    "convert": {"models", "kernels_cpu", "quantize", "text"},
    "text": {"base", "models"},
    "store": {"base", "text", "models", "kernels_cpu", "quantize"},
    "engine": {"base", "text", "models", "kernels_cpu", "kernels_gpu"},
    "api": {"base", "text", "store", "engine", "models"},
    "daemon": {"base", "text", "store", "engine", "api", "models"},
    "cli": set(),
    "entry": {"cli"},
}
# `localrun serve` is the daemon: the one place where the terminal program becomes it, inside the function.
EXCEPTIONS = {("cli/serve.py", f"localrun.{name}") for name in ("daemon.serve", "settings", "settings_page", "errors")}
# They hand the environment to Settings, to a compiling process below the floor that has them, or to a library.
PASSING_ON = {"localrun/daemon/serve.py", "kernels_cpu/library.py", "localrun/engine/__init__.py"}
BASE = ("durations", "errors", "messages", "rates", "settings", "settings_page")


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Import name of a source file: the folders beside `localrun` live under it."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "localrun":
        parts.insert(0, "localrun")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def room(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "version"
    if parts[1] in BASE:
        return "base"
    if parts[1] in ("__main__",):
        return "entry"
    if parts[1] == "__version__":
        return "version"
    return parts[1]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of ours that the file imports, inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "localrun":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: relative import"
            if node.module == "localrun":
                for alias in node.names:
                    yield node.lineno, f"localrun.{alias.name}"
            elif node.module and node.module.startswith("localrun."):
                yield node.lineno, node.module


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_points_up(path: Path) -> None:
    here = room(module_name(path))
    assert here in ALLOWED or here == "version", f"{path.relative_to(ROOT)} lies in a room that ALLOWED does not list"
    name = path.relative_to(ROOT).as_posix()
    wrong = [
        f"{name}:{line}: {here} imports {module}"
        for line, module in imports(path)
        if room(module) not in {here, "version", *ALLOWED.get(here, ())} and (name, module) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_goes_around_the_package(path: Path) -> None:
    """`import models` would work from the checkout only, and as a second copy of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] in ("kernels_cpu", "kernels_gpu", "models", "cli", "tests", "benchmarks")]


def attributes(path: Path) -> set[str]:
    """Every `name.attribute` of the file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return {f"{node.value.id}.{node.attr}" for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}


def test_only_settings_and_the_terminal_read_the_environment() -> None:
    """Settings are read in one place. The terminal's own few (where the daemon is, history) are in cli/environment.py."""
    readers = {path.relative_to(ROOT).as_posix() for path in sources() if {"os.environ", "os.getenv"} & attributes(path)}
    assert readers <= {"localrun/settings.py", "cli/environment.py", *PASSING_ON}


def loaded_after(statement: str) -> set[str]:
    """Top-level and own modules in a fresh interpreter after the statement."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_daemon_starts_without_the_kernels_libraries() -> None:
    if not (ROOT / "localrun/daemon/serve.py").exists():
        pytest.skip("the daemon is not there yet")
    assert not loaded_after("import localrun.daemon.serve, localrun.daemon.app") & {"numba", "numpy", "llvmlite", "cupy"}


def test_a_model_whose_kernels_are_cached_needs_no_compiler(shared: Path) -> None:
    """From the file to logits, as `localrun bench` and a runner do it; the first process compiles what is missing."""
    options = ["-o", "jsonl", "-t", "2", "-p", "8", "-n", "1", "-r", "1", "--cache-dir", os.environ["LOCALRUN_CACHE"]]
    command = [*options, "--", str(shared / "arch" / "llama" / "q4_0.gguf")]
    statement = f"from localrun.engine import bench, runner\nassert bench.main({command!r}) == 0"
    loaded_after(statement)
    # Elsewhere than on Linux only LLVM tells which instructions a processor has.
    compilers = {"numba", "llvmlite"} if sys.platform == "linux" else {"numba"}
    loaded = loaded_after(statement)
    assert "numpy" in loaded and not loaded & compilers


def test_terminal_starts_with_nothing_of_the_daemon() -> None:
    loaded = loaded_after("import localrun.cli.main")
    ours = {name for name in loaded if name.startswith("localrun.") and room(name) not in ("cli", "version")}
    assert not ours | (loaded & {"numba", "numpy", "llvmlite", "fastapi", "uvicorn", "pydantic", "msgspec"})
    slow = {"httpx", "rich.markdown", "rich.live", "prompt_toolkit"}
    assert not loaded & slow, "slow imports belong inside the functions that need them"
