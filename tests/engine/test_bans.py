"""Banned strings: taken back where they come, never shown, and the same whatever else happens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.bans import BannedStrings, Chosen
from localrun.messages import Sampling
from tests.engine import oracle
from tests.engine.harness import Harness
from tests.fakes import BOS, FakeClock, FakeModel, FakeTokenizer, ScriptedModel

FOUR = {97: 90.0, 98: 90.0, 99: 90.0, 100: 90.0}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100),
    banned=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),  # "d" is always a way out
    temperature=st.sampled_from([0.0, 1.0]),
    n_blocks=st.integers(4, 12),
    others=st.integers(0, 3),
    per_row=st.sampled_from([0.0, 0.1]),
)
def test_never_said_and_otherwise_unchanged(
    seed: int, banned: list[str], temperature: float, n_blocks: int, others: int, per_row: float
) -> None:
    sampling = Sampling(seed=seed, temperature=temperature, logit_bias=FOUR, banned_strings=banned)
    expected = oracle.answer_without(banned, [BOS, 97, 98], sampling, 40)
    clock = FakeClock()
    harness = Harness(FakeModel(clock=clock, cost=lambda rows, attended: 0.01 + per_row * rows), n_blocks, clock=clock)
    fields = {name: getattr(sampling, name) for name in Sampling.__struct_fields__}
    outcome = harness.ask([BOS, 97, 98], max_tokens=40, **fields)
    for i in range(others):
        harness.ask([BOS, 97, 98], max_tokens=30, seed=i, logit_bias=FOUR)
    harness.run()
    assert outcome.answer == expected
    assert outcome.text == bytes(expected).decode()
    assert not any(string in outcome.text for string in banned)


def test_a_ban_that_begins_inside_a_longer_token() -> None:
    """ "hello world" is said with the pieces "hello" and " world"; banning "o w" takes "hello" back as a whole."""
    harness = Harness(ScriptedModel("say hello world"))
    outcome = harness.ask("Q:", temperature=0, banned_strings=["o w"], max_tokens=12, logprobs=0)
    harness.run()
    assert outcome.text.startswith("say ")
    assert "o w" not in outcome.text
    assert not outcome.text.startswith("say hello")
    items = [item for piece in outcome.pieces for item in piece.logprobs]
    assert b"".join(bytes(item.bytes) for item in items).decode("utf-8", "replace") == outcome.text
    assert outcome.finished is not None
    assert outcome.finished.completion_tokens == 12 == len(items)


def test_stop_string_behind_held_tokens() -> None:
    """The stop string is found while later tokens wait for a ban to be ruled out: they are no part of the answer."""
    harness = Harness(ScriptedModel("abcdefgh"))
    outcome = harness.ask("Q:", temperature=0, stop=["cd"], banned_strings=["defgX"])
    harness.run()
    assert outcome.finished is not None
    assert (outcome.text, outcome.finished.stop, outcome.finished.completion_tokens) == ("ab", "cd", 4)
    assert bytes(outcome.answer) == b"abcd"


@pytest.mark.parametrize("max_tokens", [-1, 3])
def test_what_was_held_is_shown_at_the_end(max_tokens: int) -> None:
    harness = Harness(ScriptedModel("abc"))
    outcome = harness.ask("Q:", temperature=0, banned_strings=["abcd"], max_tokens=max_tokens)
    harness.run()
    assert outcome.text == "abc"


@given(st.lists(st.text("ab한", min_size=1, max_size=4), max_size=3), st.text("ab한", max_size=30))
def test_what_is_passed_on_is_whole_and_free_of_bans(banned: list[str], text: str) -> None:
    tokenizer = FakeTokenizer()
    watcher = BannedStrings(banned, tokenizer.piece)
    passed: list[int] = []
    taken_back = False
    said: list[int] = []
    for token in tokenizer.encode(text, add_special=False):
        released, n_back = watcher.push(Chosen(token))
        said.append(token)
        if n_back:
            taken_back = True
            del said[-n_back:]
        passed += [chosen.token for chosen in released]
        assert passed == said[: len(passed)]
        assert len(said) - len(passed) == watcher.n_held
    passed += [chosen.token for chosen in watcher.flush()]
    assert passed == said
    assert taken_back == any(string in text for string in banned)
    assert not any(string.encode() in tokenizer.decode(passed) for string in banned)
