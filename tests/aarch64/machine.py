"""An emulated 64-bit ARM Linux to run the kernels for NEON on: a Python for aarch64 in a folder, which QEMU's user mode runs as a program.

    python -m tests.aarch64.machine         sets the folder up, or brings it up to date

Its C library and interpreter come from Debian's packages, unpacked and not installed, through apt with lists of its own: the system's
packages stay as they are, and nobody needs to be root. The libraries, compiled parts included, are wheels, fetched by pip. Those that make
machine code have the versions installed here, so that kernels compiled here are the ones that it looks for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.conftest import ROOT, TEST_CACHE

FOLDER = TEST_CACHE / "aarch64"
CPU = "neoverse-n1"
"""Armv8.2 with dot products and half floats, and none of what came later: a kernel that needs more than it should is killed here."""
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
SAME_VERSION = ("numpy", "numba", "llvmlite")
ANY_VERSION = ("psutil", "platformdirs", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
TIMEOUT_S = 600


def emulator() -> str:
    """Path of the program that runs aarch64 programs; empty: there is none."""
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static") or ""


def _contents() -> dict[str, list[str]]:
    return {"packages": [*PACKAGES], "wheels": [*(f"{name}=={version(name)}" for name in SAME_VERSION), *ANY_VERSION]}


def missing() -> str:
    """Why nothing can be emulated, in one line; empty: all is there."""
    if not emulator():
        return "qemu-aarch64 is not installed (Debian's package qemu-user)"
    try:
        made = json.loads((FOLDER / "contents.json").read_text(encoding="utf-8"))
    except OSError:
        made = None
    return "" if made == _contents() else "its Python is not set up for these libraries, as python -m tests.aarch64.machine does"


def start(arguments: Iterable[str], work: Path, cpu: str = CPU) -> subprocess.Popen[str]:
    """Starts the emulated Python with these arguments, in the checkout, its output and errors to a pipe.

    work: a folder for its files. Kernels it lacks are compiled natively (see compiler.py) and kept beside those of the other tests.
    """
    compiler = work / "compiler"
    compiler.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.aarch64.compiler\n', encoding="utf-8")
    compiler.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "PYTEST_", "LOCALRUN_"))}
    env |= {"PYTHONPATH": f"{FOLDER / 'site'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"QEMU_CPU": cpu, "TESTS_COMPILER": str(compiler), "LOCALRUN_CACHE": str(TEST_CACHE / "cache")}
    command = [emulator(), "-L", str(FOLDER / "root"), str(FOLDER / "root" / "usr" / "bin" / "python3"), "-s", "-P", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# ---- setting up -----------------------------------------------------------------------------------------------------------------


def _run(command: list[str]) -> None:
    """Raises SystemExit with the last lines of the program that failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise SystemExit(f"Error: {command[0]} failed, so that there is no Python for aarch64:\n{last}")


def _unpack_packages(apt: Path, root: Path) -> None:
    """PACKAGES and what they need, for aarch64, into `root`. apt: a folder for its state."""
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "", "Dir::State": apt / "state",
        "Dir::State::status": apt / "status", "Dir::Cache": apt / "cache", "Debug::NoLocking": "true",
    }  # fmt: skip
    command = ["apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in options.items())]
    _run([*command, "update"])
    _run([*command, "--no-install-recommends", "--download-only", "install", *PACKAGES])
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(root)])


def _install_wheels(python: str, site: Path) -> None:
    """Wheels for that version of Python ('3.11') on aarch64, and pure ones, into `site`."""
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)]
    fixed = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--target={site}"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-warn-conflicts"]
    _run([sys.executable, "-m", "pip", "install", *quiet, *fixed, *platforms, "--platform=manylinux2014_aarch64", *_contents()["wheels"]])


def set_up() -> None:
    """Makes FOLDER, whole or not at all. Raises SystemExit saying what is missing."""
    for program in ("apt-get", "dpkg-deb"):
        if not shutil.which(program):
            raise SystemExit(f"Error: a Python for aarch64 is made of Debian's packages, and there is no {program} here")
    part = FOLDER.with_name(f"{FOLDER.name}.{os.getpid()}.part")
    try:
        _unpack_packages(part / "apt", part / "root")
        interpreter = (part / "root" / "usr" / "bin" / "python3").readlink().name
        _install_wheels(interpreter.removeprefix("python"), part / "site")
        shutil.rmtree(part / "apt")
        (part / "contents.json").write_text(json.dumps(_contents()), encoding="utf-8")
        shutil.rmtree(FOLDER, ignore_errors=True)
        part.rename(FOLDER)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def main() -> int:
    """The command line; returns the exit status."""
    if not missing():
        return 0
    if not emulator():
        sys.stderr.write(f"Error: {missing()}\n")
        return 1
    set_up()
    return 0


if __name__ == "__main__":
    sys.exit(main())
