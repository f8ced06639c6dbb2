"""Writes docs/models.md: which architectures are known, what each is, and what it was tested with.

Read from the registry, from the first paragraph of each family's file and from the table of tests/conformance/test_arch.py; none of them
is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"

OTHERS = ("exact vectors", "rounded vectors", "exact answers", "rounded answers")
HEAD = """# Models

<!-- made by scripts/models_docs.py; do not edit -->

Every GGUF file names its architecture (`general.architecture`; `localrun show` prints it). These are known; any other is refused in one
line, and so is a file of a known one that has tensors or asks for mathematics that its family does not have. How to add one:
[adding-a-model.md](adding-a-model.md).

The last column names tiny models with random weights whose logits, or vectors and scores, were compared with a reference
implementation's: F32 files within 1e-3 of a standard deviation, 16-bit and quantized ones within the noise of the format, and each with its
prompt whole, in pieces and one token at a time (vectors: alone and among others), with the same bits.

"""


def literal(path: Path, name: str) -> dict[str, object]:
    """The dict that a module assigns to that name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            value: dict[str, object] = ast.literal_eval(node.value)
            return value
    raise LookupError(f"{path} assigns no {name}")


def summary(module: str) -> str:
    """First paragraph of a family's docstring, in one line."""
    doc = ast.get_docstring(ast.parse((ROOT / "models" / f"{module}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split())


def tested() -> dict[str, list[str]]:
    """Files that run, by the architecture that they are of, as the conformance test has them."""
    path = ROOT / "tests" / "conformance" / "test_arch.py"
    architectures = literal(path, "ARCHITECTURE_OF")
    rows: dict[str, list[str]] = {}
    for name, variants in literal(path, "TABLE").items():
        assert isinstance(variants, dict)
        run = [variant for variant, kind in variants.items() if kind in ("exact", "same", "rounded", *OTHERS)]
        if run:
            rows.setdefault(str(architectures.get(name, name)), []).append(f"{name} ({', '.join(run)})")
    return rows


def document() -> str:
    """The page."""
    files = tested()
    lines = ["| architecture | what it is | tested with |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {summary(str(module))} | {'; '.join(files.get(name, ['nothing']))} |"
        for name, module in sorted(literal(ROOT / "models" / "registry.py", "ARCHITECTURES").items())
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
