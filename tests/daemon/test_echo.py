"""Completions that repeat their prompt, as evaluation harnesses ask for them, and answers that must have a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import fakes
from tests.daemon import serving
from tests.daemon.serving import Daemon, saying


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving.daemon(tmp_path_factory.mktemp("echo"), fakes.load_fake) as running:
        yield running


@pytest.fixture(scope="module")
def v1(fake: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def test_echo_alone(v1: openai.OpenAI) -> None:
    answer = v1.completions.create(model="tiny", prompt="héllo", echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].logprobs, answer.choices[0].finish_reason) == ("héllo", None, "length")
    ids = v1.completions.create(model="tiny", prompt=[104, 105], echo=True, max_tokens=0)
    assert ids.choices[0].text == "hi"
    more = v1.completions.create(model="tiny", prompt="hi", echo=True, max_tokens=3, seed=1)
    plain = v1.completions.create(model="tiny", prompt="hi", max_tokens=3, seed=1)
    assert more.choices[0].text == "hi" + plain.choices[0].text


def test_echo_with_logprobs_is_what_the_model_says_when_it_goes_on(v1: openai.OpenAI) -> None:
    no_half_characters = {str(byte): -100 for byte in range(128, 256)}
    grown = v1.completions.create(
        model="tiny", prompt=[fakes.BOS, 104, 105], max_tokens=6, logprobs=3, seed=5, temperature=1.0, logit_bias=no_half_characters
    )
    logprobs = grown.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    vocabulary = fakes.FakeTokenizer()
    byte_of = {vocabulary.piece(i, special=True).decode("utf-8", "replace"): i for i in range(vocabulary.n_vocab - 1, -1, -1)}
    whole = [fakes.BOS, 104, 105, *(byte_of[token] for token in logprobs.tokens)]
    repeated = v1.completions.create(model="tiny", prompt=whole, echo=True, max_tokens=0, logprobs=3)
    echoed: Any = repeated.choices[0].logprobs
    assert echoed.tokens[3:] == logprobs.tokens and echoed.tokens[0] == "<s>"
    assert echoed.token_logprobs[0] is None and echoed.top_logprobs[0] is None
    assert echoed.token_logprobs[3:] == pytest.approx(logprobs.token_logprobs, abs=1e-4)
    assert [len(row) for row in echoed.top_logprobs[1:]] == [3] * (len(whole) - 1)
    assert echoed.text_offset[:4] == [0, 3, 4, 5]


def test_echo_of_several_prompts_with_an_answer_streams_the_same(v1: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["ab", "c"], "echo": True, "max_tokens": 2, "logprobs": 1, "n": 2, "seed": 3}
    whole = v1.completions.create(**asked)
    assert [choice.text[:1] for choice in whole.choices] == ["a", "a", "c", "c"]
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.tokens is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset or [])
        assert choice.logprobs.token_logprobs[0] is None and all(value is not None for value in choice.logprobs.token_logprobs[1:])
    texts = ["", "", "", ""]
    tokens: list[list[str]] = [[], [], [], []]
    for chunk in v1.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens or [] if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens if choice.logprobs else None for choice in whole.choices]


def test_echo_that_does_not_fit_or_is_none(v1: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        v1.completions.create(model="tiny", prompt=[97] * 5000, echo=True, max_tokens=0, logprobs=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no token"):
        v1.completions.create(model="tiny", prompt=[10**6], echo=True, max_tokens=0, logprobs=1)


# ---- form ---------------------------------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"],
          "additionalProperties": False}  # fmt: skip


def test_answers_have_the_form_that_is_asked_for(fake: Daemon, v1: openai.OpenAI) -> None:
    message: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "x"}]

    def check(text: str | None) -> None:
        value = json.loads(text or "")
        assert set(value) == {"n", "ok"} and isinstance(value["ok"], bool)

    options = {"num_predict": 400, "seed": 1}
    native = fake.http.post(
        "/api/chat", json={"model": "tiny", "messages": message, "format": SCHEMA, "stream": False, "options": options}
    ).json()
    check(native["message"]["content"])
    strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    answer = v1.chat.completions.create(model="tiny", messages=message, response_format=strict, max_tokens=400, seed=1)  # type: ignore[call-overload]
    check(answer.choices[0].message.content)
    made = v1.responses.create(
        model="tiny", input="x", max_output_tokens=400, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        extra_body={"seed": 1},
    )  # fmt: skip
    check(made.output_text)
    message_reply = fake.http.post(
        "/v1/messages",
        json={"model": "tiny", "max_tokens": 400, "messages": message, "seed": 1,
              "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ).json()  # fmt: skip
    check(message_reply["content"][0]["text"])
    dates = {"regex": "[0-9]{4}-[0-9]{2}", "max_tokens": 50}
    found = v1.chat.completions.create(model="tiny", messages=message, extra_body=dates).choices[0].message.content or ""
    assert len(found) == 7 and found[4] == "-"
    grammar = {"grammar": 'start: "yes" | "no"', "max_tokens": 50}
    assert v1.completions.create(model="tiny", prompt="x", extra_body=grammar).choices[0].text in ("yes", "no")


def test_forms_that_are_wrong_are_refused_before_anything_is_said(fake: Daemon, v1: openai.OpenAI) -> None:
    message: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as both:
        v1.chat.completions.create(model="tiny", messages=message, extra_body={"regex": "a", "grammar": 'start: "a"'})
    assert both.value.param == "regex"
    for wrong in ({"regex": "[a"}, {"grammar": "start: nothing"}):
        with pytest.raises(openai.BadRequestError, match="format"):
            v1.chat.completions.create(model="tiny", messages=message, extra_body=wrong)
    bad = {"model": "tiny", "messages": message, "format": {"type": "no such type"}}
    response = fake.http.post("/api/chat", json=bad)
    assert response.status_code == 400 and "format" in response.json()["error"]


def test_evaluate(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("x")) as running:
        lines = running.lines("/api/evaluate", {"model": "tiny", "text": "hello", "top": 1})
        assert lines[-1]["done"] is True
        assert running.http.post("/api/evaluate", json={"model": "tiny"}).status_code == 400
