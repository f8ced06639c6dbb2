"""Ollama's endpoints over real HTTP, with real runner processes and a scripted model."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import serving
from tests.daemon.serving import Daemon, saying

HI = [{"role": "user", "content": "hi"}]
NANOSECONDS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
DRAFTS = {"drafted_tokens", "accepted_tokens"}
"""Said where guesses at what follows paid, which is a matter of time."""
FINAL = {
    "model",
    "created_at",
    "done",
    "done_reason",
    "prompt_eval_count",
    "eval_count",
    "cached_prompt_eval_count",
    "seed",
    "queue_duration",
    "first_token_duration",
    *NANOSECONDS,
}


def check_times(final: dict[str, Any]) -> None:
    assert all(isinstance(final[name], int) and final[name] >= 0 for name in NANOSECONDS)
    assert final["total_duration"] >= final["load_duration"] + final["eval_duration"]
    assert datetime.fromisoformat(final["created_at"]).tzinfo is not None and final["created_at"].endswith("Z")


def test_root_and_version(daemon: Daemon) -> None:
    for method in ("GET", "HEAD"):
        response = daemon.http.request(method, "/")
        assert response.status_code == 200
        assert response.text == ("Ollama is running" if method == "GET" else "")
        assert response.headers["content-type"].startswith("text/plain")
    answer = daemon.http.get("/api/version").json()
    assert answer["server"] == "localrun"
    assert re.fullmatch(r"\d+\.\d+\.\d+", answer["version"])
    assert daemon.http.head("/api/version").status_code == daemon.http.head("/api/tags").status_code == 200


def test_chat_streams_lines_and_ends_with_done(daemon: Daemon) -> None:
    *pieces, final = daemon.lines("/api/chat", {"model": "tiny", "messages": HI})
    assert len(pieces) > 3
    assert all(set(piece) == {"model", "created_at", "message", "done"} for piece in pieces)
    assert all(piece["done"] is False and piece["message"]["role"] == "assistant" and piece["model"] == "tiny" for piece in pieces)
    assert "".join(piece["message"]["content"] for piece in pieces) == 'You said "hi".'
    assert set(final) - DRAFTS == FINAL | {"message"}
    assert (final["done"], final["done_reason"], final["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    check_times(final)


def test_chat_whole(daemon: Daemon) -> None:
    response = daemon.http.post("/api/chat", json={"model": "tiny", "messages": HI, "stream": False})
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    answer = response.json()
    assert answer["message"] == {"role": "assistant", "content": 'You said "hi".'}
    assert set(answer) == FINAL | {"message"}
    check_times(answer)


def test_generate_streams_and_carries_its_context(daemon: Daemon) -> None:
    *pieces, final = daemon.lines("/api/generate", {"model": "tiny", "prompt": "one"})
    assert "".join(piece["response"] for piece in pieces) == 'You said "one".'
    assert set(final) - DRAFTS == FINAL | {"response", "context"}
    assert final["prompt_eval_count"] + final["eval_count"] == len(final["context"])
    again = daemon.http.post("/api/generate", json={"model": "tiny", "prompt": "two", "context": final["context"], "stream": False}).json()
    assert again["response"] == 'You said "two".'
    assert again["context"][: len(final["context"])] == final["context"]
    # what the first request computed is found again
    assert again["cached_prompt_eval_count"] >= len(final["context"]) - 1


def test_raw_goes_to_the_model_as_it_is(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("abcdef")) as running:
        body = {"model": "tiny", "prompt": "abc", "raw": True, "stream": False}
        answer = running.http.post("/api/generate", json=body).json()
        # the scripted model goes on where the prompt's end agrees with the script: no template came in between
        assert answer["response"] == "def"
        assert "context" not in answer
        refused = running.http.post("/api/generate", json=body | {"system": "x"})
        assert (refused.status_code, refused.json()) == (400, {"error": "raw mode does not support template, system, or context"})


def test_empty_prompts_load_and_unload(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        assert running.loaded() == []
        for path, extra in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
            loaded = running.http.post(path, json={"model": "tiny", **extra}).json()
            assert (loaded["done"], loaded["done_reason"]) == (True, "load")
            assert [one["name"] for one in running.loaded()] == ["tiny:latest"]
            gone = running.http.post(path, json={"model": "tiny", "keep_alive": 0, **extra}).json()
            assert (gone["done"], gone["done_reason"]) == (True, "unload")
            assert running.loaded() == []
        assert running.http.post("/api/generate", json={"model": "tiny", "keep_alive": 0}).json()["done_reason"] == "unload"


def test_loading_can_be_watched(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        first, *_, final = running.lines("/api/chat", {"model": "tiny", "messages": HI, "load_progress": True})
        assert (first["status"], first["completed"], first["total"], first["done"]) == ("learning the script", 1, 1, False)
        assert final["done"] is True
        # loaded: nothing to tell
        assert "status" not in running.lines("/api/chat", {"model": "tiny", "messages": HI, "load_progress": True})[0]


@pytest.mark.parametrize(
    ("text", "body", "shown", "reason"),
    [
        ("one STOP two", {"options": {"stop": ["STOP"]}}, "one ", "stop"),
        ("one STOP two", {"options": {"stop": ["two", "OP t"]}}, "one ST", "stop"),
        ("abcdef", {"options": {"num_predict": 3}}, "abc", "length"),
        ("abcdef", {"options": {"num_predict": 0}}, "", "length"),
        ("abcdef", {"options": {"num_predict": -1}}, "abcdef", "stop"),
        ("abcdef", {"options": {"num_predict": -2}}, "abcdef", "stop"),
        ("é 한국어 🙂", {}, "é 한국어 🙂", "stop"),
    ],
)
def test_where_an_answer_ends(tmp_path: Path, text: str, body: dict[str, Any], shown: str, reason: str) -> None:
    with serving.daemon(tmp_path, saying(text)) as running:
        *pieces, final = running.lines("/api/chat", {"model": "tiny", "messages": HI, **body})
        assert "".join(piece["message"]["content"] for piece in pieces) == shown
        assert final["done_reason"] == reason


def test_stop_strings_of_the_model_and_the_request_add_up(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("one two three")) as running:
        running.add_model("stopping", params={"stop": ["three"]})
        body = {"model": "stopping", "messages": HI, "stream": False}
        assert running.http.post("/api/chat", json=body).json()["message"]["content"] == "one two "
        assert running.http.post("/api/chat", json=body | {"options": {"stop": [" two"]}}).json()["message"]["content"] == "one"
        assert running.http.post("/api/chat", json=body | {"options": {"stop": ["x"]}}).json()["message"]["content"] == "one two "


def test_seed_is_reported_and_repeats(tmp_path: Path) -> None:
    from tests import fakes

    with serving.daemon(tmp_path, fakes.load_fake) as running:

        def answer(**options: Any) -> tuple[str, int]:
            body = {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 30, "temperature": 1.5, **options}}
            got = running.http.post("/api/generate", json=body).json()
            return got["response"], got["seed"]

        drawn, seed = answer()
        assert answer(seed=seed) == (drawn, seed)
        assert answer(seed=seed + 1)[0] != drawn
        assert answer(seed=-1)[1] != seed


def test_precedence_request_model_settings(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, saying("abcdefghij")) as running:
        running.add_model("short", params={"num_predict": 2})
        ask = {"prompt": "x", "stream": False}
        post = running.http.post
        assert post("/api/generate", json={"model": "tiny", **ask}).json()["response"] == "abcdefghij"
        assert post("/api/generate", json={"model": "short", **ask}).json()["response"] == "ab"
        assert post("/api/generate", json={"model": "short", **ask, "options": {"num_predict": 4}}).json()["response"] == "abcd"


def test_system_and_messages_of_the_model(daemon: Daemon) -> None:
    daemon.add_model("primed", system="be brief", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])

    def rendered(path: str, **body: Any) -> str:
        answer = daemon.http.post(path, json={"model": "primed", "_debug_render_only": True, **body}).json()
        text: str = answer["_debug_info"]["rendered_template"]
        return text

    shots = "<|user|>a<|assistant|>b<|end|>"
    assert rendered("/api/chat", messages=HI) == f"<|system|>be brief{shots}<|user|>hi<|assistant|>"
    assert rendered("/api/generate", prompt="hi") == f"<|system|>be brief{shots}<|user|>hi<|assistant|>"
    assert rendered("/api/generate", prompt="hi", system="sing").startswith("<|system|>sing<|user|>a")
    own = [{"role": "system", "content": "sing"}, *HI]
    assert "be brief" in rendered("/api/chat", messages=own)  # the model's own messages come first, and they have no system message


def test_options_that_are_wrong(daemon: Daemon) -> None:
    for options, text in [
        ({"temperature": "warm"}, 'option "temperature" must be of type float32'),
        ({"num_ctx": "many"}, 'option "num_ctx" must be of type integer'),
        ({"num_predict": 1.5}, 'option "num_predict" must be of type integer'),
        ({"stop": "x"}, 'option "stop" must be of type array'),
        ({"use_mmap": 1}, 'option "use_mmap" must be of type boolean'),
        ({"top_p": 3}, 'option "top_p" must be from 0 to 1, got 3.0'),
        ({"tfs_z": 0.5}, 'option "tfs_z" is not supported'),
    ]:
        for path in ("/api/generate", "/api/chat"):
            response = daemon.http.post(
                path, json={"model": "tiny", "prompt" if "gen" in path else "messages": HI if "chat" in path else "x", "options": options}
            )
            assert (response.status_code, response.json()) == (400, {"error": text})
    unknown = daemon.http.post("/api/generate", json={"model": "tiny", "prompt": "x", "options": {"temprature": 1}})
    assert unknown.status_code == 400 and unknown.json()["error"].startswith('unknown option "temprature"')
    fine = {"mirostat": 0, "num_gpu": 99, "num_keep": 4, "use_mmap": True, "num_batch": 64, "top_k": 40.0, "seed": None}
    assert daemon.http.post("/api/generate", json={"model": "tiny", "prompt": "x", "options": fine}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/api/chat", b"", 400, "missing request body"),
        ("/api/chat", b'{"model": ', 400, "the request body is not valid JSON: EOF while parsing a value at line 1 column 10"),
        ("/api/chat", b"[]", 400, "the request body must be a JSON object"),
        ("/api/chat", b"{}", 400, "model is required"),
        ("/api/generate", b"{}", 404, "model '' not found"),
        ("/api/generate", b'{"model": "none"}', 404, "model 'none' not found"),
        ("/api/chat", b'{"model": "none:7b", "messages": []}', 404, "model 'none:7b' not found"),
        ("/api/generate", b'{"model": "../x"}', 400, "invalid model name"),
        ("/api/pull", b'{"model": "../x"}', 400, "invalid model name"),
        ("/api/generate", b'{"model": 1}', 400, "model: should be a valid string"),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "stream": 1}', 400, "stream: should be a valid boolean"),
        ("/api/generate", b'{"model": "tiny", "temperature": 1}', 400, 'unknown field "temperature"'),
        (
            "/api/chat",
            b'{"model": "tiny", "messages": [{"role": "user", "content": []}]}',
            400,
            "messages[0].content: should be a valid string",
        ),
        ("/api/chat", b'{"model": "tiny", "messages": [{"content": "x"}]}', 400, "messages[0].role is required"),
        ("/api/chat", b'{"model": "tiny", "messages": [{"role": "user", "images": ["aGk="]}]}', 400, '"tiny" does not support images'),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "format": "xml"}', 400, 'invalid format: "xml"'),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "think": "hard"}', 400, 'invalid think value: "hard"'),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "think": true}', 400, '"tiny" does not support thinking'),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "top_logprobs": 21}', 400, "top_logprobs must be between 0 and 20"),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "keep_alive": "soon"}', 400, "keep_alive: 'soon' is no duration"),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "keep_alive": true}', 400, "keep_alive: should be a valid integer"),
        (
            "/api/chat",
            b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
            400,
            "tiny does not support tools",
        ),
        ("/api/generate", b'{"model": "tiny", "prompt": "a", "suffix": "b"}', 400, "tiny does not support insert"),
        ("/api/generate", b'{"model": "tiny", "prompt": "x", "context": [99999]}', 400, "token 99999 is outside"),
    ],
)
def test_errors_come_before_any_chunk_with_their_status(daemon: Daemon, path: str, body: bytes, status: int, error: str) -> None:
    response = daemon.http.post(path, content=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert set(response.json()) == {"error"}
    assert response.json()["error"].startswith(error)


def test_the_content_type_of_a_request_does_not_count(daemon: Daemon) -> None:
    body = b'{"model": "tiny", "prompt": "x", "stream": false}'
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        response = daemon.http.post("/api/generate", content=body, headers={"content-type": kind})
        assert response.status_code == 200


def test_what_is_not_there_says_so(daemon: Daemon) -> None:
    assert daemon.http.post("/v1/audio/transcriptions", content=b"x").json()["error"]["code"] == "unsupported"
    assert daemon.http.get("/api/status").json() == {"cloud": {"disabled": True, "source": "none"}}
    assert daemon.http.post("/api/me").status_code == daemon.http.post("/api/signout").status_code == 401


def test_unknown_paths_and_methods(daemon: Daemon) -> None:
    for path in ("/nothing", "/api/nothing", "/api/chat/"):
        response = daemon.http.get(path)
        assert (response.status_code, response.text) == (404, "404 page not found")
    assert daemon.http.get("/api/show").status_code == 405
    assert daemon.http.get("/api/show").headers["allow"] == "POST"
    assert daemon.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"


def test_a_prompt_that_does_not_fit(daemon: Daemon) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": "word " * 20} for i in range(9)]
    body = {"model": "tiny", "messages": turns, "options": {"num_ctx": 400}, "stream": False}
    response = daemon.http.post("/api/chat", json=body)
    answer = response.json()
    assert response.status_code == 200
    assert answer["messages_dropped"] > 0 and answer["prompt_tokens_dropped"] > 0
    assert response.headers.get("x-localrun-messages-dropped") is None  # only where the body comes later
    streamed = daemon.http.post("/api/chat", json=body | {"stream": True})
    assert int(streamed.headers["x-localrun-messages-dropped"]) == answer["messages_dropped"]
    for strict in ({"truncate": False}, {"overflow": "error"}):
        refused = daemon.http.post("/api/chat", json=body | strict)
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("the prompt is longer than the context length currently available to the model")
        assert "400 fit" in refused.json()["error"] or "399 fit" in refused.json()["error"]


def test_logprobs(daemon: Daemon) -> None:
    body = {"model": "tiny", "messages": HI, "stream": False, "logprobs": True, "top_logprobs": 2}
    answer = daemon.http.post("/api/chat", json=body).json()
    items = answer["logprobs"]
    assert "".join(item["token"] for item in items) == answer["message"]["content"]
    for item in items:
        assert item["logprob"] <= 0 and bytes(item["bytes"]) == item["token"].encode()
        assert len(item["top_logprobs"]) == 2
        assert item["top_logprobs"][0]["logprob"] >= item["top_logprobs"][1]["logprob"]
    *pieces, _ = daemon.lines("/api/chat", body | {"stream": True})
    assert [item["token"] for piece in pieces for item in piece.get("logprobs", [])] == [item["token"] for item in items]
