"""A checkpoint's vocabulary as GGUF keys: tokens, kinds, merges or scores, special tokens, chat template.

    tokenizer.json             "BPE": byte-level (GPT-2's, most newer models), or SentencePiece's rewritten; "WordPiece" (BERT)
    tokenizer.model            SentencePiece; read in place of tokenizer.json where both are there
    vocab.txt                  WordPiece too, where there is no tokenizer.json
    tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja, generation_config.json

Knows files and keys; how text becomes tokens with them is known in localrun/text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrun.convert.config import Config, read_json, read_text
from localrun.convert.plan import KeyTable
from localrun.convert.presplit import name_of
from localrun.convert.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, read_pieces
from localrun.models.errors import ModelFileError
from localrun.models.gguf import printable

SPACE = "\u2581"
_SPECIAL = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding", "cls_token": "cls",
    "mask_token": "mask",
}  # fmt: skip
"""Name in Hugging Face's files -> in tokenizer.ggml.X_token_id ("seperator" is how the format spells it)."""
LOWEST_SCORE = -1000.0
"""Of tokens that no merge makes."""


@dataclass
class Folder:
    """The tokenizer's files."""

    path: Path
    config: Config
    """config.json, or its part about text."""
    settings: Config
    """tokenizer_config.json."""
    tokenizer: dict[str, Any] | None
    """tokenizer.json."""

    @classmethod
    def read(cls, path: Path, config: Config) -> Folder:
        """Raises ModelFileError."""
        tokenizer = None
        settings = Config.read_if_there(path / "tokenizer_config.json")
        if (path / "tokenizer.json").is_file():
            tokenizer = Config.read(path / "tokenizer.json").values
        elif (path / "vocab.txt").is_file() and not (path / "tokenizer.model").is_file():
            tokenizer = _of_vocab_txt(path / "vocab.txt", settings)
        return cls(path, config, settings, tokenizer)

    def error(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(self.path / "tokenizer.json", field, problem)


def _of_vocab_txt(path: Path, settings: Config) -> dict[str, Any]:
    """BERT's older file, a token a line, in the form of tokenizer.json."""
    vocab = {text: index for index, text in enumerate(read_text(path).rstrip("\n").split("\n"))}
    accents = settings.values.get("strip_accents")
    normalizer = {"type": "BertNormalizer", "lowercase": settings.bool("do_lower_case", True), "strip_accents": accents}
    marks = [text for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if text in vocab]
    added = [{"id": vocab[text], "content": text, "special": True} for text in marks]
    return {"model": {"type": "WordPiece", "vocab": vocab}, "normalizer": normalizer, "added_tokens": added}


@dataclass
class Tokens:
    """A vocabulary under construction, by id."""

    texts: dict[int, str] = field(default_factory=dict)
    types: dict[int, int] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)

    def put(self, index: int, text: str, kind: int, score: float = LOWEST_SCORE) -> None:
        self.texts[index], self.types[index], self.scores[index] = text, kind, score


def vocabulary(folder: Path, config: Config, n_rows: int) -> KeyTable:
    """All tokenizer.* keys for a model whose embedding has `n_rows` rows. Raises ModelFileError, also for kinds that are not supported."""
    files = Folder.read(folder, config)
    keys: KeyTable = {}
    model = _model(files)
    kind = model.get("type")
    if (folder / "tokenizer.model").is_file():
        tokens = _sentencepiece(files, keys)
    elif files.tokenizer is None:
        raise ModelFileError(folder, "", "has neither tokenizer.json nor tokenizer.model")
    elif kind == "BPE" and model.get("byte_fallback"):
        tokens = _rewritten_sentencepiece(files, model, keys)
    elif kind == "BPE":
        tokens = _byte_level(files, model, keys)
    elif kind == "WordPiece":
        tokens = _wordpiece(files, model, keys)
    else:
        raise files.error("model.type", f"is {printable(repr(kind))}; BPE and WordPiece vocabularies are supported")
    _add_added(files, tokens, wordpiece=kind == "WordPiece")
    _put_tokens(files, keys, tokens, n_rows)
    _special_ids(files, keys, {text: index for index, text in tokens.texts.items()})
    _chat_template(files, keys)
    return keys


def _model(files: Folder) -> dict[str, Any]:
    model = (files.tokenizer or {}).get("model") or {}
    if not isinstance(model, dict):
        raise files.error("model", "is no object")
    return model


# ---- kinds ----------------------------------------------------------------------------------------------------------------------


def _ids(files: Folder, model: dict[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise files.error("model.vocab", "is no object of tokens")
    if not all(type(index) is int and index >= 0 for index in vocab.values()):
        raise files.error("model.vocab", "has ids that are no whole numbers")
    return vocab


def _merges(files: Folder, model: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs; files write them as texts with a space between, newer ones as lists."""
    made = []
    listed = model.get("merges")
    for merge in listed if isinstance(listed, list) else ():
        pair = tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) if isinstance(merge, str) else ()
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise files.error("model.merges", f"has the item {printable(repr(merge))}, which is no pair")
        made.append(pair)
    return made


def _byte_level(files: Folder, model: dict[str, Any], keys: KeyTable) -> Tokens:
    clean = files.settings.values.get("clean_up_tokenization_spaces")
    described = (files.tokenizer or {}).get("pre_tokenizer")
    pre = name_of(described, ignore_merges=model.get("ignore_merges") is True, clean_spaces=clean if isinstance(clean, bool) else None)
    if pre is None:
        raise files.error("pre_tokenizer", "cuts text in a way that no known pre-tokenizer does; this vocabulary is not supported")
    normalizer = (files.tokenizer or {}).get("normalizer") or {}
    if not isinstance(normalizer, dict) or normalizer.get("type", "NFC") != "NFC":
        raise files.error("normalizer", "changes text before it is cut; this vocabulary is not supported")
    keys["tokenizer.ggml.model"] = ("string", "gpt2")
    keys["tokenizer.ggml.pre"] = ("string", pre)
    keys["tokenizer.ggml.merges"] = ("array[string]", [f"{left} {right}" for left, right in _merges(files, model)])
    tokens = Tokens()
    for text, index in _ids(files, model).items():
        tokens.put(index, text, NORMAL)
    return tokens


def _wordpiece(files: Folder, model: dict[str, Any], keys: KeyTable) -> Tokens:
    """Pieces that go on a word carry ## there; in GGUF files those that begin one carry U+2581."""
    normalizer = (files.tokenizer or {}).get("normalizer") or {}
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        raise files.error("normalizer", "is not BERT's; this vocabulary is not supported")
    lowercase = normalizer.get("lowercase") is not False
    accents = normalizer.get("strip_accents")
    if not lowercase or (accents is not None and accents is not lowercase):
        keys["tokenizer.ggml.normalizer.lowercase"] = ("bool", lowercase)
        keys["tokenizer.ggml.normalizer.strip_accents"] = ("bool", lowercase if accents is None else accents is True)
    keys["tokenizer.ggml.model"] = ("string", "bert")
    prefix = model.get("continuing_subword_prefix", "##")
    if prefix != "##":
        raise files.error("model.continuing_subword_prefix", f"is {printable(repr(prefix))}, not '##'")
    tokens = Tokens()
    for text, index in _ids(files, model).items():
        whole = text.startswith("[") and text.endswith("]") and len(text) > 2
        tokens.put(index, text if whole else text[2:] if text.startswith("##") and len(text) > 2 else SPACE + text, NORMAL)
    return tokens


def _sentencepiece(files: Folder, keys: KeyTable) -> Tokens:
    pieces = read_pieces(files.path / "tokenizer.model")
    _spm_keys(files, keys, pieces.add_dummy_prefix)
    tokens = Tokens()
    for index, (text, kind, score) in enumerate(zip(pieces.texts, pieces.types, pieces.scores)):
        tokens.put(index, text, kind, score)
    return tokens


def _rewritten_sentencepiece(files: Folder, model: dict[str, Any], keys: KeyTable) -> Tokens:
    """A SentencePiece vocabulary as tokenizer.json has it: its scores are the order of merges."""
    written = str((files.tokenizer or {}).get("normalizer")) + str((files.tokenizer or {}).get("pre_tokenizer"))
    if "Replace" not in written and "Metaspace" not in written:
        raise files.error("normalizer", "does not write spaces as U+2581; this vocabulary is not supported")
    prefix = "'Prepend'" in written or "'prepend_scheme': 'first'" in written or "'prepend_scheme': 'always'" in written
    _spm_keys(files, keys, prefix or "'add_prefix_space': True" in written)
    rank: dict[str, int] = {}
    for order, (left, right) in enumerate(_merges(files, model)):
        rank.setdefault(left + right, order)
    tokens = Tokens()
    unknown = model.get("unk_token")
    for text, index in _ids(files, model).items():
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = UNKNOWN if text == unknown else BYTE if is_byte else NORMAL
        tokens.put(index, text, kind, -float(rank[text]) if text in rank else 0.0 if is_byte else LOWEST_SCORE)
    return tokens


def _spm_keys(files: Folder, keys: KeyTable, add_prefix: bool) -> None:
    keys["tokenizer.ggml.model"] = ("string", "llama")
    keys["tokenizer.ggml.pre"] = ("string", "default")
    stated = files.settings.values.get("add_prefix_space")
    keys["tokenizer.ggml.add_space_prefix"] = ("bool", stated if isinstance(stated, bool) else add_prefix)


# ---- what is common -------------------------------------------------------------------------------------------------------------


def _add_added(files: Folder, tokens: Tokens, *, wordpiece: bool) -> None:
    """Tokens that were added to the vocabulary: special ones are control tokens, others are looked for in the text as they are."""
    listed = [one for one in (files.tokenizer or {}).get("added_tokens") or () if isinstance(one, dict)]
    if not listed:
        by_id = files.settings.part("added_tokens_decoder").values
        listed = [one | {"id": int(index)} for index, one in by_id.items() if isinstance(one, dict) and index.isdigit()]
    added: list[tuple[Any, Any, bool]] = [(one.get("id"), one.get("content"), one.get("special") is True) for one in listed]
    if not added and (files.path / "added_tokens.json").is_file():
        added = [(index, text, False) for text, index in Config.read(files.path / "added_tokens.json").values.items()]
    for index, text, special in added:
        if type(index) is not int or index < 0 or not isinstance(text, str) or not text:
            raise files.error("added_tokens", f"has the entry {printable(repr((index, text)))}, which is none")
        kind = CONTROL if special else NORMAL if wordpiece else USER_DEFINED
        # SentencePiece's own word on unknown and byte tokens stands
        if tokens.types.get(index) in (UNKNOWN, BYTE) and tokens.texts.get(index) == text:
            continue
        tokens.put(index, text, kind, tokens.scores.get(index, LOWEST_SCORE))


def _put_tokens(files: Folder, keys: KeyTable, tokens: Tokens, n_rows: int) -> None:
    """The three lists, as long as the embedding has rows: ids without a token become unused ones."""
    highest = max(tokens.texts, default=-1)
    if highest >= n_rows:
        raise files.error("model.vocab", f"has the id {highest}, and the model {n_rows} rows of embeddings: they do not belong together")
    texts = [tokens.texts.get(index, f"[PAD{index}]") for index in range(n_rows)]
    if len(set(texts)) != n_rows:
        seen: set[str] = set()
        twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise files.error("model.vocab", f"has the token {printable(repr(twice))} twice")
    keys["tokenizer.ggml.tokens"] = ("array[string]", texts)
    keys["tokenizer.ggml.token_type"] = ("array[int32]", [tokens.types.get(index, UNUSED) for index in range(n_rows)])
    if keys["tokenizer.ggml.model"][1] == "llama":
        keys["tokenizer.ggml.scores"] = ("array[float32]", [tokens.scores.get(index, LOWEST_SCORE) for index in range(n_rows)])


def _text_of(value: object) -> str | None:
    """A special token as the files name it: its text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_ids(files: Folder, keys: KeyTable, ids: dict[str, int]) -> None:
    names = Config.read_if_there(files.path / "special_tokens_map.json")
    generation = Config.read_if_there(files.path / "generation_config.json")
    n = len(keys["tokenizer.ggml.tokens"][1])
    ends: list[int] = []
    for theirs, ours in _SPECIAL.items():
        text = _text_of(files.settings.values.get(theirs)) or _text_of(names.values.get(theirs))
        text = text if text in ids or text is None else SPACE + text if SPACE + text in ids else None
        index: Any = ids[text] if text is not None else None
        for config in (generation, files.config):
            listed = config.values.get(f"{theirs}_id")
            found = [one for one in (listed if isinstance(listed, list) else [listed]) if type(one) is int and 0 <= one < n]
            if theirs == "eos_token":
                ends += [one for one in found if one not in ends]
            if index is None and found:
                index = found[0]
        if index is not None:
            keys[f"tokenizer.ggml.{ours}_token_id"] = ("uint32", index)
    eos = keys.get("tokenizer.ggml.eos_token_id", ("", None))[1]
    others = [one for one in ends if one != eos]
    if len(others) == 1:
        keys["tokenizer.ggml.eot_token_id"] = ("uint32", others[0])
    if keys["tokenizer.ggml.model"][1] == "bert":
        for ours, role in (("bos", "cls"), ("eos", "seperator")):
            if f"tokenizer.ggml.{role}_token_id" in keys:
                keys[f"tokenizer.ggml.{ours}_token_id"] = keys[f"tokenizer.ggml.{role}_token_id"]
        return
    first, last = _template_ends(files)
    for ours, index, default in (("bos", first, keys["tokenizer.ggml.model"][1] == "llama"), ("eos", last, False)):
        stated = files.settings.values.get(f"add_{ours}_token")
        known = keys.get(f"tokenizer.ggml.{ours}_token_id", ("", None))[1]
        adds = stated if isinstance(stated, bool) else index == known if _has_template(files) and known is not None else default
        keys[f"tokenizer.ggml.add_{ours}_token"] = ("bool", adds)


def _templates(files: Folder) -> list[dict[str, Any]]:
    after = (files.tokenizer or {}).get("post_processor")
    steps = after.get("processors", [after]) if isinstance(after, dict) else []
    return [step for step in steps if isinstance(step, dict) and step.get("type") == "TemplateProcessing"]


def _has_template(files: Folder) -> bool:
    return files.tokenizer is not None and (bool(_templates(files)) or files.tokenizer.get("post_processor") is not None)


def _template_ends(files: Folder) -> tuple[int | None, int | None]:
    """Ids of the special tokens that tokenizer.json puts in front of a text and behind it."""
    for step in _templates(files):
        parts = [part for part in step.get("single") or () if isinstance(part, dict)]
        known = step.get("special_tokens") if isinstance(step.get("special_tokens"), dict) else {}

        def index(part: dict[str, Any], known: Any = known) -> int | None:
            name = part.get("SpecialToken", {}).get("id") if isinstance(part.get("SpecialToken"), dict) else None
            entry = known.get(name) if isinstance(name, str) else None
            found = entry.get("ids") if isinstance(entry, dict) else None
            return found[0] if isinstance(found, list) and found and type(found[0]) is int else None

        if parts:
            return index(parts[0]), index(parts[-1])
    return None, None


def _chat_template(files: Folder, keys: KeyTable) -> None:
    file = files.path / "chat_template.jinja"
    found: Any = files.settings.values.get("chat_template")
    if file.is_file():
        found = read_text(file)
    elif found is None and (files.path / "chat_template.json").is_file():
        found = Config(files.path / "chat_template.json", read_json(files.path / "chat_template.json")).values.get("chat_template")
    if isinstance(found, str):
        keys["tokenizer.chat_template"] = ("string", found)
    elif isinstance(found, list):
        named = {one["name"]: one["template"] for one in found if isinstance(one, dict) and {"name", "template"} <= one.keys()}
        for name, text in named.items():
            if isinstance(name, str) and isinstance(text, str):
                keys["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = ("string", text)
