"""Small vocabularies of each kind, as GGUF files of a few kilobytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localrun.models.gguf import open_gguf
from localrun.text.bpe import BYTE_TO_CHARACTER
from localrun.text.tokenizer import Tokenizer, load_tokenizer
from tests.models.build import Builder

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

Key = tuple[str | bytes, str, Any]


def keys(model: str, tokens: list[tuple[str, float, int]], *more: Key, scores: bool = True) -> list[Key]:
    """The tokenizer's keys for tokens given as (text, score, type)."""
    base: list[Key] = [
        ("general.architecture", "string", "llama"),
        ("tokenizer.ggml.model", "string", model),
        ("tokenizer.ggml.tokens", "array[string]", [text for text, _, _ in tokens]),
        ("tokenizer.ggml.token_type", "array[int32]", [kind for _, _, kind in tokens]),
    ]
    if scores:
        base.append(("tokenizer.ggml.scores", "array[float32]", [score for _, score, _ in tokens]))
    named = {key for key, _, _ in more}
    return [key for key in base if key[0] not in named] + list(more)


def bpe(*more: Key, words: tuple[str, ...] = (), extra: tuple[tuple[str, int], ...] = (), merges: tuple[str, ...] = ()) -> list[Key]:
    """Byte-level BPE: `<s>` 0, `</s>` 1, `<|user|>` 2, all bytes, what the merges make, `words`, then `extra` with their types."""
    tokens = [("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<|user|>", 0.0, CONTROL)]
    tokens += [(character, 0.0, NORMAL) for character in BYTE_TO_CHARACTER.values()]
    merges = merges or ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "Ċ Ċ")
    made = [merge.replace(" ", "") for merge in merges]
    tokens += [(text, 0.0, NORMAL) for text in dict.fromkeys([*made, *words])]
    tokens += [(text, 0.0, kind) for text, kind in extra]
    return keys(
        "gpt2",
        tokens,
        ("tokenizer.ggml.bos_token_id", "uint32", 0),
        ("tokenizer.ggml.eos_token_id", "uint32", 1),
        ("tokenizer.ggml.merges", "array[string]", list(merges)),
        *more,
        scores=False,
    )


def spm(*more: Key, extra: tuple[tuple[str, float, int], ...] = ()) -> list[Key]:
    """SentencePiece 'llama': `<unk>` 0, `<s>` 1, `</s>` 2, bytes, letters and a few pieces."""
    tokens = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    best_first = ["▁", "▁▁", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld", "▁wor"]
    tokens += [(piece, -float(i), NORMAL) for i, piece in enumerate(best_first)]
    tokens += [(chr(code), -100.0 - code, NORMAL) for code in range(ord("a"), ord("z") + 1)]
    return keys("llama", [*tokens, *extra], *more)


def write(folder: Path, entries: list[Key]) -> Path:
    path = folder / "vocabulary.gguf"
    path.write_bytes(Builder(entries).bytes())
    return path


def tokenizer(folder: Path, entries: list[Key]) -> Tokenizer:
    with open_gguf(write(folder, entries)) as gguf:
        return load_tokenizer(gguf)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Tokenizer]:
    with open_gguf(path) as gguf:
        yield load_tokenizer(gguf)
