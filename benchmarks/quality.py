"""How close our logits are to the truth, beside llama.cpp's own quantized run: every model and text of the reference data, through
`localrun perplexity`.

    python benchmarks/quality.py [--reference ../shared/conformance/real] [--model NAME=STEM ...]

NAME is a model of the store, STEM the beginning of its reference files. The truth is the same weights in 32-bit floats. KL divergences
in nats, over the 64 likeliest tokens of the truth and all others as one, for both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import host

TEXTS = ("prose", "code", "mixed")
MODELS = {
    "smollm2": "smollm2-135m-instruct-q4_1",
    "gemma3:270m": "gemma3-270m-q4_k_m",
    "qwen2.5-coder:0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "qwen2.5-coder:1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m",
}


def judged(model: str, text: Path, reference: Path) -> dict[str, Any]:
    """What the command says, as it says it in JSON. Raises RunError."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(host.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "localrun", "perplexity", model, text, "--reference", reference, "--json"]
    found: dict[str, Any] = json.loads(host.run(command, env).out)
    return found


def cells(model: str, text: str, found: Mapping[str, Any], full: Mapping[tuple[str, str], Mapping[str, Any]], stem: str) -> tuple[str, ...]:
    """A row: ours / the peer's."""
    peer = found["peer"]
    known = full.get((stem, text))
    return (
        model, text, str(found["tokens"]), f"{found['reference_perplexity']:.3f}",
        f"{found['perplexity']:.3f} / {peer['perplexity']:.3f}",
        f"{found['mean_kl']:.5f} / {peer['mean_kl']:.5f}",
        f"{found['p99_kl']:.5f} / {peer['p99_kl']:.5f}",
        f"{found['agreement']:.1%} / {peer['agreement']:.1%}",
        f"{known['mean_kl_peer']:.5f}" if known else "",
    )  # fmt: skip


def print_row(row: tuple[str, ...]) -> None:
    widths = (20, 6, 6, 9, 19, 19, 19, 15, 12)
    print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |", flush=True)


def main() -> int:
    """Exit status 0, or 1 after a line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=host.ROOT.parent / "shared" / "conformance" / "real")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=STEM", help="instead of the four of the catalogue")
    options = parser.parse_args()
    models = dict(one.split("=", 1) for one in options.model) or MODELS
    if not (options.reference / "summary.json").is_file():
        parser.error(f"{options.reference} holds no reference data")
    summary = json.loads((options.reference / "summary.json").read_text(encoding="utf-8"))
    full = {(entry["model"], entry["text"]): entry for entry in summary}
    print(f"machine: {host.describe()}\nours / llama.cpp's; the last column is llama.cpp's mean KL over the whole vocabulary, as stored\n")
    heads = ("model", "text", "tokens", "truth ppl", "perplexity", "mean KL", "99% KL", "same choice", "whole KL")
    print_row(heads)
    print_row(("---",) * len(heads))
    try:
        for model, stem in models.items():
            for text in TEXTS:
                found = judged(model, options.reference / f"{text}.txt", options.reference / f"{stem}.{text}.npz")
                print_row(cells(model, text, found, full, stem))
    except host.RunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
