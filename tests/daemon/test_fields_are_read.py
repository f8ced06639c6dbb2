"""No field is accepted and forgotten: while requests of every kind are answered, each honoured field of each body is read somewhere."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.api.fields import Body, use_of
from localrun.api.reference import inner_bodies
from localrun.api.routes import ROUTES
from localrun.daemon.runners import Runner
from localrun.messages import Embed, Embedded, FromRunner, Rank, Ranked, ToRunner
from tests.daemon import serving
from tests.daemon.serving import Daemon

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# One request or more for each body. What they are answered does not count here; that they reach everything does.
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/api/show", {"name": "able"}),
    ("POST", "/api/generate", {"model": "able", "prompt": "x", "raw": True}),
    ("POST", "/api/generate", {"model": "able", "prompt": "x", "suffix": "y", "logprobs": True, "top_logprobs": 1, "stream": False}),
    (
        "POST",
        "/api/chat",
        {"model": "able", "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "logprobs": True, "tools": [TOOL]},
    ),
    ("POST", "/api/chat", {"model": "able", "messages": [USER], "truncate": True}),
    ("POST", "/api/pull", {"name": "nobody-has-this", "stream": False}),
    ("POST", "/api/push", {"name": "http://127.0.0.1:1/me/able"}),
    ("POST", "/api/plan", {"model": "able"}),
    ("POST", "/api/export", {"models": ["able"]}),
    ("POST", "/api/check", {}),
    ("DELETE", "/api/partials", {}),
    ("POST", "/api/create", {"name": "made", "from": "able", "messages": [USER]}),
    ("POST", "/api/create", {"model": "made", "modelfile": "FROM able", "folder": "/"}),
    ("POST", "/api/copy", {"source": "able", "destination": "copied"}),
    ("DELETE", "/api/delete", {"name": "copied"}),
    (
        "POST",
        "/v1/chat/completions",
        {
            "model": "able",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
                {"role": "assistant", "tool_calls": [CALL], "reasoning": "r"},
                {"role": "assistant", "refusal": "no", "reasoning_content": "r"},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [TOOL],
            "stream_options": {"include_usage": True},
            "reasoning": {"effort": "none"},
            "stream": True,
        },
    ),
    ("POST", "/v1/chat/completions", {"model": "able", "messages": [USER], "logprobs": True, "top_logprobs": 1}),
    (
        "POST",
        "/v1/chat/completions",
        {
            "model": "able",
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        },
    ),
    ("POST", "/v1/completions", {"model": "able", "prompt": ["x"], "stream_options": {}}),
    ("POST", "/api/embed", {"model": "able", "input": "x"}),
    ("POST", "/api/embeddings", {"model": "able", "prompt": "x"}),
    ("POST", "/v1/embeddings", {"model": "able", "input": "x"}),
    ("POST", "/v1/rerank", {"model": "ranker", "query": "x", "documents": [{"text": "x"}]}),
    ("POST", "/api/evaluate", {"model": "able", "text": "x", "window": 9, "stride": 3}),
    ("POST", "/api/tokenize", {"model": "able", "content": "x"}),
    ("POST", "/api/detokenize", {"model": "able", "tokens": [1]}),
    (
        "POST",
        "/v1/responses",
        {
            "model": "able",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", "name": "f"}],
            "reasoning": {"effort": "none"},
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        },
    ),
    ("POST", "/v1/responses", {"model": "able", "input": "x", "top_logprobs": 1}),
    ("POST", "/v1/responses", {"model": "able", "input": "x", "tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}),
    (
        "POST",
        "/v1/messages",
        {
            "model": "able",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}]},
            ],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            "stream": True,
        },
    ),
    (
        "POST",
        "/v1/messages",
        {
            "model": "able",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "output_config": {},
        },
    ),
    (
        "POST",
        "/v1/messages",
        {
            "model": "able",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "x"}],
            "output_format": {"type": "json_schema", "schema": {"type": "object"}},
        },
    ),
    (
        "POST",
        "/v1/chat/completions",
        {
            "model": "able",
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}],
        },
    ),
    (
        "POST",
        "/v1/messages/count_tokens",
        {
            "model": "able",
            "messages": [{"role": "user", "content": "x"}],
            "output_format": {"type": "json_schema", "schema": {"type": "object"}},
        },
    ),
]


def test_every_honoured_field_is_read(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[tuple[str, str]] = set()
    plain = Body.__getattribute__

    def watching(self: Body, name: str) -> Any:
        if not name.startswith("__"):
            read.add((type(self).__name__, name))
        return plain(self, name)

    daemon.add_model(
        "able",
        serving.tiny_gguf(
            serving.TOOL_TEMPLATE + "<think>", {f"tokenizer.ggml.fim_{part}_token_id": ("uint32", 1) for part in ("pre", "suf", "mid")}
        ),
    )
    daemon.add_model("ranker", serving.tiny_gguf(keys={"llama.pooling_type": ("uint32", 4)}))
    ask = Runner.ask

    async def asked(self: Runner, request_id: str, message: ToRunner) -> FromRunner:
        if isinstance(message, Embed):
            return Embedded(request_id=request_id, n=1, width=1, data=bytes(4), prompt_tokens=[1])
        if isinstance(message, Rank):
            return Ranked(request_id=request_id, scores=[0.0], prompt_tokens=[1])
        return await ask(self, request_id, message)

    monkeypatch.setattr(Runner, "ask", asked)
    monkeypatch.setattr(Body, "__getattribute__", watching)
    monkeypatch.setattr(type(daemon.store), "pull", lambda *anything, **more: None)
    for method, path, body in REQUESTS:
        response = daemon.http.request(method, path, json=body)
        assert "unknown field" not in response.text and "is required" not in response.text, response.text
    wanted = {
        (body.__name__, name)
        for route in ROUTES
        if route.body is not None
        for body in (route.body, *inner_bodies(route.body))
        for name, (_, use, _) in use_of(body).items()
        if use == "honoured"
    }
    assert not wanted - read, f"read nowhere: {sorted(wanted - read)}"
