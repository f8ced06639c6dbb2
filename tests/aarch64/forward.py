"""Logits of small models, computed in this process: python -m tests.aarch64.forward FOLDER FILE [FOLDER/NAME/VARIANT/KV ...]

Runs on the host and under emulation; whoever starts it compares what both write.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tests.aarch64.inside  # noqa: F401  before anything is compiled
from localrun.models.load import load_model
from localrun.models.model import LoadOptions, Span

TOKENS = 40
BLOCKS = np.array([3, 0, 2], np.int32)


def logits(path: Path, kv_type: str) -> NDArray[np.float32]:
    """A prompt in one piece, more of it, and single tokens, the last of them beside another sequence: float32 (rows, n_vocab)."""
    options = LoadOptions(n_threads=2, max_batch=64, n_ctx=256, kv_type=kv_type, cache_dir=os.environ["LOCALRUN_CACHE"])
    model = load_model(path, options)
    try:
        model.allocate_kv(8)
        slots = (1, 0) if model.info.state_bytes else (-1, -1)
        if model.info.state_bytes:
            model.allocate_state(2)
        tokens = np.random.default_rng(1).integers(3, model.info.n_vocab, TOKENS, np.int32)

        def span(start: int, end: int) -> Span:
            return Span(tokens[start:end], start, BLOCKS, np.arange(end - start, dtype=np.int32), state=slots[0])

        rows = [model.forward([span(0, 29)]).copy(), model.forward([span(29, 37)]).copy(), model.forward([span(37, 38)]).copy()]
        for at in (38, 39):
            other = Span(tokens[at - 38 : at - 37], at - 38, np.array([6], np.int32), np.zeros(1, np.int32), state=slots[1])
            rows.append(model.forward([other, span(at, at + 1)]).copy())
        return np.concatenate(rows)
    finally:
        model.close()


def main(folder: Path, file: Path, cases: list[str]) -> None:
    """Writes the logits of each case ('llama-k/q4_K/f16') under its name."""
    found: dict[str, Any] = {}
    for case in cases:
        name, variant, kv_type = case.split("/")
        found[case] = logits(folder / name / f"{variant}.gguf", kv_type)
    np.savez(file, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
