"""Vectors and scores from the engine: what a text gets depends on nothing but the text, whoever else is served, and all is given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.engine.vectors import AT_A_TIME, normalized
from localrun.errors import BadRequest, Busy, ContextOverflow, Unsupported
from localrun.messages import Embed, Embedded, Evaluate, Generate, Rank, Ranked
from localrun.models.model import Span
from tests.engine.harness import Harness, Outcome
from tests.fakes import BOS, EOS, WIDTH, FakeModel

LONG = "a text that takes several passes, for it is longer than one of them may be. " * 4


def rows(outcome: Outcome) -> NDArray[np.float32]:
    assert isinstance(outcome.vectors, Embedded), outcome
    data: NDArray[np.float32] = np.frombuffer(outcome.vectors.data, "<f4")
    return data.reshape(outcome.vectors.n, outcome.vectors.width)


def embed(texts: list[str], harness: Harness | None = None, **fields: Any) -> Outcome:
    harness = harness or Harness()
    outcome = harness.pool(Embed(request_id=f"e{len(harness.outcomes)}", texts=texts, **fields))
    harness.run()
    return outcome


def alone(text: str, **options: Any) -> NDArray[np.float32]:
    vector: NDArray[np.float32] = rows(embed([text], Harness(FakeModel(**options))))[0]
    return vector


ENCODER: dict[str, Any] = {"pooling": "mean", "causal": False, "max_batch": 512, "n_ctx_train": 512}


@pytest.mark.parametrize("options", [{}, ENCODER], ids=["decoder", "encoder"])
def test_a_vector_is_the_texts_own(options: dict[str, Any]) -> None:
    texts = ["one", "two words", LONG, "", "one", LONG + "but not the same"]
    outcome = embed(texts, Harness(FakeModel(**options)))
    got = rows(outcome)
    assert got.shape == (6, WIDTH)
    assert np.allclose(np.linalg.norm(got, axis=1), 1)
    for text, row in zip(texts, got):
        assert np.array_equal(row, alone(text, **options)), text
    assert len({row.tobytes() for row in got}) == 5
    assert isinstance(outcome.vectors, Embedded)
    assert outcome.vectors.prompt_tokens[:4] == [4, 10, 1 + len(alone_tokens(LONG)), 1]
    assert outcome.vectors.truncated == []


def alone_tokens(text: str) -> list[int]:
    return Harness().parts.tokenizer.encode(text, add_special=False)


def test_many_texts_take_few_passes() -> None:
    harness = Harness(FakeModel(**ENCODER), n_blocks=256)
    got = rows(embed([f"text {i}" for i in range(200)], harness))
    assert len({row.tobytes() for row in got}) == 200
    assert harness.model.passes <= -(-200 // AT_A_TIME) + 1


def test_streams_go_on_beside_a_long_list() -> None:
    """One token for every step, whatever is embedded meanwhile, and the same text as alone."""
    quiet = Harness(n_blocks=256)
    want = quiet.ask("tell me", max_tokens=40)
    quiet.run()
    harness = Harness(n_blocks=256)
    stream = harness.ask("tell me", max_tokens=40)
    harness.step()
    vectors = harness.pool(Embed(request_id="list", texts=[LONG + str(i) for i in range(30)]))
    for step in range(39):
        said = len(stream.pieces)
        harness.step()
        assert stream.ended or len(stream.pieces) >= said, step
    assert stream.finished is not None
    assert stream.answer == want.answer
    harness.run()
    assert np.array_equal(rows(vectors)[7], alone(LONG + "7"))


def test_a_prompt_that_comes_later_does_not_wait_for_the_whole_list() -> None:
    harness = Harness(n_blocks=512)
    vectors = harness.pool(Embed(request_id="list", texts=[LONG + str(i) for i in range(400)]))
    harness.step()
    late = harness.ask("quickly", max_tokens=3)
    while not late.ended:
        harness.step()
    assert not vectors.ended
    harness.run()


def test_cancelling_gives_everything_back() -> None:
    harness = Harness(n_blocks=64)
    vectors = harness.pool(Embed(request_id="list", texts=[LONG + str(i) for i in range(100)]))
    harness.step()
    assert harness.engine.cache.pool.n_held
    harness.engine.cancel("list")
    assert vectors.finished is not None
    assert vectors.finished.reason == "cancelled"
    assert not harness.engine.has_work
    assert harness.engine.cache.pool.n_held == 0
    harness.engine.check()
    harness.pool(Embed(request_id="another", texts=["list"]))
    harness.run()


def test_a_pass_that_fails_ends_the_whole_request_once() -> None:
    class Broken(FakeModel):
        def embed(self, spans: list[Span]) -> NDArray[np.float32]:
            if self.passes:
                raise RuntimeError("no such luck")
            return super().embed(spans)

    harness = Harness(Broken(**ENCODER))
    outcome = embed([LONG + str(i) for i in range(9)], harness)
    assert outcome.failed is not None
    assert "no such luck" in outcome.failed.message
    assert len([event for event in harness.events if getattr(event, "request_id", "") == "e0"]) == 1


def test_a_full_queue_refuses_a_list_as_a_whole() -> None:
    harness = Harness(max_running=1, max_waiting=1)
    harness.ask("one", max_tokens=20)
    harness.ask("two", max_tokens=20)
    with pytest.raises(Busy):
        harness.pool(Embed(request_id="list", texts=["a", "b"]))
    del harness.outcomes["list"]
    harness.run()


def test_too_long_texts_lose_their_end_but_not_what_closes_them() -> None:
    class Closing(Harness):
        """With an end mark behind every text."""

    harness = Closing(FakeModel(**{**ENCODER, "n_ctx_train": 20}))
    tokenizer = harness.parts.tokenizer
    tokenizer.around = lambda: ([BOS], [EOS])  # type: ignore[method-assign]
    encode = tokenizer.encode
    tokenizer.encode = lambda text, **how: [*encode(text, **how), EOS]  # type: ignore[method-assign]
    batch = harness.texts.embedding(Embed(request_id="x", texts=[LONG, "short"]))
    whole = encode(LONG)
    assert batch.texts == [[*whole[:19], EOS], [*encode("short"), EOS]]
    outcome = harness.pool(Embed(request_id="x", texts=[LONG, "short"]))
    harness.run()
    assert isinstance(outcome.vectors, Embedded)
    assert (outcome.vectors.truncated, outcome.vectors.prompt_tokens[0]) == ([0], 20)
    with pytest.raises(ContextOverflow):
        harness.texts.embedding(Embed(request_id="y", texts=[LONG], truncate=False))
    assert len(harness.texts.embedding(Embed(request_id="z", texts=[LONG], num_ctx=7)).texts[0]) == 7


def test_tokens_are_taken_as_they_are() -> None:
    harness = Harness()
    ids = harness.parts.tokenizer.encode("two words")
    outcome = harness.pool(Embed(request_id="ids", tokens=[ids, ids[1:]]))
    harness.run()
    got = rows(outcome)
    assert np.array_equal(got[0], alone("two words"))
    assert not np.array_equal(got[0], got[1])


def test_dimensions_are_cut_before_the_length_is_made_1() -> None:
    raw = rows(embed(["text"], normalize=False))[0]
    assert not np.isclose(np.linalg.norm(raw), 1)
    cut = rows(embed(["text"], dimensions=3))[0]
    assert np.allclose(cut, raw[:3] / np.linalg.norm(raw[:3]), atol=1e-7)
    assert np.array_equal(rows(embed(["text"], dimensions=3, normalize=False))[0], raw[:3])


def test_no_texts_no_vectors() -> None:
    outcome = embed([])
    assert isinstance(outcome.vectors, Embedded)
    assert (outcome.vectors.n, outcome.vectors.prompt_tokens) == (0, [])


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({}, BadRequest, "exactly one"),
        ({"texts": ["a"], "tokens": [[1]]}, BadRequest, "exactly one"),
        ({"texts": ["a"], "dimensions": WIDTH + 1}, BadRequest, "dimensions"),
        ({"texts": ["a"], "dimensions": -1}, BadRequest, "dimensions"),
        ({"tokens": [[1], []]}, BadRequest, "input 1 is empty"),
        ({"tokens": [[1 << 20]]}, BadRequest, "no token"),
        ({"texts": ["a"], "num_ctx": -1}, BadRequest, "num_ctx"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        Harness().texts.embedding(Embed(request_id="x", **fields))


def test_a_model_does_what_it_is_for() -> None:
    encoder, ranker, decoder = (Harness(FakeModel(**kind)) for kind in (ENCODER, {**ENCODER, "pooling": "rank"}, {}))
    assert [h.parts.capabilities[0] for h in (encoder, ranker, decoder)] == ["embedding", "rerank", "completion"]
    for harness in (encoder, ranker):
        with pytest.raises(Unsupported, match="does not generate text"):
            harness.intake.generation(Generate(request_id="g", prompt="hello"))
        with pytest.raises(Unsupported, match="likelihoods"):
            harness.intake.evaluation(Evaluate(request_id="g", text="hello"))
    with pytest.raises(Unsupported, match="ranks documents"):
        ranker.texts.embedding(Embed(request_id="e", texts=["a"]))
    with pytest.raises(Unsupported, match="classification head"):
        encoder.texts.ranking(Rank(request_id="r", query="q", documents=["a"]))


RANKER: dict[str, Any] = {**ENCODER, "pooling": "rank", "n_ctx_train": 64}


def test_documents_are_ranked_in_pairs() -> None:
    harness = Harness(FakeModel(**RANKER))
    outcome = harness.pool(Rank(request_id="r", query="who", documents=["he", "she <s>", LONG]))
    plain = harness.parts.tokenizer.encode
    pairs = harness.texts.ranking(Rank(request_id="r", query="who", documents=["he", "she <s>", LONG])).texts
    assert pairs[0] == [BOS, *plain("who", add_special=False), EOS, *plain("he", add_special=False)]
    assert pairs[1].count(BOS) == 1  # what a document says is no token of the format
    assert len(pairs[2]) == 64
    harness.run()
    assert isinstance(outcome.vectors, Ranked)
    assert len(set(outcome.vectors.scores)) == 3
    assert outcome.vectors.truncated == [2]
    one = harness.pool(Rank(request_id="s", query="who", documents=["she <s>"]))
    harness.run()
    assert isinstance(one.vectors, Ranked)
    assert one.vectors.scores == outcome.vectors.scores[1:2]


def test_a_ranking_template_is_filled_in() -> None:
    harness = Harness(FakeModel(**RANKER))
    harness.parts.pair_template = "<|user|>Q: {query} D: {document}<|end|>"
    texts = type(harness.texts)(harness.parts, 1024)
    encode = harness.parts.tokenizer.encode
    tokens = texts.ranking(Rank(request_id="r", query="{document}", documents=["x", LONG])).texts
    assert tokens[0] == encode("<|user|>Q: {document} D: x<|end|>", add_special=False)
    assert len(tokens[1]) <= 64
    assert tokens[1][-1] == encode("<|end|>", add_special=False)[0]
    with pytest.raises(ContextOverflow):
        texts.ranking(Rank(request_id="r", query=LONG, documents=["x"]))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text("ab <", max_size=60), min_size=1, max_size=12),
    st.integers(min_value=6, max_value=40),
    st.booleans(),
    st.integers(min_value=0, max_value=4),
)
def test_whatever_else_is_served(texts: list[str], n_blocks: int, encoder: bool, n_streams: int) -> None:
    """Small pools, streams beside (decoders only), one list cancelled in the middle."""
    options = {**ENCODER, "max_batch": 96, "n_ctx_train": 96} if encoder else {"max_batch": 24}
    harness = Harness(FakeModel(**options), n_blocks=n_blocks)
    streams = [harness.ask(f"stream {i}", max_tokens=12) for i in range(0 if encoder else n_streams)]
    first = harness.pool(Embed(request_id="first", texts=texts))
    gone = harness.pool(Embed(request_id="gone", texts=texts[::-1]))
    harness.step()
    harness.engine.cancel("gone")
    harness.run()
    assert gone.ended
    assert all(stream.ended for stream in streams)
    for text, row in zip(texts, rows(first)):
        assert np.array_equal(row, alone(text, **options))


def test_zero_stays_zero() -> None:
    assert np.array_equal(normalized(np.zeros((1, 4), np.float32)), np.zeros((1, 4), np.float32))
