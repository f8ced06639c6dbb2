"""What a model file says about its vocabulary: texts, scores, kinds of tokens, special ids, which tokens end a generation.

Keys are those of the GGUF specification (`tokenizer.ggml.*`). Where files leave things unsaid (which tokens end a generation, what a
tokenizer of a given kind puts in front) the rules are llama.cpp's, the reference implementation: facts about files in circulation.
Knows nothing of how text becomes tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, printable
from localrun.models.params import Keys

# Attribute bits of a token; the values are those of llama.cpp's API.
UNKNOWN: Final = 1
UNUSED: Final = 2
NORMAL: Final = 4
CONTROL: Final = 8
USER_DEFINED: Final = 16
BYTE: Final = 32
LSTRIP: Final = 128
RSTRIP: Final = 256

_ATTR_OF_TYPE = bytes((0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE, *[0] * 249))
"""From `tokenizer.ggml.token_type`; other values mean no attribute."""

# Vocabularies have 100,000s of tokens, so what is asked of all of them is asked in C: attributes are a byte each.
_SPECIAL = re.compile(b"[%s]" % b"".join(b"\\x%02x" % bits for bits in range(256) if bits & (UNKNOWN | CONTROL | USER_DEFINED)))

MODELS = ("llama", "gpt2", "gemma4", "whitespace", "bert", "t5", "rwkv")
"""Values of `tokenizer.ggml.model` that have a tokenizer here."""

SPACE = "\u2581"
"""Stands for a space in the texts of SentencePiece vocabularies."""

# bos, eos, unk, sep, pad that hold when the file names none.
_DEFAULT_IDS: dict[str, tuple[int | None, ...]] = {
    "llama": (1, 2, 0, None, None),
    "gpt2": (11, 11, None, None, None),
    "gemma4": (None, None, None, None, None),
    "whitespace": (11, 11, None, None, None),
    "bert": (101, None, 100, 102, 0),
    "t5": (None, 1, 2, None, 0),
    "rwkv": (None, None, None, None, None),
}

_END_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>",
)  # fmt: skip
_END_OF_GENERATION = (
    *_END_OF_TURN, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>",
    "<|tool_response>", "[e~[",
)  # fmt: skip
"""Texts of tokens that end a generation whatever the file calls them."""

_FILL_IN = {
    "prefix": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "suffix": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "sep": ("<|file_sep|>",),
}
_FILL_IN_KEYS = {
    "prefix": ("fim_pre", "prefix"), "suffix": ("fim_suf", "suffix"), "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",), "repo": ("fim_rep",), "sep": ("fim_sep",),
}  # fmt: skip

_HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Marked as control tokens in files of gpt-oss, yet part of what the model says."""


@dataclass(slots=True)
class Vocab:
    """One file's vocabulary. Lists are indexed by token id."""

    path: str
    model: str
    """`tokenizer.ggml.model`, one of MODELS."""
    pre: str
    """`tokenizer.ggml.pre`, "default" when absent."""
    tokens: list[str]
    """Texts as the file writes them; bytes that are no UTF-8 are lone surrogates ("surrogateescape")."""
    scores: list[float]
    """Log-probabilities or merge priorities; empty when the file has none."""
    attrs: bytearray
    """Attribute bits, all but RSTRIP."""
    ids: dict[str, int]
    """Token id by text."""
    rstrip: set[int] = field(default_factory=set)
    """Tokens that swallow the whitespace behind them."""
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    fill_in: dict[str, int] = field(default_factory=dict)
    """Tokens for filling in the middle, by role: prefix, suffix, middle, pad, repo, sep."""
    eog: frozenset[int] = frozenset()
    """Tokens that end a generation."""
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    add_space_prefix: bool = False
    remove_extra_whitespaces: bool = False
    escape_spaces: bool = False
    """Spaces are written U+2581 in token texts."""
    clean_spaces: bool = False
    """Detokenization drops the space before ?!., and some apostrophes ("clean up tokenization spaces")."""
    lowercase: bool = True
    strip_accents: bool = True
    charsmap: bytes = b""
    """`precompiled_charsmap` of SentencePiece: normalization rules."""

    def special(self) -> list[int]:
        """Tokens that are looked for in a text before anything else: control, user-defined and unknown ones, by id."""
        return [match.start() for match in _SPECIAL.finditer(self.attrs)]

    def attr(self, token: int) -> int:
        """All attribute bits of a token."""
        return self.attrs[token] | (RSTRIP if token in self.rstrip else 0)


def read_vocab(gguf: GGUFFile, add_bos: bool, clean_spaces: bool, escape_spaces: bool, add_sep: bool, no_bos: bool) -> Vocab:
    """The vocabulary of an open file.

    The flags are defaults that hang on the kind of tokenizer (of GPT-2 style ones: on the pre-tokenizer); the file's keys override them.
    no_bos: this kind has no default beginning-of-sequence token. Raises ModelFileError.
    """
    keys = Keys(gguf)
    model = keys.str("tokenizer.ggml.model", choices=MODELS)
    tokens = keys.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise keys.error("tokenizer.ggml.tokens", "is empty; the model has no vocabulary")
    if "" in tokens:
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens))))
    if len(ids) != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if ids[text] != i)
        raise keys.error("tokenizer.ggml.tokens", f"has the token {printable(repr(twice))} more than once")

    types = keys.ints("tokenizer.ggml.token_type", None, length=len(tokens))
    if types is None:
        attrs = bytearray([NORMAL]) * len(tokens)
    else:
        try:
            attrs = bytearray(types).translate(_ATTR_OF_TYPE)
        except ValueError:
            attrs = bytearray(kind if 0 <= kind < 256 else 0 for kind in types).translate(_ATTR_OF_TYPE)
    vocab = Vocab(
        path=str(gguf.path),
        model=model,
        pre=keys.str("tokenizer.ggml.pre", "default"),
        tokens=tokens,
        scores=keys.floats("tokenizer.ggml.scores", [], length=len(tokens)),
        attrs=attrs,
        ids=ids,
        add_bos=keys.bool("tokenizer.ggml.add_bos_token", add_bos),
        add_eos=keys.bool("tokenizer.ggml.add_eos_token", model == "t5"),
        add_sep=keys.bool("tokenizer.ggml.add_sep_token", add_sep),
        add_space_prefix=keys.bool("tokenizer.ggml.add_space_prefix", model == "llama"),
        remove_extra_whitespaces=keys.bool("tokenizer.ggml.remove_extra_whitespaces", False),
        escape_spaces=escape_spaces,
        clean_spaces=clean_spaces,
        lowercase=keys.bool("tokenizer.ggml.normalizer.lowercase", model != "whitespace"),
    )
    vocab.charsmap = _bytes_of(gguf, "tokenizer.ggml.precompiled_charsmap")
    vocab.strip_accents = keys.bool("tokenizer.ggml.normalizer.strip_accents", vocab.lowercase)
    if model == "llama" and not vocab.scores:
        raise keys.error("tokenizer.ggml.scores", "is missing; a 'llama' vocabulary merges by score")
    _read_special_ids(keys, vocab, no_bos)
    _find_end_of_generation(vocab)
    _set_strip(gguf, vocab)
    for token in vocab.special():
        if attrs[token] & CONTROL and "unused" in tokens[token]:
            attrs[token] |= UNUSED
    return vocab


def _bytes_of(gguf: GGUFFile, key: str) -> bytes:
    """The value of a key that is an array of bytes; nothing when absent."""
    kind = gguf.value_types.get(key, "array[uint8]")
    if kind not in ("array[uint8]", "array[int8]"):
        raise ModelFileError(gguf.path, key, f"is of type {kind}, not an array of bytes")
    values = gguf.metadata.get(key, [])
    return bytes(values if kind == "array[uint8]" else [value & 0xFF for value in values])


def neighbours_of_space(tokens: list[str]) -> str:
    """The characters that stand directly before U+2581 inside some token: between any other and a U+2581 no token reaches across."""
    before = {part[-1] for part in "\0".join(tokens).split(SPACE)[:-1] if part}
    return "".join(sorted(before - {"\0"}))


def _read_special_ids(keys: Keys, vocab: Vocab, no_bos: bool) -> None:
    """Fills bos, eos, eot, unk, sep, pad, mask and fill_in. An id outside the vocabulary is none, or the kind's default."""
    n = len(vocab.tokens)

    def of_key(name: str, default: int | None) -> int | None:
        value = keys.int(f"tokenizer.ggml.{name}_token_id", n, maximum=0xFFFFFFFF)
        if value < n:
            return value
        return default if default is not None and default < n else None

    bos, eos, unk, sep, pad = _DEFAULT_IDS[vocab.model]
    vocab.bos = of_key("bos", None if no_bos else bos)
    vocab.eos = of_key("eos", eos)
    vocab.eot = of_key("eot", None)
    vocab.unk = of_key("unknown", unk)
    # The key was misspelt in the first files and the misspelling became the name.
    vocab.sep = of_key("seperator", sep)
    vocab.pad = of_key("padding", pad)
    vocab.mask = of_key("mask", 103 if vocab.model == "bert" else None)

    def by_text(texts: tuple[str, ...]) -> int | None:
        found = next((vocab.ids[text] for text in texts if text in vocab.ids), None)
        if found is not None:
            vocab.attrs[found] |= CONTROL
        return found

    if vocab.eot is None:
        vocab.eot = by_text(_END_OF_TURN)
    for role, texts in _FILL_IN.items():
        named = [of_key(name, None) for name in _FILL_IN_KEYS[role]]
        found = next((token for token in named if token is not None), None)
        if found is None:
            found = by_text(texts)
        if found is not None:
            vocab.fill_in[role] = found


def _find_end_of_generation(vocab: Vocab) -> None:
    """Fills eog and corrects attributes of tokens whose text says more than their type."""
    ids, attrs = vocab.ids, vocab.attrs
    by_text = {text: ids[text] for text in _END_OF_GENERATION if text in ids}
    for token in by_text.values():
        attrs[token] |= CONTROL
    for text in _HARMONY_MARKS:
        if text in ids:
            attrs[ids[text]] = USER_DEFINED
    eog = set(by_text.values()) | {vocab.fill_in[role] for role in ("pad", "repo", "sep") if role in vocab.fill_in}
    eog |= {token for token in (vocab.eos, vocab.eot) if token is not None}

    # In gpt-oss and Solar Open <|end|> closes one message of several, and generation goes on.
    has = by_text.keys()
    if "<|end|>" in has and {"<|return|>", "<|flush|>"} & has and {"<|call|>", "<|calls|>"} & has:
        eog.discard(ids["<|end|>"])
        attrs[ids["<|end|>"]] = USER_DEFINED
    # In Gemma 4 and PLaMo </s> is the HTML tag that ends struck-through text.
    if "</s>" in has and ("<|tool_response>" in has or "<|plamo:eos|>" in ids):
        eog.discard(ids["</s>"])
        attrs[ids["</s>"]] = NORMAL
    vocab.eog = frozenset(eog)


def _set_strip(gguf: GGUFFile, vocab: Vocab) -> None:
    """Tokens that swallow the whitespace beside them. Files do not carry this; it hangs on the model's name, as in the reference."""
    name = gguf.metadata.get("general.name")
    name = name.lower() if isinstance(name, str) else ""
    if any(pre in vocab.pre for pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        arch in gguf.architecture for arch in ("nomic-bert-moe", "jina-bert-v3")
    ):
        if "<mask>" in vocab.ids:
            vocab.attrs[vocab.ids["<mask>"]] |= LSTRIP
    elif "phi-3" in name or "phi3" in name:
        vocab.rstrip = {*vocab.special(), *([vocab.ids["</s>"]] if "</s>" in vocab.ids else [])}
        vocab.rstrip -= {vocab.ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in vocab.ids}
    elif "modern-bert" in name and "[MASK]" in vocab.ids:
        vocab.attrs[vocab.ids["[MASK]"]] |= LSTRIP


def check_known_model(gguf: GGUFFile) -> str:
    """`tokenizer.ggml.model` if there is a tokenizer for it. Raises ModelFileError naming it otherwise."""
    model = Keys(gguf).str("tokenizer.ggml.model")
    if model not in MODELS:
        raise ModelFileError(
            gguf.path,
            "tokenizer.ggml.model",
            f"{printable(repr(model))} is a tokenizer that is not supported (supported: {', '.join(MODELS)})",
        )
    return model
