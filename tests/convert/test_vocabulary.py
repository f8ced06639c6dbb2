"""Vocabularies: the converted file cuts text as the checkpoint's own tokenizer does, and special tokens are what the files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import PreTokenizer

from localrun.convert.config import Config
from localrun.convert.plan import KeyTable
from localrun.convert.presplit import _KNOWN, name_of, steps_of
from localrun.convert.sentencepiece import read_pieces
from localrun.convert.vocabulary import vocabulary
from localrun.convert.write import convert
from localrun.models.errors import ModelFileError
from localrun.models.gguf import open_gguf
from localrun.text.pretokenizers import PRE_TOKENIZERS, Splitter
from localrun.text.tokenizer import load_tokenizer
from tests.convert.checkpoints import (
    DECODER,
    LLAMA3_SPLIT,
    VOCAB,
    added,
    bpe_tokenizer,
    decoder_tensors,
    field,
    spm_model,
    spm_pieces,
    wordpiece_tokenizer,
    write,
)  # fmt: skip

LLAMA = DECODER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
APART = {"tekken": "\u0301", "gpt-4o": "\u0301", "deepseek-coder": "\u3000"}
"""Characters at which GGUF's reading of a family, the format's reference, differs from the description: lone marks, wide spaces."""
TEXTS = (
    "Hello, the World! It's  THE end... we're\n\n  then\tsing 12345678 and 3.14 (x) <s>", "ein Ärgernis übrigens; naïve CAFÉ œuvre",
    "東京は日本の首都です。カタカナ", "안녕하세요 세계", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22", "a\u0301 e\u0300 🙂👩‍💻",
    "camelCase XMLHttp fooBARbaz",
    "path/to/file.py\r\n\r\n# x\n", "   leading", "trailing   ", "'S 'll I'LL don'T", "x²³ ½ ①", "\u00a0nbsp\u3000wide", "",
)  # fmt: skip


def keys_of(folder: Path) -> KeyTable:
    return vocabulary(folder, Config.read(folder / "config.json"), VOCAB)


def made(tmp_path: Path, tokenizer: dict[str, Any] | bytes, **settings: Any) -> Path:
    folder = write(tmp_path / "checkpoint", LLAMA, decoder_tensors(LLAMA), tokenizer, **settings)
    convert(folder, tmp_path / "out.gguf", n_threads=1)
    return tmp_path / "out.gguf"


@pytest.mark.parametrize("split", [LLAMA3_SPLIT, LLAMA3_SPLIT.replace("{1,3}", ""), None], ids=["llama3", "qwen2", "gpt2"])
def test_byte_level(tmp_path: Path, split: str | None) -> None:
    described = bpe_tokenizer(split, ignore_merges=split == LLAMA3_SPLIT)
    path = made(tmp_path, described, bos_token="<s>", eos_token={"content": "</s>"})
    theirs = Tokenizer.from_str(json.dumps(described))
    with open_gguf(path) as gguf:
        ours = load_tokenizer(gguf)
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (256, 257, False)


def test_sentencepiece(tmp_path: Path) -> None:
    """tokenizer.model goes before tokenizer.json; the same pieces rewritten as merges give the same tokens."""
    path = made(tmp_path, spm_model(), bos_token="<s>", eos_token="</s>", add_bos_token=True)
    with open_gguf(path) as gguf:
        assert gguf.metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6] and gguf.metadata["tokenizer.ggml.add_space_prefix"] is True
        ours = load_tokenizer(gguf)
    texts = [text for text, _, _ in spm_pieces()]
    assert [texts[token] for token in ours.encode("the hand")] == ["<s>", "▁the", "▁", "h", "an", "d"]
    vocab = {text: index for index, text in enumerate(texts)}
    rank = {text: score for text, score, _ in spm_pieces() if len(text) > 1 and text[0] != "<"}
    merges = [[text[:cut], text[cut:]] for text in sorted(rank, key=lambda one: -rank[one]) for cut in range(1, len(text))
              if text[:cut] in vocab and text[cut:] in vocab]  # fmt: skip
    rewritten = {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True},
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "added_tokens": [added(index, text) for index, text in enumerate(texts[:3])],
    }  # fmt: skip
    theirs = Tokenizer.from_str(json.dumps({"version": "1.0", "truncation": None, "padding": None, **rewritten}))
    again = made(tmp_path / "json", rewritten, bos_token="<s>", eos_token="</s>")
    with open_gguf(again) as gguf:
        from_json = load_tokenizer(gguf)
    for text in ("the hand and the land", "an tan", "Zoë the 1st", "the  end"):
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == from_json.encode(text, add_special=False) == want


def test_wordpiece(tmp_path: Path) -> None:
    folder = write(tmp_path, {"architectures": ["BertModel"]}, {}, wordpiece_tokenizer(), cls_token="[CLS]", sep_token="[SEP]")
    keys = keys_of(folder)
    tokens, types = keys["tokenizer.ggml.tokens"][1], keys["tokenizer.ggml.token_type"][1]
    assert tokens[:6] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁a"] and types[:6] == [3, 3, 3, 3, 3, 1]
    assert "ing" in tokens and "▁the" in tokens and "[unused0]" in tokens and "##ing" not in tokens
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "cls", "eos", "seperator")}
    assert ids == {"bos": ("uint32", 2), "cls": ("uint32", 2), "eos": ("uint32", 3), "seperator": ("uint32", 3)}
    assert not any("normalizer" in key for key in keys)
    # the older file with a token a line says the same
    (folder / "vocab.txt").write_text("\n".join(wordpiece_tokenizer()["model"]["vocab"]) + "\n")
    (folder / "tokenizer.json").unlink()
    assert keys_of(folder) == keys
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "cls_token": "[CLS]", "sep_token": "[SEP]"}))
    assert keys_of(folder)["tokenizer.ggml.normalizer.lowercase"] == ("bool", False)


def described(steps: tuple[Any, ...]) -> dict[str, Any]:
    """A tokenizer.json's pre_tokenizer with these steps."""
    kinds: dict[str, Any] = {
        "split": lambda value: {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False},
        "digits": lambda value: {"type": "Digits", "individual_digits": value},
        "bytes": lambda value: {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": value},
    }
    return {"type": "Sequence", "pretokenizers": [kinds[kind](value) for kind, value in steps]}


@pytest.mark.parametrize("steps", list(_KNOWN), ids=lambda steps: _KNOWN[steps][0])
def test_named_pretokenizers_cut_as_the_description_does(steps: tuple[Any, ...]) -> None:
    """The library's own reading of the description, and ours of the name, on texts in which the families differ."""
    body = described(steps)
    assert steps_of(body) == steps
    # the last step writes bytes in GPT-2's alphabet; its cuts are what is compared
    model = {"type": "BPE", "vocab": {}, "merges": []}
    theirs = Tokenizer.from_str(json.dumps({"version": "1.0", "pre_tokenizer": body, "model": model}))
    assert isinstance(theirs.pre_tokenizer, PreTokenizer)
    for name in _KNOWN[steps]:
        splitter = Splitter(PRE_TOKENIZERS[name].steps)
        for text in TEXTS:
            if set(text) & set(APART.get(name, "")):
                continue
            cuts = [text[a:b] for _, (a, b) in theirs.pre_tokenizer.pre_tokenize_str(text)]
            assert splitter.split(text) == cuts, text


def test_habits_tell_apart_what_is_cut_alike() -> None:
    llama3 = described((("split", LLAMA3_SPLIT), ("bytes", False)))
    assert name_of(llama3, ignore_merges=True, clean_spaces=None) == "llama-bpe"
    assert name_of(llama3, ignore_merges=False, clean_spaces=None) == "dbrx"
    digits = described((("digits", True), ("bytes", True)))
    assert name_of(digits, ignore_merges=False, clean_spaces=False) == "smollm"
    assert name_of(digits, ignore_merges=False, clean_spaces=True) == "starcoder"


@pytest.mark.parametrize(
    "body",
    [
        None, {}, {"type": "Whitespace"}, described((("split", "[a-z]+"), ("bytes", False))),
        described((("digits", False), ("bytes", True))),
        {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
        {"type": "Sequence", "pretokenizers": "x"}, {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated"},
    ],
)  # fmt: skip
def test_an_unknown_pretokenizer_is_refused(tmp_path: Path, body: Any) -> None:
    assert name_of(body, ignore_merges=False, clean_spaces=None) is None
    folder = write(tmp_path, LLAMA, {}, bpe_tokenizer() | {"pre_tokenizer": body})
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: pre_tokenizer: cuts text in a way that no known pre-tokenizer does"):
        keys_of(folder)


def test_special_tokens_and_templates(tmp_path: Path) -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}}  # fmt: skip
    tokenizer = bpe_tokenizer(ignore_merges=True)
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [tokenizer["post_processor"], template]}
    folder = write(tmp_path, LLAMA, {}, tokenizer, chat_template=[{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 255]}))
    keys = keys_of(folder)
    found = {key.removeprefix("tokenizer."): value for key, (_, value) in keys.items() if not isinstance(value, list)}
    assert found == {
        "ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.bos_token_id": 256, "ggml.eos_token_id": 257, "ggml.eot_token_id": 255,
        "ggml.add_bos_token": True, "ggml.add_eos_token": False, "chat_template": "D", "chat_template.tools": "T",
    }  # fmt: skip
    (folder / "chat_template.jinja").write_text("J")
    assert keys_of(folder)["tokenizer.chat_template"] == ("string", "J")


def test_ids_without_a_token_are_unused_ones(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA, {}, bpe_tokenizer(ignore_merges=True))
    keys = vocabulary(folder, Config(folder / "config.json", {}), VOCAB + 2)
    assert keys["tokenizer.ggml.tokens"][1][-2:] == ["[PAD288]", "[PAD289]"] and keys["tokenizer.ggml.token_type"][1][-2:] == [5, 5]
    with pytest.raises(ModelFileError, match="has the id 287, and the model 100 rows of embeddings"):
        vocabulary(folder, Config(folder / "config.json", {}), 100)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "has no pieces"),
        (b"\xff" * 20, "is no SentencePiece model: a number at byte"),
        (field(1, field(1, b"a"))[:-1], "runs past the end"),
        (field(1, b""), "is no SentencePiece model"),
        (field(1, 5), "a number stands where bytes should"),
        (field(1, field(1, b"\xff")), "is no SentencePiece model"),
        (b"\x0f", "wire type 7"),
        (spm_model(model_type=1), r"trainer_spec.model_type: is 1; BPE \(2\) is supported"),
        (spm_model(charsmap=b"x" * 8), "normalizes text by rules of its own"),
    ],
)
def test_tokenizer_models_that_are_refused(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=line):
        read_pieces(path)
