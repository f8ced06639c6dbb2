"""Qwen3-Next (Qwen Team 2025): Qwen3.5's layers with experts (qwen35moe.py); the gates of its delta nets come from one matrix, and a
key head's value heads lie side by side.
"""

from __future__ import annotations

from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys
from localrun.models.qwen35moe import Params, read_as, record

__all__ = ["read", "record"]


def read(keys: Keys, gguf: GGUFFile) -> Params:
    """Hyper-parameters; the tensors are checked against them. Raises ModelFileError."""
    return read_as(keys, gguf, joint=True)
