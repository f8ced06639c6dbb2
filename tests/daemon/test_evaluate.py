"""/api/evaluate through a daemon and a runner process."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests import fakes
from tests.daemon import serving
from tests.daemon.serving import Daemon

TEXT = "hello world, and the same again: hello world"


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon whose model computes its logits from the tokens before."""
    with serving.daemon(tmp_path_factory.mktemp("evaluate"), load=fakes.load_fake) as running:
        yield running


def test_a_text_is_judged_token_by_token(fake: Daemon) -> None:
    opening, *lines, closing = fake.lines("/api/evaluate", {"model": "tiny", "text": TEXT, "top": 2})
    tokens = [token for line in lines for token in line["tokens"]]
    assert tokens == fakes.FakeTokenizer().encode(TEXT)
    assert opening == {"model": "tiny", "prompt_eval_count": len(tokens), "windows": 1, "done": False}
    assert (closing["done"], closing["prompt_eval_count"]) == (True, len(tokens))
    nll = [value for line in lines for value in line["nll"]]
    assert len(nll) == len(tokens) - 1
    for ids, logs in ((ids, logs) for line in lines for ids, logs in zip(line["top_ids"], line["top_logprobs"])):
        assert len(set(ids)) == 2
        assert 0 >= logs[0] >= logs[1]


def test_asked_for_ids_agree_with_the_likelihood_of_what_follows(fake: Daemon) -> None:
    tokens = fakes.FakeTokenizer().encode(TEXT)
    following = [[token] for token in [*tokens[1:], 0]]
    _, *lines, _ = fake.lines("/api/evaluate", {"model": "tiny", "tokens": tokens, "ids": following})
    asked = [-row[0] for line in lines for row in line["logprobs"]]
    assert asked[:-1] == pytest.approx([value for line in lines for value in line["nll"]])


def test_windows_cover_the_text_and_know_less(fake: Daemon) -> None:
    tokens = fakes.FakeTokenizer().encode(TEXT)
    opening, *lines, _ = fake.lines("/api/evaluate", {"model": "tiny", "text": TEXT, "window": 8, "stride": 2})
    assert opening["windows"] > 1
    assert [token for line in lines for token in line["tokens"]] == tokens
    nll = [value for line in lines for value in line["nll"]]
    assert len(nll) == len(tokens) - 1
    _, *whole, _ = fake.lines("/api/evaluate", {"model": "tiny", "text": TEXT})
    assert nll[:7] == pytest.approx([value for line in whole for value in line["nll"]][:7])
    assert all(math.isfinite(value) for value in nll)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "tiny"}, 400, "exactly one of text and tokens"),
        ({"model": "tiny", "text": "a", "tokens": [1]}, 400, "exactly one of text and tokens"),
        ({"model": "tiny", "text": "a", "stride": 3}, 400, "stride needs a window"),
        ({"model": "tiny", "text": TEXT, "window": 4, "stride": 9}, 400, "not by 9"),
        ({"model": "tiny", "tokens": [10**9]}, 400, "1000000000"),
        ({"model": "tiny", "tokens": [1, 2], "ids": [[1]]}, 400, "ids has 1 rows for 2 tokens"),
        ({"model": "nope", "text": "a"}, 404, "nope"),
        ({"model": "tiny", "text": "a b " * 40_000}, 400, "context length"),
    ],
)
def test_what_cannot_be_judged_is_refused(fake: Daemon, body: dict[str, object], status: int, message: str) -> None:
    response = fake.http.post("/api/evaluate", json=body)
    assert response.status_code == status
    assert message in response.json()["error"]


def test_a_model_that_dies_ends_the_stream_with_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving.daemon(tmp_path_factory.mktemp("crash"), load=serving.load_crashing) as daemon:
        response = daemon.http.post("/api/evaluate", json={"model": "tiny", "text": TEXT * 60, "window": 16})
        assert "unexpectedly stopped" in response.text
