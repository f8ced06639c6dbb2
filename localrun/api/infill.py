"""Filling in the middle: the marks by which code models are asked for the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Infill:
    """Three special tokens; the prompt is prefix, text before, suffix, text after, middle."""

    prefix: str
    suffix: str
    middle: str

    def fill(self, before: str, after: str) -> str:
        """The prompt after which the model writes what stands between."""
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"


KNOWN = (
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Infill("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder: the hole stands where the suffix begins
)


def infill_of(metadata: Mapping[str, Any]) -> Infill | None:
    """The marks of a model: those its file names by id, else known ones that its vocabulary has; None: it has none.

    metadata: a GGUF file's, with the whole vocabulary.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence):
        return None
    named = [metadata.get(f"tokenizer.ggml.fim_{part}_token_id") for part in ("pre", "suf", "mid")]
    if all(isinstance(token, int) and 0 <= token < len(tokens) for token in named):
        return Infill(*(str(tokens[token]) for token in named))  # type: ignore[index]
    vocabulary = set(tokens)
    return next((known for known in KNOWN if {known.prefix, known.suffix, known.middle} <= vocabulary), None)
