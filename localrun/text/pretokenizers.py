"""How each family of byte-level BPE vocabularies cuts text into words before merging: `tokenizer.ggml.pre` by name.

A pre-tokenizer is a list of regular expressions. Each is applied to every piece that the one before it left; what matches becomes a piece
of its own and so does what lies between matches. The expressions are facts about the vocabularies (a vocabulary works only with the cuts it
was trained with), written here from shared parts. The regex engine is Oniguruma, through the `tokenizers` package.

Beside the cuts, the name decides a few habits of the family (`Family`), as the format's reference implementation has them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from localrun.text.utf8 import WIDE_SPACES

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

Span = tuple[int, int]
Step = str | Callable[[str], list[Span]]
"""A regular expression, or a function from a text to the spans it falls into."""

# ---- parts that many expressions share ----

_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BREAKS = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"


def _tiktoken(numbers: str, *, word: str = _WORD, marks: str = _MARKS, spaces: str = _SPACES) -> str:
    """The form that cl100k_base introduced and many followed: contractions, words, numbers, marks, line breaks, spaces."""
    return "|".join((_CONTRACTION, word, numbers, marks, _BREAKS, spaces))


def _cased(numbers: str, *, upper: str, lower: str, contraction: str = f"(?:{_CONTRACTION})?") -> str:
    """The form of o200k_base: a word ends where capitals begin again. upper, lower: a character of a word's first and second part."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return "|".join((words, numbers, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _BREAKS, _SPACES))


_LLAMA3 = _tiktoken(r"\p{N}{1,3}")
_QWEN2 = _tiktoken(r"\p{N}")
_NOT_ASCII_LOWER = r"(?:(?=\p{L})[^a-z])"
_NOT_ASCII_UPPER = r"(?:(?=\p{L})[^A-Z])"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}|{_SPACES}"
_SPARK = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CASED_LETTERS = (
    # Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee and further letters with case, as DeepSeek LLM lists them.
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

# ---- steps that are no regular expressions ----


def _threes(run: str, at: int) -> list[Span]:
    """Spans of a run of digits that begins at `at`: groups of three counted from its right end (12 345 678)."""
    end = at + len(run)
    first = at + (len(run) % 3 or 3)
    return [(at, first), *((i, i + 3) for i in range(first, end, 3))]


def _numbers_in_threes(piece: str) -> list[Span]:
    """For a piece that an expression \\p{N}+ left: numbers in threes from the right, anything else whole."""
    return _threes(piece, 0) if unicodedata.category(piece[0])[0] == "N" else [(0, len(piece))]


def _text_and_numbers_in_threes(text: str) -> list[Span]:
    """Numbers in threes from the right, the first group together with the text before it: spaces there see that a number follows."""
    spans: list[Span] = []
    start = at = 0
    while at < len(text):
        end = at
        while end < len(text) and unicodedata.category(text[end])[0] == "N":
            end += 1
        if end == at:
            at += 1
            continue
        groups = _threes(text[at:end], at)
        spans += [(start, groups[0][1]), *groups[1:]]
        start = at = end
    if start < len(text):
        spans.append((start, len(text)))
    return spans


def _ascii_digits_in_threes(piece: str) -> list[Span]:
    """Runs of 0 to 9 in threes from the right, what is between them whole."""
    spans: list[Span] = []
    at = 0
    for match in _ASCII_DIGITS.finditer(piece):
        if match.start() > at:
            spans.append((at, match.start()))
        spans += _threes(match[0], match.start())
        at = match.end()
    if at < len(piece):
        spans.append((at, len(piece)))
    return spans


_ASCII_DIGITS = re.compile("[0-9]+")

# ---- families ----


@dataclass(frozen=True, slots=True)
class Family:
    """What a pre-tokenizer's name says about a vocabulary."""

    steps: tuple[Step, ...]
    ignore_merges: bool = False
    """A word that is a token as a whole is taken whole, whatever the merges say."""
    add_bos: bool = False
    add_sep: bool = False
    no_bos: bool = False
    """There is no default beginning-of-sequence token."""
    clean_spaces: bool = True
    byte_level: bool = True
    """Bytes are written in GPT-2's printable alphabet; otherwise as they are, spaces as U+2581."""
    whole_line_breaks: bool = False
    """A word of line breaks alone that is a token is taken whole."""
    always_bos: bool = False
    """A beginning-of-sequence token is added whatever the file says: files of this family say it wrongly."""
    space_before_words: bool = False
    """Every word has a U+2581 in front, in the text or not."""
    drop_spaces: bool = False
    """White space separates words and is not kept."""


_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_OLD_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASIAN_SCRIPTS = (  # 8c48 is what Unicode normalization made of f900, in the reference too
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_HANGUL_MARKS_BOPOMOFO_KANA = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_KANA_AND_HAN}"
)
_HALVING_SPACES = "|".join([*(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])
_LINES = r"[^\n]+|[\n]+"
_FALCON_MARKS = r"\p{P}\$\+<=>\^~\|"
_GPT2_ALL_DIGITS = (r"\p{N}", _GPT2)

_GPT2_FAMILY = Family((_GPT2,))
_DIGIT_FAMILY = Family(_GPT2_ALL_DIGITS)
_LLAMA3_FAMILY = Family((_LLAMA3,))
_QWEN2_FAMILY = Family((_QWEN2,), clean_spaces=False)
_DEEPSEEK3_FAMILY = Family((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3), clean_spaces=False)
_GPT4O_FAMILY = Family((_cased(r"\p{N}{1,3}", upper=_NOT_ASCII_LOWER, lower=_NOT_ASCII_UPPER),), clean_spaces=False)
_GRANITE_UPPER = r"(?:(?=[\p{L}\p{M}])[^a-z])"
_GRANITE_LOWER = r"(?:(?=[\p{L}\p{M}])[^A-Z])"
_KIMI = rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^\p{{Han}}]]+(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_MARKS}|{_BREAKS}|{_SPACES}"
_BLOOM_FAMILY = Family((_BLOOM,))
_SPM_LIKE = Family((_LINES,), byte_level=False)

_FAMILIES: dict[tuple[str, ...], Family] = {
    ("default",): Family((f"[{_FALCON_MARKS}]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"): replace(
        _LLAMA3_FAMILY, ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe"): _LLAMA3_FAMILY,
    ("chatglm-bpe",): replace(_LLAMA3_FAMILY, no_bos=True),
    ("glm4", "glm5"): replace(_LLAMA3_FAMILY, no_bos=True, ignore_merges=True),
    ("jais-2",): Family((_tiktoken(r"\p{N}{1,3}", spaces=_HALVING_SPACES),)),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert", "exaone4",
     "mpt", "olmo", "jais"): _GPT2_FAMILY,
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): replace(_GPT2_FAMILY, add_sep=True),
    ("trillion", "granite-docling"): replace(_GPT2_FAMILY, clean_spaces=False),
    ("starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"): _DIGIT_FAMILY,
    ("command-r", "smollm"): replace(_DIGIT_FAMILY, clean_spaces=False),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"): _QWEN2_FAMILY,
    ("stablelm2", "megrez"): replace(_QWEN2_FAMILY, clean_spaces=True),
    ("qwen35",): Family(
        (_tiktoken(r"\p{N}", word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", marks=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), clean_spaces=False
    ),
    ("laguna",): Family((_LINES, _QWEN2), clean_spaces=False),
    ("ufakzeka",): Family((rf"{_WORD}|\p{{N}}|{_MARKS}|{_BREAKS}|{_SPACES}",), clean_spaces=False),
    ("kimi-k2",): Family((_KIMI,), clean_spaces=False),
    ("minicpm5",): Family((r"\p{N}{1,3}", _tiktoken(r"\p{N}+")), ignore_merges=True),
    ("seed-coder",): Family((_tiktoken(r"\p{N}", marks=r" ?[^\s\p{L}\p{N}\r\n]+"),), clean_spaces=False),
    ("bailingmoe", "bailingmoe2", "llada-moe"): Family(
        (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|{_SPACES}",), clean_spaces=False
    ),
    ("exaone-moe",): Family(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    ("deepseek-llm",): Family(
        (
            "[\r\n]", rf"\s?[{_CASED_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+\z", _OLD_CJK, r"\p{N}+",
        ),
        clean_spaces=False,
    ),
    ("deepseek-coder",): Family(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}"), clean_spaces=False),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): _DEEPSEEK3_FAMILY,
    ("spark2_5",): Family((r"\p{N}", _KANA_AND_HAN, _SPARK), clean_spaces=False),
    ("afmoe",): Family((_text_and_numbers_in_threes, _ASIAN_SCRIPTS, _DEEPSEEK3), clean_spaces=False),
    ("youtu",): Family(
        (_HANGUL_MARKS_BOPOMOFO_KANA, _cased(r"\p{N}", upper=_UPPER, lower=_LOWER)), clean_spaces=False, ignore_merges=True
    ),
    ("falcon",): Family((f"[{_FALCON_MARKS}`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("poro-chat",): replace(_BLOOM_FAMILY, clean_spaces=False),
    ("bloom", "gpt3-finnish"): _BLOOM_FAMILY,
    ("viking",): Family((_BLOOM, r"\p{N}"), clean_spaces=False),
    ("tekken",): Family(
        (_cased(r"\p{N}", upper=_NOT_ASCII_LOWER, lower=_NOT_ASCII_UPPER, contraction=""),),
        clean_spaces=False, ignore_merges=True, add_bos=True,
    ),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _GPT4O_FAMILY,
    ("granite-embed-multi-97m",): Family(
        (_cased(r"\p{N}{1,3}", upper=_GRANITE_UPPER, lower=_GRANITE_LOWER),), clean_spaces=False, ignore_merges=True
    ),
    ("tiny_aya", "cohere2moe"): Family(
        (r"\p{N}+", _numbers_in_threes, _cased(r"\p{N}{1,3}", upper=_UPPER, lower=_LOWER)), clean_spaces=False
    ),
    ("chameleon",): Family(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        clean_spaces=False, add_bos=True,
    ),
    ("superbpe",): Family((r"\p{N}+", _ascii_digits_in_threes), clean_spaces=False),
    ("gemma4", "granite-embed-multi-311m"): replace(_SPM_LIKE, whole_line_breaks=True, always_bos=True),
    ("mmbert",): replace(_SPM_LIKE, space_before_words=True),
    ("whitespace",): Family((r"\S+",), byte_level=False, drop_spaces=True),
    ("sarvam-moe",): replace(_SPM_LIKE, clean_spaces=False),
}  # fmt: skip

PRE_TOKENIZERS: Final[dict[str, Family]] = {name: family for names, family in _FAMILIES.items() for name in names}
"""Every value of `tokenizer.ggml.pre` that is supported."""


# ---- splitting ----

# The expressions see a vertical tab for every space beyond ASCII, as in the reference: ranges that cover U+3000 then do not match it.
_STAND_INS = dict.fromkeys(map(ord, WIDE_SPACES), "\v") | dict.fromkeys(range(0xD800, 0xE000), "\ue000")


class Splitter:
    """Cuts texts as one family does. Safe to use from several threads."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._stages: list[PreTokenizer | Callable[[str], list[Span]]] = []
        run: list[str] = []
        for step in steps:
            if isinstance(step, str):
                run.append(step)
                continue
            if run:
                self._stages.append(_compile(run))
            run = []
            self._stages.append(step)
        if run:
            self._stages.append(_compile(run))

    def split(self, text: str) -> list[str]:
        """The pieces, in order; joined they are `text` again. Lone surrogates stand for code points that have no UTF-8."""
        seen = text if text.isascii() else text.translate(_STAND_INS)
        pieces: list[tuple[str, Span]] = [(seen, (0, len(seen)))]
        for stage in self._stages:
            cut: list[tuple[str, Span]] = []
            for piece, (start, _) in pieces:
                if callable(stage):
                    cut += [(piece[a:b], (start + a, start + b)) for a, b in stage(piece)]
                elif start:
                    cut += [(part, (start + a, start + b)) for part, (a, b) in stage.pre_tokenize_str(piece)]
                else:
                    cut += stage.pre_tokenize_str(piece)
            pieces = cut
        if seen is text or seen == text:
            return [piece for piece, _ in pieces]
        return [text[a:b] for _, (a, b) in pieces]


def _compile(expressions: list[str]) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    return Sequence([Split(Regex(expression), "isolated") for expression in expressions])
