"""mypy over the package as it is imported, not as it is laid out.

`kernels_cpu`, `models` and `cli` lie beside `localrun` in the checkout and under it in the package (pyproject's package-dir), a mapping
that mypy has no setting for. So the package tree is laid out in build/types and checked there; file names in the messages are
turned back into those of the checkout. Links where the platform lets us make them, copies elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "types"
MAPPED = [name for name in ("kernels_cpu", "kernels_gpu", "models", "cli") if (ROOT / name).is_dir()]
BESIDE = [name for name in ("tests", "benchmarks", "scripts") if any((ROOT / name).rglob("*.py"))]


def place(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)


def main() -> int:
    cache = ROOT / ".mypy_cache"
    if TREE.exists():
        shutil.rmtree(TREE)
    package = TREE / "localrun"
    package.mkdir(parents=True)
    for child in (ROOT / "localrun").iterdir():
        if child.name != "__pycache__":
            place(child, package / child.name)
    for name in MAPPED:
        place(ROOT / name, package / name)
    for name in BESIDE:
        place(ROOT / name, TREE / name)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache)]
    command += sys.argv[1:] or ["localrun", *BESIDE]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False)
    back = re.compile(rf"\blocalrun[/\\](?=(?:{'|'.join(MAPPED)})[/\\])")
    sys.stdout.write(back.sub("", done.stdout))
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
