"""Streaming: text comes out whole characters at a time, and joined it is what decoding everything at once gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.text.stops import StopMatcher
from localrun.text.stream import StreamDecoder
from localrun.text.tokenizer import Tokenizer
from tests.text.vocabularies import bpe, spm, tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("v"), bpe())


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("v"), spm(("tokenizer.ggml.add_space_prefix", "bool", False)))


def streamed(tok: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tok)
    return [*map(decoder.push, ids), decoder.flush()]


def test_a_character_comes_when_its_last_byte_does(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("é😀", add_special=False)
    assert streamed(byte_level, ids) == ["", "é", "", "", "", "😀", ""]


def test_a_byte_that_continues_nothing_is_replaced_at_once(byte_level: Tokenizer) -> None:
    ids = [byte_level.vocab.ids[character] for character in ("ð", "Ł", "a")]
    assert streamed(byte_level, ids) == ["", "", "\ufffda", ""]


def test_a_character_cut_off_at_the_end_is_replaced(byte_level: Tokenizer) -> None:
    assert streamed(byte_level, [byte_level.vocab.ids["ð"]]) == ["", "\ufffd"]


def test_control_tokens_are_left_out_unless_asked_for(byte_level: Tokenizer) -> None:
    assert StreamDecoder(byte_level).push(2) == ""
    assert StreamDecoder(byte_level, special=True).push(2) == "<|user|>"


def test_flush_leaves_nothing_behind(byte_level: Tokenizer) -> None:
    decoder = StreamDecoder(byte_level)
    decoder.push(byte_level.vocab.ids["ð"])
    assert decoder.flush() == "\ufffd"
    assert decoder.push(byte_level.vocab.ids["a"]) == "a"


@given(st.data())
def test_the_stream_is_the_whole(byte_level: Tokenizer, sentence_piece: Tokenizer, data: st.DataObject) -> None:
    for tok in (byte_level, sentence_piece):
        ids = data.draw(st.lists(st.integers(0, tok.n_vocab - 1), max_size=30))
        parts = streamed(tok, ids)
        assert "".join(parts) == tok.decode(ids, unparse_special=False, clean_spaces=False).decode("utf-8", "replace")
        for part in parts:
            part.encode("utf-8")


# ---- stop strings ----


def cut_into(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def matched(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for part in parts:
        emit, stop = matcher.push(part)
        shown += emit
        if stop is not None:
            assert matcher.push("more") == ("", stop) and matcher.flush() == ""
            return shown, stop
    return shown + matcher.flush(), None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


SMALL = st.text("ab\n", max_size=6)


@given(st.lists(SMALL, max_size=4), st.text("ab\nc", max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_stops_are_found_wherever_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    assert matched(stops, cut_into(text, cuts)) == naive(stops, text)


@given(st.lists(SMALL, min_size=1, max_size=3), st.text("ab\nc", max_size=30))
def test_nothing_is_held_longer_than_needed(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for character in text:
        emit, stop = matcher.push(character)
        shown += emit
        if stop is not None:
            return
        # What is held is the beginning of a stop string, and no longer end of the text is one.
        seen = shown + matcher.held
        begins = [n for n in range(len(seen) + 1) for s in stops if n < len(s) and seen.endswith(s[:n])]
        assert len(matcher.held) == max(begins, default=0)


def test_no_stops_hold_nothing() -> None:
    matcher = StopMatcher([""])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.held == ""
