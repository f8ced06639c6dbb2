"""How one vector is made of a sequence's last hidden states, as the file's keys say. Knows keys; imports neither NumPy nor Numba.

    mean   of all positions
    cls    the first position's
    last   the last position's; also what holds where no file says anything, for a decoder's last token has seen all others
    rank   a score: a classification head on the first or the last position
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from localrun.models.gguf import GGUFFile
from localrun.models.params import Keys

POOLINGS = {0: "", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""Values of pooling_type; 0: none."""
LONGEST_WHOLE = 8192
"""Most tokens of a sequence that must come whole in one pass; longer ones are refused whatever the file's context length."""
WITHOUT_LOGITS = frozenset(
    ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "modern-bert", "gemma-embedding", "llama-embed", "t5encoder")
)
"""Architectures that give vectors or scores and nothing else."""

ENCODER_DECODERS = frozenset(("t5",))


def read_pooling(keys: Keys, known: Collection[str] = ("", "mean", "cls", "last")) -> str:
    """The file's pooling_type in words. Raises ModelFileError for one that is not among `known`."""
    number = keys.int("pooling_type", 0)
    if POOLINGS.get(number) not in known:
        words = ", ".join(f"{n} ({word or 'none'})" for n, word in POOLINGS.items() if word in known)
        raise keys.error("pooling_type", f"is {number}; {keys.architecture} as supported has {words}")
    return POOLINGS[number]


def is_causal(gguf: GGUFFile) -> bool:
    """Whether a token sees only those before it."""
    return Keys(gguf).bool("attention.causal", gguf.architecture not in WITHOUT_LOGITS)


def ability(metadata: Mapping[str, Any]) -> str:
    """Which of "completion", "embedding" and "rerank" a model with these keys is for. A decoder that names a pooling was trained for it."""
    architecture = metadata.get("general.architecture")
    number = next((value for key, value in metadata.items() if key.endswith(".pooling_type")), None)
    word = POOLINGS.get(number) if isinstance(number, int) else None
    if word == "rank":
        return "rerank"
    return "embedding" if architecture in WITHOUT_LOGITS or word else "completion"
