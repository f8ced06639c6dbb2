"""A program: loads a model as a runner does, reads 512 tokens from all over the vocabulary, and prints how many bytes of memory that took
beyond the imports.
"""

from __future__ import annotations

import sys

import numpy as np
import psutil

import localrun.engine.runner  # noqa: F401  (what a runner has imported before it loads)
from localrun.engine.parts import load_parts
from localrun.messages import Load
from localrun.models import load as _loading  # noqa: F401
from localrun.models.model import BLOCK_TOKENS, Span
from localrun.text import tokenizer as _tokenizer  # noqa: F401

TOKENS = 512


def main() -> None:
    path, cache = sys.argv[1:]
    before = psutil.Process().memory_info().rss
    parts = load_parts(Load(path=path, cache_dir=cache, digest="", model_name="x"), lambda stage, done, total: None)
    blocks = TOKENS // BLOCK_TOKENS
    parts.model.allocate_kv(blocks)
    tokens = np.linspace(0, parts.model.info.n_vocab - 1, TOKENS).astype(np.int32)
    parts.model.forward([Span(tokens, 0, np.arange(blocks, dtype=np.int32), np.array([TOKENS - 1], np.int32))])
    took = psutil.Process().memory_info().rss - before
    parts.model.close()
    sys.stdout.write(f"{took} {int(parts.model.info.packed)}\n")


if __name__ == "__main__":
    main()
