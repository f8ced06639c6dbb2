"""Embeddings and ranking over every dialect, with a runner that has no process and answers from a script: what it is asked for is exact,
what it says reaches the client whole."""

from __future__ import annotations

import base64
import functools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import ollama
import openai
import pytest

from localrun.daemon import app
from localrun.daemon.loader import Loader
from localrun.daemon.runners import Runner
from localrun.errors import ContextOverflow, LocalrunError
from localrun.messages import Embed, Embedded, FromRunner, Inspect, Load, Loaded, Rank, Ranked, ToRunner
from tests.daemon import serving
from tests.daemon.serving import Daemon

WIDTH = 4
LONGEST = 10
"""Characters, or tokens, of the longest text."""


class ScriptedRunner(Runner):
    """A text's vector is (length, 1, 0, first character); a document's score is how many characters it shares with the query."""

    asked: ClassVar[list[ToRunner]] = []

    async def start(self, load: Load, on_progress: Any) -> Loaded:
        self._listens = True
        return Loaded(
            architecture="fake", n_ctx_train=LONGEST, n_vocab=256, kv_tokens=4096, weight_bytes=1, kv_bytes=1, packed=False, isa="none",
            num_thread=1, has_template=False, capabilities=["embedding"], load_s=0.0, n_embd=WIDTH,
        )  # fmt: skip

    async def ask(self, request_id: str, message: ToRunner) -> FromRunner:
        self.asked.append(message)
        if isinstance(message, Rank):
            return Ranked(
                request_id=request_id,
                scores=[float(len(set(message.query) & set(document))) for document in message.documents],
                prompt_tokens=[len(document) for document in message.documents],
                truncated=[i for i, document in enumerate(message.documents) if len(document) > LONGEST],
            )
        if isinstance(message, Inspect):
            raise LocalrunError("there is no engine")
        assert isinstance(message, Embed)
        items: list[Any] = message.texts if message.texts is not None else message.tokens or []
        longest = max(map(len, items))
        if longest > LONGEST and not message.truncate:
            raise ContextOverflow(longest, LONGEST)
        rows = [self._vector(item[:LONGEST], message) for item in items]
        return Embedded(
            request_id=request_id,
            n=len(rows),
            width=len(rows[0]),
            data=b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows),
            prompt_tokens=[min(len(item), LONGEST) for item in items],
            truncated=[i for i, item in enumerate(items) if len(item) > LONGEST],
        )

    @staticmethod
    def _vector(item: Any, message: Embed) -> list[float]:
        first = item[0] if item else 0
        row = [float(len(item)), 1.0, 0.0, float(ord(first) if isinstance(first, str) else first)]
        row = row[: message.dimensions or WIDTH]
        length = math.sqrt(sum(value * value for value in row)) if message.normalize else 1.0
        return [value / length for value in row]


def pooling(kind: int) -> bytes:
    return serving.tiny_gguf(keys={"llama.pooling_type": ("uint32", kind)})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "Loader", functools.partial(Loader, make_runner=ScriptedRunner))
        with serving.daemon(tmp_path_factory.mktemp("vectors")) as running:
            running.add_model("embedder", pooling(1))
            running.add_model("reranker", pooling(4))
            yield running


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    ScriptedRunner.asked.clear()


def last() -> Any:
    return ScriptedRunner.asked[-1]


def unit(*values: float) -> list[Any]:
    length = math.sqrt(sum(value * value for value in values))
    return [pytest.approx(value / length, rel=1e-6) for value in values]


# ---- Ollama -------------------------------------------------------------------------------------------------------------------


def test_embed(served: Daemon) -> None:
    reply = served.http.post("/api/embed", json={"model": "embedder", "input": ["ab", "abc"], "options": {"num_ctx": 9, "top_k": 3}}).json()
    assert reply["embeddings"] == [unit(2, 1, 0, 97), unit(3, 1, 0, 97)]
    assert (reply["model"], reply["prompt_eval_count"]) == ("embedder", 5) and "truncated" not in reply
    assert reply["total_duration"] >= reply["load_duration"] >= 0
    assert len(ScriptedRunner.asked) == 1, "all texts of a request go to the runner together"
    assert (last().texts, last().tokens, last().normalize, last().num_ctx, last().truncate) == (["ab", "abc"], None, True, 9, True)


def test_embed_one_text_and_none(served: Daemon) -> None:
    assert len(served.http.post("/api/embed", json={"model": "embedder", "input": "ab"}).json()["embeddings"]) == 1
    # an empty text in a list is a text; an empty input asks for nothing but the model
    assert len(served.http.post("/api/embed", json={"model": "embedder", "input": [""]}).json()["embeddings"]) == 1
    ScriptedRunner.asked.clear()
    nothing: dict[str, Any]
    for nothing in ({}, {"input": ""}, {"input": []}, {"input": None}):
        reply = served.http.post("/api/embed", json={"model": "embedder", **nothing})
        assert (reply.status_code, reply.json()["embeddings"], reply.json()["prompt_eval_count"]) == (200, [], 0)
    assert not ScriptedRunner.asked


def test_embed_dimensions(served: Daemon) -> None:
    reply = served.http.post("/api/embed", json={"model": "embedder", "input": "ab", "dimensions": 2})
    assert reply.json()["embeddings"] == [unit(2, 1)] and last().dimensions == 2
    refused = served.http.post("/api/embed", json={"model": "embedder", "input": "ab", "dimensions": WIDTH + 1})
    assert refused.status_code == 400 and refused.json()["error"].startswith(f"dimensions: the model's vectors have {WIDTH} values")


def test_embed_truncation_is_said(served: Daemon) -> None:
    body = {"model": "embedder", "input": ["ab", "x" * 30]}
    reply = served.http.post("/api/embed", json=body).json()
    assert (reply["truncated"], reply["prompt_eval_count"]) == ([1], 2 + LONGEST)
    refused = served.http.post("/api/embed", json={**body, "truncate": False})
    assert refused.status_code == 400 and refused.json()["error"].startswith("the input length exceeds the context length")
    assert "30 tokens" in refused.json()["error"]


def test_embeddings_older_form(served: Daemon) -> None:
    reply = served.http.post("/api/embeddings", json={"model": "embedder", "prompt": "ab"})
    assert reply.json() == {"embedding": [2.0, 1.0, 0.0, 97.0]}
    assert served.http.post("/api/embeddings", json={"model": "embedder"}).json() == {"embedding": []}


def test_any_model_that_completes_embeds_too(served: Daemon) -> None:
    assert served.http.post("/api/embed", json={"model": "tiny", "input": "ab"}).json()["embeddings"] == [unit(2, 1, 0, 97)]


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/api/embed", {"model": "none", "input": "x"}, 404, 'model "none" not found, try pulling it first'),
        ("/api/embeddings", {"model": "none", "prompt": "x"}, 404, 'model "none" not found, try pulling it first'),
        ("/api/embed", {"input": "x"}, 400, "model is required"),
        ("/api/embed", {"model": "embedder", "input": 3}, 400, "input: "),
        ("/api/embed", {"model": "embedder", "input": ["a", 3]}, 400, "input[1]: "),
        ("/api/embed", {"model": "embedder", "input": "x", "dimensions": -1}, 400, "dimensions: "),
        ("/api/embed", {"model": "embedder", "input": "x", "options": {"num_ctx": "9"}}, 400, 'option "num_ctx" must be of type integer'),
        ("/api/embed", {"model": "embedder", "input": ["x"] * 2049}, 400, "input: at most 2048 are taken at a time"),
        ("/api/embed", {"model": "reranker", "input": "x"}, 400, '"reranker" does not support embeddings'),
        ("/api/generate", {"model": "embedder", "prompt": "x"}, 400, '"embedder" does not support generate'),
        ("/api/chat", {"model": "embedder", "messages": [{"role": "user", "content": "x"}]}, 400, '"embedder" does not support chat'),
    ],
)
def test_native_errors(served: Daemon, path: str, body: dict[str, Any], status: int, error: str) -> None:
    reply = served.http.post(path, json=body)
    assert reply.status_code == status
    assert reply.json()["error"].startswith(error), reply.json()


def test_what_a_model_cannot_is_said_before_it_is_loaded(served: Daemon) -> None:
    served.add_model("other", serving.tiny_gguf(keys={"llama.pooling_type": ("uint32", 2), "general.name": ("string", "other")}))
    assert served.http.post("/api/generate", json={"model": "other", "prompt": "x"}).status_code == 400
    assert "other:latest" not in [one["name"] for one in served.loaded()]


# ---- OpenAI -------------------------------------------------------------------------------------------------------------------


def test_v1_floats(served: Daemon) -> None:
    reply = served.http.post("/v1/embeddings", json={"model": "embedder", "input": ["ab", "abc"], "user": "u"}).json()
    assert (reply["object"], reply["model"], reply["usage"]) == ("list", "embedder", {"prompt_tokens": 5, "total_tokens": 5})
    assert [(one["object"], one["index"]) for one in reply["data"]] == [("embedding", 0), ("embedding", 1)]
    assert [one["embedding"] for one in reply["data"]] == [unit(2, 1, 0, 97), unit(3, 1, 0, 97)]


def test_v1_base64_holds_the_same_values(served: Daemon) -> None:
    body = {"model": "embedder", "input": "abc", "dimensions": 3}
    plain = served.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    coded = served.http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(coded))) == plain


def test_v1_tokens(served: Daemon) -> None:
    one = served.http.post("/v1/embeddings", json={"model": "embedder", "input": [7, 8]}).json()
    assert (last().texts, last().tokens) == (None, [[7, 8]]) and one["data"][0]["embedding"] == unit(2, 1, 0, 7)
    several = served.http.post("/v1/embeddings", json={"model": "embedder", "input": [[7, 8], [9]]}).json()
    assert last().tokens == [[7, 8], [9]] and len(several["data"]) == 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "x" * 30}, "input"),
        ({"input": "a", "model": "reranker"}, "model"),
        ({"input": [1, "a"]}, "input"),
    ],
)
def test_v1_errors(served: Daemon, more: dict[str, Any], param: str) -> None:
    reply = served.http.post("/v1/embeddings", json={"model": "embedder", **more})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_v1_cuts_only_where_asked(served: Daemon) -> None:
    reply = served.http.post("/v1/embeddings", json={"model": "embedder", "input": "x" * 30, "truncate": True}).json()
    assert reply["truncated"] == [0] and reply["usage"]["prompt_tokens"] == LONGEST


def test_the_real_clients(served: Daemon) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        # this client asks for base64 and decodes it
        reply = client.embeddings.create(model="embedder", input=["ab", "abc"])
        assert [one.embedding for one in reply.data] == [unit(2, 1, 0, 97), unit(3, 1, 0, 97)] and reply.usage.prompt_tokens == 5
    native = ollama.Client(host=served.url)
    try:
        embedded = native.embed(model="embedder", input=["ab"], dimensions=2)
        assert list(embedded.embeddings[0]) == unit(2, 1) and embedded.prompt_eval_count == 2
        assert list(native.embeddings(model="embedder", prompt="ab").embedding) == [2.0, 1.0, 0.0, 97.0]
    finally:
        native._client.close()


# ---- ranking ------------------------------------------------------------------------------------------------------------------


def test_rerank(served: Daemon) -> None:
    body = {"model": "reranker", "query": "abc", "documents": ["xy", {"text": "ab"}, "abc", "xz"]}
    for path in ("/v1/rerank", "/rerank"):
        reply = served.http.post(path, json=body).json()
        assert [(one["index"], one["relevance_score"]) for one in reply["results"]] == [(2, 3.0), (1, 2.0), (0, 0.0), (3, 0.0)]
        assert (reply["model"], reply["object"], reply["usage"]) == ("reranker", "list", {"prompt_tokens": 9, "total_tokens": 9})
        assert all("document" not in one for one in reply["results"])
    assert len({served.http.post("/rerank", json=body).json()["id"] for _ in range(2)}) == 2
    best = served.http.post("/v1/rerank", json={**body, "top_n": 1, "return_documents": True, "num_ctx": 77}).json()["results"]
    assert best == [{"index": 2, "relevance_score": 3.0, "document": {"text": "abc"}}]
    assert (last().query, last().documents, last().num_ctx) == ("abc", ["xy", "ab", "abc", "xz"], 77)


def test_rerank_truncation_is_said(served: Daemon) -> None:
    reply = served.http.post("/rerank", json={"model": "reranker", "query": "a", "documents": ["a", "x" * 30]}).json()
    assert reply["truncated"] == [1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", {"body": "b"}]}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
        ({"model": "embedder"}, "model"),
        ({"model": "tiny"}, "model"),
    ],
)
def test_rerank_errors(served: Daemon, more: dict[str, Any], param: str) -> None:
    reply = served.http.post("/v1/rerank", json={"model": "reranker", "query": "a", "documents": ["a"], **more})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_capabilities_are_told(served: Daemon, tmp_path: Path) -> None:
    told = {one["name"]: one["capabilities"] for one in served.http.get("/api/tags").json()["models"]}
    assert told["embedder:latest"] == ["embedding"] and told["reranker:latest"] == ["rerank"]
