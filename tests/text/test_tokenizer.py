"""Tokenizers of all kinds on tiny vocabularies: special tokens, what goes around a text, damaged files, and what must hold for any text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.models.errors import ModelFileError
from localrun.text.merging import _SHORT, _merge_long, _merge_short
from localrun.text.pretokenizers import PRE_TOKENIZERS, Splitter
from localrun.text.rwkv import unescape
from localrun.text.special import SpecialTokens
from localrun.text.tokenizer import Tokenizer
from localrun.text.vocab import LSTRIP, RSTRIP
from tests.text.vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, bpe, keys, spm, tokenizer

TEXT = st.text() | st.text(st.sampled_from("hello wrd\n 'st12３é̂你안😀\u3000\x85<|user|></s>")) | st.text(
    st.characters(codec="utf-8", categories=["Lu", "Ll", "Lo", "Nd", "No", "Zs", "Po", "Mn", "Sm"])
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("v"), bpe())


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("v"), spm())


def pieces(tok: Tokenizer, text: str | bytes, **how: bool) -> list[str]:
    return [tok.vocab.tokens[token] for token in tok.encode(text, **how)]


# ---- byte-level BPE ----


def test_merges_in_order_of_rank(byte_level: Tokenizer) -> None:
    assert pieces(byte_level, "hello world", add_special=False) == ["hello", "Ġworld"]
    assert pieces(byte_level, "hell", add_special=False) == ["hell"]
    assert pieces(byte_level, "HELLO", add_special=False) == list("HELLO")


def test_control_tokens_only_when_asked(byte_level: Tokenizer) -> None:
    assert pieces(byte_level, "<|user|>", add_special=False) == ["<|user|>"]
    assert len(pieces(byte_level, "<|user|>", add_special=False, parse_special=False)) == len("<|user|>")


def test_user_defined_tokens_always(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, bpe(extra=(("\n\n\n", USER_DEFINED), ("hello", USER_DEFINED), ("ello w", USER_DEFINED)), merges=("h e",)))
    assert pieces(tok, "a\n\n\nb", add_special=False, parse_special=False) == ["a", "\n\n\n", "b"]
    assert pieces(tok, "hello", add_special=False, parse_special=False) == ["hello"]
    # The longer one wins though it begins later.
    assert pieces(tok, "hello w", add_special=False, parse_special=False) == ["h", "ello w"]


def test_bos_and_eos_as_the_file_says(tmp_path: Path) -> None:
    flags = [("tokenizer.ggml.add_bos_token", "bool", True), ("tokenizer.ggml.add_eos_token", "bool", True)]
    tok = tokenizer(tmp_path, bpe(*flags))
    assert pieces(tok, "hello") == ["<s>", "hello", "</s>"]
    assert pieces(tok, "") == ["<s>", "</s>"]
    assert tok.decode(tok.encode("hello"), remove_special=True) == b"hello"
    assert tok.decode(tok.encode("hello")) == b"<s>hello</s>"
    assert tok.decode(tok.encode("hello"), unparse_special=False) == b"hello"


def test_a_missing_byte_is_left_out(tmp_path: Path) -> None:
    entries = bpe()
    tokens = next(content for key, _, content in entries if key == "tokenizer.ggml.tokens")
    tokens[tokens.index("Z")] = "no byte"
    tok = tokenizer(tmp_path, entries)
    assert pieces(tok, "aZb", add_special=False) == ["a", "b"]


def test_the_first_of_equal_merges_counts(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, bpe(merges=("a b", "b c", "a b"), words=()))
    assert pieces(tok, "abc", add_special=False) == ["ab", "c"]


def test_merges_of_texts_that_are_no_tokens(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, bpe(merges=("h e", "q x", "qx z")))
    at = tok.vocab.ids.pop("qx"), tok.vocab.ids.pop("qxz")
    assert all(at)
    assert pieces(tok, "qxz", add_special=False) == ["q", "x", "z"]


def test_whole_words_before_merges_where_the_family_asks(tmp_path: Path) -> None:
    words = ("other",)
    pre = ("tokenizer.ggml.pre", "string", "llama-bpe")
    assert pieces(tokenizer(tmp_path, bpe(pre, words=words)), "other", add_special=False) == ["other"]
    assert pieces(tokenizer(tmp_path, bpe(words=words)), "other", add_special=False) == ["o", "t", "he", "r"]


@given(TEXT)
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special=False, parse_special=False)
    assert byte_level.decode(ids, clean_spaces=False) == text.encode()


@given(st.binary(max_size=60))
def test_any_bytes_are_accepted(byte_level: Tokenizer, sentence_piece: Tokenizer, data: bytes) -> None:
    byte_level.encode(data)
    ids = sentence_piece.encode(b"x" + data, add_special=False, parse_special=False)
    # A stray byte may take the space after it into a character that is no token: then the space comes back as it is written inside.
    space = "▁".encode()
    assert sentence_piece.decode(ids).replace(space, b" ") == (b"x" + data).replace(space, b" ")


@pytest.mark.parametrize("text", ["a" * 30_000, " " * 30_000, "\n" * 30_000, "한" * 10_000, "<" * 30_000, "<|user|>" * 3_000])
def test_long_repeats(byte_level: Tokenizer, sentence_piece: Tokenizer, text: str) -> None:
    """No quadratic behaviour: these would take minutes."""
    assert byte_level.decode(byte_level.encode(text, add_special=False)) == text.encode()
    assert sentence_piece.decode(sentence_piece.encode(text, add_special=False), unparse_special=True) == text.encode()


# ---- SentencePiece ----


def test_best_score_first_then_leftmost(sentence_piece: Tokenizer) -> None:
    assert pieces(sentence_piece, "hello world", add_special=False) == ["▁hello", "▁wor", "ld"]
    assert pieces(sentence_piece, "hello") == ["<s>", "▁hello"]


def test_byte_fallback(sentence_piece: Tokenizer) -> None:
    assert pieces(sentence_piece, "é", add_special=False) == ["▁", "<0xC3>", "<0xA9>"]


def test_space_before_text_that_follows_a_special_token(sentence_piece: Tokenizer, tmp_path: Path) -> None:
    assert pieces(sentence_piece, "</s>he</s>", add_special=False) == ["</s>", "▁", "he", "</s>"]
    plain = tokenizer(tmp_path, spm(("tokenizer.ggml.add_space_prefix", "bool", False)))
    assert pieces(plain, "</s>he</s>", add_special=False) == ["</s>", "he", "</s>"]
    assert plain.decode(plain.encode(" hello", add_special=False)) == b" hello"
    assert sentence_piece.decode(sentence_piece.encode(" hello", add_special=False)) == b" hello"


def test_cutting_at_spaces_changes_nothing(tmp_path: Path) -> None:
    """A piece with a space inside forbids the cut there."""
    tok = tokenizer(tmp_path, spm(extra=(("o▁w", 5.0, NORMAL),)))
    assert pieces(tok, "o w a b", add_special=False) == ["▁", "o▁w", "▁", "a", "▁", "b"]


@given(st.text(st.sampled_from("hello wrd   éx")))
def test_words_apart_are_as_words_together(sentence_piece: Tokenizer, text: str) -> None:
    from localrun.text.merging import merge

    encoder = sentence_piece._encoder
    whole = merge(list((" " + text).replace(" ", "▁")), encoder._cost)  # type: ignore[attr-defined]
    apart = pieces(sentence_piece, text, add_special=False)
    assert "".join(whole) == (" " + text).replace(" ", "▁") if text else whole == ["▁"]
    if text:
        assert [piece for piece in whole if piece in sentence_piece.vocab.ids] == [piece for piece in apart if not piece.startswith("<0x")]


# ---- other kinds ----


def test_word_piece(tmp_path: Path) -> None:
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "aff", "able", "▁!", "▁cafe", "▁你"]
    kinds = [CONTROL, CONTROL, CONTROL, CONTROL, *[NORMAL] * 6]
    ids = [("tokenizer.ggml.unknown_token_id", 1), ("tokenizer.ggml.cls_token_id", 2), ("tokenizer.ggml.seperator_token_id", 3)]
    entries = keys("bert", [(text, 0.0, kind) for text, kind in zip(texts, kinds)], *((key, "uint32", token) for key, token in ids))
    entries.append(("tokenizer.ggml.bos_token_id", "uint32", 2))
    tok = tokenizer(tmp_path, entries)
    assert pieces(tok, "UNaffable! café你\nxyz") == ["[CLS]", "▁un", "aff", "able", "▁!", "▁cafe", "▁你", "[UNK]", "[SEP]"]


def test_unigram_takes_the_best_sum(tmp_path: Path) -> None:
    tokens = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    scores = {"▁": -2.0, "▁a": -3.0, "b": -3.0, "a": -3.0, "ab": -3.5, "▁ab": -9.0}
    tokens += [(text, score, NORMAL) for text, score in scores.items()]
    space = ("tokenizer.ggml.add_space_prefix", "bool", True)
    tok = tokenizer(tmp_path, keys("t5", tokens, space))
    assert pieces(tok, "ab") == ["▁", "ab", "</s>"]
    assert pieces(tok, "axxb x", add_special=False) == ["▁a", "<unk>", "b", "▁", "<unk>"]


def test_rwkv_takes_the_longest(tmp_path: Path) -> None:
    texts = ["<s>", *(f"\\x{byte:02x}" for byte in range(256)), "ab", "abc", "\\n\\n", "\\\\x", "\\xed\\x95\\x9c"]
    tok = tokenizer(tmp_path, keys("rwkv", [(text, 0.0, NORMAL) for text in texts], scores=False))
    assert pieces(tok, "abcab\n\n한") == ["abc", "ab", "\\n\\n", "\\xed\\x95\\x9c"]
    assert tok.decode(tok.encode("abd\\x 한")) == "abd\\x 한".encode()
    assert unescape(r"\t\\\'\xff") == b"\t\\'\xff"


# ---- files that are wrong ----

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (bpe(("tokenizer.ggml.pre", "string", "nosuch")), ["tokenizer.ggml.pre", "nosuch"]),
        (keys("plamo9", [("a", 0.0, NORMAL)]), ["tokenizer.ggml.model", "plamo9"]),
        (keys("gpt2", [("a", 0.0, NORMAL)]), ["tokenizer.ggml.merges", "missing"]),
        (bpe(merges=("h e", "ab")), ["tokenizer.ggml.merges", "item 1 is 'ab'"]),
        (bpe(merges=("h e", "")), ["tokenizer.ggml.merges", "item 1 is ''"]),
        (keys("llama", [("a", 0.0, NORMAL)], scores=False), ["tokenizer.ggml.scores", "missing"]),
        (keys("llama", [("a", 0.0, NORMAL), ("a", 0.0, NORMAL)]), ["tokenizer.ggml.tokens", "'a'", "more than once"]),
        (keys("llama", []), ["tokenizer.ggml.tokens", "empty"]),
        (keys("t5", [("a", 0.0, NORMAL)]), ["tokenizer.ggml.unknown_token_id"]),
        (
            keys("t5", [(text, 0.0, NORMAL) for text in "abc"], (CHARSMAP, "array[uint8]", [255, 255, 255, 255, 0])),
            ["precompiled_charsmap", "damaged"],
        ),
        (spm(("tokenizer.ggml.token_type", "array[int32]", [1, 2])), ["tokenizer.ggml.token_type"]),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, entries: list, names: list[str]) -> None:
    with pytest.raises(ModelFileError) as caught:
        tokenizer(tmp_path, entries)
    line = str(caught.value)
    assert "\n" not in line
    assert all(name in line for name in names), line


def test_special_ids_outside_the_vocabulary_fall_back(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path, spm(("tokenizer.ggml.bos_token_id", "uint32", 99_999), ("tokenizer.ggml.eos_token_id", "uint32", 0xFFFFFFFF)))
    assert (tok.bos_id, tok.eos_id) == (1, 2)


def test_token_types_that_mean_nothing(tmp_path: Path) -> None:
    entries = spm()
    next(content for key, _, content in entries if key == "tokenizer.ggml.token_type")[-1] = 4242
    assert tokenizer(tmp_path, entries).piece(spm_size() - 1) == b""


def spm_size() -> int:
    return len(next(content for key, _, content in spm() if key == "tokenizer.ggml.tokens"))


def test_ids_outside_the_vocabulary(byte_level: Tokenizer) -> None:
    for token in (-1, byte_level.n_vocab):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            byte_level.piece(token)


def test_byte_tokens(sentence_piece: Tokenizer) -> None:
    token = sentence_piece.vocab.ids["<0xE2>"]
    assert sentence_piece.piece(token) == b"\xe2"
    assert sentence_piece.vocab.attr(token) == 32 and BYTE == 6


# ---- end of generation ----


@pytest.mark.parametrize(
    ("extra", "ends"),
    [
        ((), {"</s>"}),
        ((("<|im_end|>", CONTROL), ("<|endoftext|>", CONTROL)), {"</s>", "<|im_end|>", "<|endoftext|>"}),
        ((("<|im_end|>", NORMAL),), {"</s>", "<|im_end|>"}),
        ((("<|end|>", CONTROL), ("<|return|>", CONTROL)), {"</s>", "<|end|>", "<|return|>"}),
        ((("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)), {"</s>", "<|return|>", "<|call|>"}),
        ((("<|fim_pad|>", CONTROL), ("<|file_sep|>", CONTROL), ("<|fim_prefix|>", CONTROL)), {"</s>", "<|fim_pad|>", "<|file_sep|>"}),
        ((("<turn|>", CONTROL), ("<|tool_response>", CONTROL)), {"<turn|>", "<|tool_response>"}),
    ],
)
def test_which_tokens_end_a_generation(tmp_path: Path, extra: tuple[tuple[str, int], ...], ends: set[str]) -> None:
    tok = tokenizer(tmp_path, bpe(extra=extra))
    assert {tok.vocab.tokens[token] for token in tok.eog_ids} == ends


# ---- parts ----


@given(st.lists(st.text("abc", max_size=3), max_size=8), st.text("abcd ", max_size=30))
def test_special_tokens_are_found_as_by_searching_for_each(texts: list[str], text: str) -> None:
    specials = sorted({text for text in texts if text}, key=lambda special: (-len(special), special))
    pieces: list[str | int] = [text] if text else []
    for i, special in enumerate(specials):
        cut: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                cut.append(piece)
                continue
            while special in piece:
                before, piece = piece.split(special, 1)
                cut += [before, i] if before else [i]
            if piece:
                cut.append(piece)
        pieces = cut
    assert SpecialTokens((special, i, 0) for i, special in enumerate(specials)).split(text) == pieces


def test_special_tokens_that_swallow_space() -> None:
    both = SpecialTokens([("<m>", 7, LSTRIP | RSTRIP), ("<l>", 8, LSTRIP)])
    assert both.split("a \n<m>\t b <l> c") == ["a", 7, "b", 8, " c"]
    assert both.split(" <m> ") == [7]


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    st.dictionaries(st.text("abcd", min_size=2, max_size=5), st.integers(0, 9)),
)
def test_both_ways_of_merging_agree(symbols: list[str], ranks: dict[str, int]) -> None:
    def cost(left: str, right: str) -> int | None:
        return ranks.get(left + right)

    assert _merge_short(symbols, cost) == _merge_long(symbols, cost)
    assert _SHORT > 2


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
@given(text=TEXT)
def test_every_pre_tokenizer_keeps_the_text(name: str, text: str) -> None:
    splitter = SPLITTERS.setdefault(name, Splitter(PRE_TOKENIZERS[name].steps))
    words = splitter.split(text)
    assert "".join(words) == text
    assert all(words)


SPLITTERS: dict[str, Splitter] = {}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'll  pay 1234.", ["I", "'ll", " ", " pay", " 1234", "."]),
        ("llama-bpe", "I'LL pay 1234\n\n x", ["I", "'LL", " pay", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "12 ab", ["1", "2", " ab"]),
        ("starcoder", "a12", ["a", "1", "2"]),
        ("falcon", "a(1234)", ["a", "(", "123", "4", ")"]),
        ("deepseek-llm", "a 你好1\n", ["a", " ", "你好", "1", "\n"]),
        ("deepseek-v3", "x12345カナ.y", ["x", "123", "45", "カナ", ".y"]),
        ("gpt-4o", "fooBAR's", ["foo", "BAR's"]),
        ("tekken", "fooBar's", ["foo", "Bar", "'s"]),
        ("tiny_aya", "n 12345", ["n", " ", "12", "345"]),
        ("superbpe", "by the way 12345 x", ["by the way ", "12", "345", " x"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("bloom", " a, b", [" a", ",", " b"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("exaone-moe", "a b c 1", ["a b c", " ", "1"]),
        ("kimi-k2", "你好world's1234", ["你好", "world's", "123", "4"]),
        ("qwen35", "n\u0302o", ["n\u0302o"]),
        ("spark2_5", "a!\n\n1 2", ["a", "!", "\n", "\n", "1", " ", "2"]),
        ("afmoe", "a   12345", ["a", "  ", " ", "12", "345"]),
        ("chameleon", "IMGIMGABZa1", ["IMGIMGABZ", "a", "1"]),
        ("seed-coder", "a!\n", ["a", "!", "\n"]),
        ("bailingmoe", "a \n\n b's", ["a", " \n\n", " b", "'s"]),
        ("youtu", "안녕你好1", ["안녕", "你好", "1"]),
        ("jais-2", "a" + " " * 6 + "b", ["a", "    ", " ", " b"]),
    ],
)
def test_words_of_a_family(name: str, text: str, words: list[str]) -> None:
    assert Splitter(PRE_TOKENIZERS[name].steps).split(text) == words
