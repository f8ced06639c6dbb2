"""Prints files over 600 lines and functions over 80: the size at which one idea has usually become two. A report, not a gate."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels_cpu", "kernels_gpu", "models", "localrun", "cli", "tests", "benchmarks", "scripts")
FILE_LINES = 600
FUNCTION_LINES = 80


def over_budget(path: Path) -> list[str]:
    """One line for the file and each function of it that is too long."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    length = text.count("\n")
    found = [f"{name}: {length} lines"] if length > FILE_LINES else []
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {lines} lines")
    return found


def main() -> None:
    found = [line for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) for line in over_budget(path)]
    for line in found:
        print("over budget:", line)


if __name__ == "__main__":
    main()
