"""Tokenizers against the reference's: every id, every text, every piece of the recorded vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localrun.models.gguf import open_gguf
from localrun.text.stream import StreamDecoder
from localrun.text.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import REFERENCE

VOCABULARIES = [
    "baichuan", "bert-bge", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "nomic-bert-moe", "phi-3", "qwen2",
]  # fmt: skip
MODELS = {
    "smollm2-135m-instruct-q4_1": "smollm2",
    "gemma3-270m-q4_k_m": "gemma3-270m-q4_k_m",
    "qwen2.5-coder-0.5b-instruct-q4_k_m": "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "qwen2.5-coder-1.5b-instruct-q4_k_m": "qwen2.5-coder-1.5b-instruct-q4_k_m",
}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield json.loads(line)


def text_of(golden: dict[str, Any]) -> bytes:
    return golden["text"].encode() if golden.get("bytes_hex") is None else bytes.fromhex(golden["bytes_hex"])


def detokenized(value: str | dict[str, str]) -> bytes:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value.encode()


def check_header(meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab
    assert tokenizer.n_vocab == meta["n_tokens"]
    for name in ("bos", "eos", "sep", "pad", "mask"):
        assert getattr(vocab, name) == (None if meta[name] == -1 else meta[name]), name
    assert (vocab.add_bos, vocab.add_eos, vocab.add_sep) == (bool(meta["add_bos"]), bool(meta["add_eos"]), bool(meta["add_sep"]))
    assert sorted(tokenizer.eog_ids) == meta["eog"]


def check_texts(goldens: Iterator[dict[str, Any]], tokenizer: Tokenizer) -> int:
    checked = 0
    for golden in goldens:
        text = text_of(golden)
        for mode in ("add0_parse0", "add0_parse1", "add1_parse0", "add1_parse1"):
            want = golden.get(mode)
            if want is None:
                continue
            ids = tokenizer.encode(text, add_special=mode[3] == "1", parse_special=mode[-1] == "1")
            assert ids == want, (mode, text[:100])
            stream = StreamDecoder(tokenizer)
            shown = "".join(map(stream.push, ids)) + stream.flush()
            assert shown == b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace")
            checked += 1
        for name, value in golden["detok"].items():
            mode, remove, unparse = name.rsplit("_", 2)
            got = tokenizer.decode(golden[mode], remove_special=remove == "rm1", unparse_special=unparse == "unparse1")
            assert got == detokenized(value), (name, text[:100])
            checked += 1
    return checked


def check_pieces(pieces: Iterator[dict[str, Any]], tokenizer: Tokenizer) -> int:
    checked = 0
    for golden in pieces:
        token = golden["id"]
        assert tokenizer.piece(token).hex() == golden["piece_hex"], token
        assert tokenizer.piece(token, special=True).hex() == golden["piece_hex_special"], token
        assert tokenizer.vocab.attr(token) == golden["attr"], token
        checked += 1
    return checked


def check_all(reference: Path, name: str, model: Path) -> None:
    goldens = lines(reference / "tokenizer" / "goldens" / f"{name}.jsonl")
    meta = next(goldens)["meta"]
    with open_gguf(model) as gguf:
        tokenizer = load_tokenizer(gguf)
    check_header(meta, tokenizer)
    assert check_texts(goldens, tokenizer) > 500
    pieces = (golden for golden in lines(reference / "tokenizer" / "pieces" / f"{name}.jsonl") if "id" in golden)
    assert check_pieces(pieces, tokenizer) > 100


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabulary(shared: Path, name: str) -> None:
    check_all(shared, name, shared / "tokenizer" / "vocab" / f"ggml-vocab-{name}.gguf")


@pytest.mark.model
@pytest.mark.parametrize("name", MODELS)
def test_real_model(shared: Path, real_model: Callable[[str], Path], name: str) -> None:
    check_all(shared, name, real_model(MODELS[name]))


def test_every_golden_with_a_vocabulary_is_checked(shared: Path) -> None:
    """What is not checked is only what comes without its vocabulary."""
    have = {path.stem.removeprefix("ggml-vocab-") for path in (REFERENCE / "tokenizer" / "vocab").glob("*.gguf")}
    assert have == set(VOCABULARIES)
