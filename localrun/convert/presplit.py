"""Which pre-tokenizer a tokenizer.json describes: its steps, compared with those of the vocabularies that have a name in GGUF files.

The expressions are facts about published vocabularies, as their files spell them. One that is not listed is refused: with other cuts a
model sees other tokens than it was trained with.
"""

from __future__ import annotations

from typing import Any

from localrun.text.pretokenizers import PRE_TOKENIZERS

Step = tuple[Any, ...]

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDING = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _tiktoken(numbers: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{_ENDING}"


def _cased(numbers: str, contraction: str) -> str:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contraction}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES_ONLY: Step = ("bytes", False)
_GPT2: Step = ("bytes", True)
_EACH_DIGIT: Step = ("digits", True)

_KNOWN: dict[tuple[Step, ...], tuple[str, ...]] = {
    (_GPT2,): ("gpt-2",),
    (_EACH_DIGIT, _GPT2): ("smollm", "starcoder"),
    (("split", _tiktoken(r"\p{N}{1,3}")), _BYTES_ONLY): ("llama-bpe", "dbrx"),
    (("split", _tiktoken(r"\p{N}")), _BYTES_ONLY): ("qwen2", "stablelm2"),
    (("split", _cased(r"\p{N}", "")), _BYTES_ONLY): ("tekken",),
    (("split", _cased(r"\p{N}{1,3}", f"{_CONTRACTION}?")), _BYTES_ONLY): ("gpt-4o",),
    (("split", r"\p{N}{1,3}"), ("split", "[一-龥\u3040-ゟ゠-ヿ]+"), ("split", _DEEPSEEK), _BYTES_ONLY): ("deepseek-v3",),
    (
        ("split", r"[\r\n]"), ("split", r"\s?\p{L}+"), ("split", r"\s?\p{P}+"), ("split", "[一-龥ࠀ-一가-\ud7ff]+"),
        _EACH_DIGIT, _BYTES_ONLY,
    ): ("deepseek-coder",),
}  # fmt: skip
"""Steps -> names; of several, those that differ in habits beside the cuts."""


def steps_of(pre_tokenizer: object) -> tuple[Step, ...]:
    """The steps of a tokenizer.json's `pre_tokenizer`, comparable. Kinds that no byte-level vocabulary has stay as a marker."""
    if not isinstance(pre_tokenizer, dict):
        return ()
    kind = pre_tokenizer.get("type")
    if kind == "Sequence" and isinstance(pre_tokenizer.get("pretokenizers"), list):
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in steps_of(part))
    if kind == "ByteLevel":
        if pre_tokenizer.get("add_prefix_space"):
            return (("bytes with a space in front",),)
        return (("bytes", pre_tokenizer.get("use_regex", True) is True),)
    if kind == "Digits":
        return (("digits", pre_tokenizer.get("individual_digits") is True),)
    if kind == "Split" and isinstance(pre_tokenizer.get("pattern"), dict):
        plain = str(pre_tokenizer.get("behavior")).lower() in ("isolated", "removed") and pre_tokenizer.get("pattern", {}).get("Regex")
        # "removed" with invert keeps what matches, as "isolated" does where the expression leaves nothing out
        kept = (str(pre_tokenizer.get("behavior")).lower() == "isolated") != bool(pre_tokenizer.get("invert"))
        if plain and kept:
            return (("split", pre_tokenizer["pattern"]["Regex"]),)
    return (("other", str(kind)),)


def name_of(pre_tokenizer: object, *, ignore_merges: bool, clean_spaces: bool | None) -> str | None:
    """The value of tokenizer.ggml.pre for a tokenizer.json's `pre_tokenizer`; None: it is not known.

    ignore_merges: the vocabulary takes words that are tokens whole; clean_spaces: what tokenizer_config.json says of
    clean_up_tokenization_spaces, None where it is silent. They tell vocabularies with the same cuts apart.
    """
    names = _KNOWN.get(steps_of(pre_tokenizer), ())
    fitting = [name for name in names if PRE_TOKENIZERS[name].ignore_merges == ignore_merges]
    cleaning = [name for name in fitting if clean_spaces is None or PRE_TOKENIZERS[name].clean_spaces == clean_spaces]
    return next(iter(cleaning or fitting), None)
