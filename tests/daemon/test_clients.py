"""The real clients, `ollama` and `openai`, against a running daemon: what they send is taken, what comes back they can read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from localrun.errors import DownloadFailed
from localrun.store import PullProgress, Store
from localrun.store.progress import Cancelled, Progress
from tests.daemon import serving
from tests.daemon.serving import Daemon, saying

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def native(daemon: Daemon) -> Iterator[ollama.Client]:
    client = ollama.Client(host=daemon.url)
    yield client
    client._client.close()


@pytest.fixture(scope="module")
def v1(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- ollama -------------------------------------------------------------------------------------------------------------------


def test_ollama_chat(native: ollama.Client) -> None:
    answer = native.chat(model="tiny", messages=HI, options={"temperature": 0, "seed": 1, "num_ctx": 512})
    assert answer.message.content == 'You said "hi".'
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count and answer.prompt_eval_count and answer.total_duration


def test_ollama_chat_stream(native: ollama.Client) -> None:
    *pieces, final = native.chat(model="tiny", messages=HI, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == 'You said "hi".'
    assert final.done and not any(piece.done for piece in pieces)


def test_ollama_generate(native: ollama.Client) -> None:
    answer = native.generate(model="tiny", prompt="one", keep_alive=60, options=ollama.Options(num_predict=3))
    assert (answer.response, answer.done_reason) == ("You", "length")
    assert answer.context
    assert "".join(piece.response or "" for piece in native.generate(model="tiny", prompt="two", stream=True)) == 'You said "two".'


def test_ollama_async(daemon: Daemon) -> None:
    async def ask(i: int) -> str:
        client = ollama.AsyncClient(host=daemon.url)
        pieces = [
            piece.message.content or "" async for piece in await client.chat("tiny", [{"role": "user", "content": str(i)}], stream=True)
        ]
        await client._client.aclose()
        return "".join(pieces)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(ask(i) for i in range(8)))

    assert asyncio.run(all_of_them()) == [f'You said "{i}".' for i in range(8)]


def test_ollama_errors(native: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'none' not found") as caught:
        native.chat(model="none", messages=HI)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match='option "top_k" must be of type integer') as caught:
        native.generate(model="tiny", prompt="x", options={"top_k": "all"})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        native.chat(model="tiny", messages=HI, think=True)
    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        native.chat(model="tiny", messages=HI, tools=[lambda a: a])


def test_ollama_models(native: ollama.Client, daemon: Daemon) -> None:
    assert "tiny:latest" in [model.model for model in native.list().models]
    shown = native.show("tiny")
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] == 4096
    assert shown.capabilities == ["completion"] and shown.details is not None and shown.details.family == "llama"
    native.chat(model="tiny", messages=HI)
    (running,) = native.ps().models
    assert running.name == "tiny:latest" and running.size and running.expires_at and running.context_length == 4096
    native.copy("tiny", "again")
    assert "again:latest" in [model.model for model in native.list().models]
    assert native.delete("again").status == "success"
    with pytest.raises(ollama.ResponseError, match="model 'again' not found"):
        native.delete("again")
    with pytest.raises(ollama.ResponseError, match='model "again" not found'):
        native.copy("again", "other")
    with pytest.raises(ollama.ResponseError, match="model 'again:latest' not found"):
        native.show("again")


def test_ollama_create_from_a_model(native: ollama.Client) -> None:
    steps = list(
        native.create("pirate", from_="tiny", system="talk like one", parameters={"temperature": 0.1, "stop": ["arr"]}, stream=True)
    )
    assert steps[-1].status == "success"
    shown = native.show("pirate")
    assert shown.parameters is not None and "temperature                    0.1" in shown.parameters and '"arr"' in shown.parameters
    assert shown.modelfile is not None and "talk like one" in shown.modelfile
    with pytest.raises(ollama.ResponseError, match="neither 'from' or 'files' was specified"):
        native.create("nothing")


def test_ollama_create_from_a_file(native: ollama.Client, tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(serving.tiny_gguf(keys={"general.note": ("string", "from a file")}))
    digest = native.create_blob(path)
    assert digest == serving.sha256(path.read_bytes())
    assert native.create_blob(path) == digest  # there already
    assert native.create("filed", files={"file.gguf": digest}).status == "success"
    assert native.generate(model="filed", prompt="x").response == 'You said "x".'


def test_ollama_pull_of_what_nobody_has(native: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(store: Store, name: str, progress: Progress, cancelled: Cancelled, **options: Any) -> None:
        progress(PullProgress("pulling manifest"))
        raise DownloadFailed("pull model manifest: file does not exist")

    monkeypatch.setattr(Store, "pull", pull)
    with pytest.raises(ollama.ResponseError, match="pull model manifest: file does not exist"):
        native.pull("no-such-model-anywhere")
    steps = native.pull("no-such-model-anywhere", stream=True)
    assert next(steps).status == "pulling manifest"
    with pytest.raises(ollama.ResponseError, match="file does not exist"):
        next(steps)


def test_ollama_load_and_unload(native: ollama.Client) -> None:
    assert native.generate(model="tiny").done_reason == "load"
    assert native.generate(model="tiny", keep_alive=0).done_reason == "unload"
    assert "tiny:latest" not in [model.name for model in native.ps().models]


# ---- openai -------------------------------------------------------------------------------------------------------------------


def test_openai_chat(v1: openai.OpenAI) -> None:
    answer = v1.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        temperature=0.5,
        max_completion_tokens=100,
        seed=3,
        user="me",
        metadata={"a": "b"},
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.message.role) == ('You said "hi".', "stop", "assistant")
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = v1.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert again.id != answer.id


def test_openai_chat_stream(v1: openai.OpenAI) -> None:
    chunks = list(
        v1.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    *body, usage = chunks
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens > 0
    assert body[0].choices[0].delta.role == "assistant" and all(chunk.choices[0].delta.role is None for chunk in body[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == 'You said "hi".'
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["stop"]


def test_openai_several_answers(tmp_path: Path) -> None:
    from tests import fakes

    with serving.daemon(tmp_path, fakes.load_fake) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:

        def texts(seed: int, n: int) -> list[str | None]:
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], n=n, seed=seed, max_tokens=20, temperature=1.5
            )
            assert [choice.index for choice in answer.choices] == list(range(n))
            return [choice.message.content for choice in answer.choices]

        three = texts(7, 3)
        assert len(set(three)) == 3
        assert three == [texts(7, 1)[0], texts(8, 1)[0], texts(9, 1)[0]]


def test_openai_stops_and_lengths(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("one two three")) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:

        def ask(**more: object) -> tuple[str | None, str]:
            choice = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], **more).choices[0]  # type: ignore[call-overload]
            return choice.message.content, choice.finish_reason

        assert ask(stop="two") == ("one ", "stop")
        assert ask(stop=["nine", "three"]) == ("one two ", "stop")
        assert ask(max_tokens=3) == ("one", "length")
        assert ask(max_completion_tokens=3, max_tokens=5) == ("one", "length")
        # every token of the script is made impossible but for the one that ends the turn
        assert ask(logit_bias={str(byte): -100 for byte in b"one two three"} | {"263": -100}, max_tokens=4)[0] != "one "


def test_openai_completions(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("abcdef")) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
        answer = client.completions.create(model="tiny", prompt="abc", logprobs=2)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason, answer.object) == ("def", "stop", "text_completion")
        assert choice.logprobs is not None and choice.logprobs.tokens == ["d", "e", "f"] and choice.logprobs.text_offset == [0, 1, 2]
        several = client.completions.create(model="tiny", prompt=["ab", "abcd"])
        assert [choice.text for choice in several.choices] == ["cdef", "ef"]
        assert [choice.text for choice in client.completions.create(model="tiny", prompt=[97, 98]).choices] == ["cdef"]
        pieces = list(client.completions.create(model="tiny", prompt="abcd", stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == "ef"
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_openai_logprobs(v1: openai.OpenAI) -> None:
    answer = v1.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert "".join(item.token for item in found.content) == 'You said "hi".'
    assert all(len(item.top_logprobs) == 3 for item in found.content)


def test_openai_errors(v1: openai.OpenAI) -> None:
    message: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        v1.chat.completions.create(model="none", messages=message)
    assert missing.value.body == {
        "message": "model 'none' not found",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
    with pytest.raises(openai.BadRequestError) as unknown:
        v1.chat.completions.create(model="tiny", messages=message, extra_body={"tempo": 1})
    assert unknown.value.param == "tempo" and 'unknown field "tempo"' in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as refused:
        v1.chat.completions.create(model="tiny", messages=message, store=True)
    assert refused.value.param == "store" and refused.value.code == "unsupported"
    with pytest.raises(openai.BadRequestError) as long:
        v1.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 500}], extra_body={"num_ctx": 100})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match='"tiny" does not support images'):
        v1.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}],
        )


def test_openai_extras(v1: openai.OpenAI) -> None:
    extras = {
        "top_k": 5,
        "min_p": 0.1,
        "typical_p": 1,
        "repeat_penalty": 1.1,
        "repeat_last_n": 10,
        "num_ctx": 2000,
        "keep_alive": "1m",
        "priority": 1,
    }
    answer = v1.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body=extras)
    assert answer.choices[0].message.content == 'You said "hi".'
    cut = v1.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "hi"}],
        extra_body={"num_ctx": 200, "overflow": "truncate_oldest"},
    )
    assert cut.usage is not None and cut.usage.model_extra is not None and cut.usage.model_extra["messages_dropped"] >= 1


def test_openai_cached_tokens(v1: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "a rather long question, asked twice"}]
    v1.chat.completions.create(model="tiny", messages=messages)
    usage = v1.chat.completions.create(model="tiny", messages=messages).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None and usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 1


def test_openai_models(v1: openai.OpenAI) -> None:
    assert "tiny:latest" in [model.id for model in v1.models.list()]
    assert v1.models.retrieve("tiny").owned_by == "library"
    with pytest.raises(openai.NotFoundError):
        v1.models.retrieve("none")


def test_openai_broken_stream_raises(tmp_path: Path) -> None:

    with (
        serving.daemon(tmp_path, serving.load_crashing) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
        with pytest.raises(openai.APIError, match="unexpectedly stopped"):
            list(stream)
