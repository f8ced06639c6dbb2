"""Models told of and changed over HTTP: what the real clients do not send or do not show."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localrun.api.schema import CreateBody
from localrun.daemon.management import create_spec
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.store import PullProgress
from tests.daemon import serving
from tests.daemon.serving import Daemon
from tests.daemon.test_lifetimes import wait_until


def test_show_hides_long_arrays_unless_verbose(daemon: Daemon) -> None:
    daemon.add_model("shown", params={"stop": ["a", "b"], "temperature": 0.5}, system="be brief", license="MIT")
    brief = daemon.http.post("/api/show", json={"model": "shown"}).json()
    full = daemon.http.post("/api/show", json={"name": "shown", "verbose": True}).json()
    assert brief["model_info"]["tokenizer.ggml.tokens"] == []
    assert full["model_info"]["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(40)]
    assert "tokenizer.chat_template" not in brief["model_info"] and brief["template"] == serving.CHATML
    assert brief["parameters"].splitlines() == [
        'stop                           "a"',
        'stop                           "b"',
        "temperature                    0.5",
    ]
    assert (brief["system"], brief["license"]) == ("be brief", "MIT")
    other = daemon.http.post("/api/show", json={"model": "shown", "system": "sing", "template": "{{ x }}"}).json()
    assert (other["system"], other["template"]) == ("sing", "{{ x }}") and "sing" in other["modelfile"]


def test_capabilities_come_from_the_template(daemon: Daemon) -> None:
    daemon.add_model("tooled", serving.tiny_gguf(serving.TOOL_TEMPLATE))
    daemon.add_model("thinker", serving.tiny_gguf(serving.THINK_TEMPLATE))
    daemon.add_model("embedder", serving.tiny_gguf(keys={"bert.pooling_type": ("uint32", 1)}))
    daemon.add_model("changed", serving.tiny_gguf(serving.TOOL_TEMPLATE), template=serving.CHATML)
    tags = {one["name"]: one["capabilities"] for one in daemon.http.get("/api/tags").json()["models"]}
    assert tags["tiny:latest"] == ["completion"]
    assert tags["tooled:latest"] == ["completion", "tools"]
    assert tags["thinker:latest"] == ["completion", "thinking"]
    assert tags["embedder:latest"] == ["embedding"]
    assert tags["changed:latest"] == ["completion"]
    hi = [{"role": "user", "content": "x"}]
    refused = daemon.http.post("/api/chat", json={"model": "embedder", "messages": hi})
    assert (refused.status_code, refused.json()["error"]) == (400, '"embedder" does not support chat')
    refused = daemon.http.post("/api/generate", json={"model": "embedder", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]) == (400, '"embedder" does not support generate')


def test_tags_of_an_empty_store(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        assert running.http.request("DELETE", "/api/delete", json={"model": "tiny"}).content == b""
        assert running.http.get("/api/tags").json() == {"models": []}
        assert running.http.get("/v1/models").json() == {"object": "list", "data": []}
        assert running.http.get("/api/ps").json() == {"models": []}


def test_delete_unloads(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        running.http.post("/api/copy", json={"source": "tiny", "destination": "twin"})
        running.http.post("/api/generate", json={"model": "tiny"})
        assert running.http.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 200
        assert len(running.http.get("/api/tags").json()["models"]) == 1
        assert running.http.post("/api/generate", json={"model": "twin", "prompt": "x", "stream": False}).status_code == 200
        assert running.http.request("DELETE", "/api/delete", json={"name": "twin"}).status_code == 200
        wait_until(lambda: running.loaded() == [])


# ---- blobs --------------------------------------------------------------------------------------------------------------------


def test_blobs(daemon: Daemon) -> None:
    data = b"some bytes" * 1000
    path = f"/api/blobs/{serving.sha256(data)}"
    assert daemon.http.head(path).status_code == 404
    assert daemon.http.post(path, content=data).status_code == 201
    assert daemon.http.head(path).status_code == 200
    assert daemon.http.post(path, content=data).status_code == 200
    other = f"/api/blobs/{serving.sha256(b'other')}"
    wrong = daemon.http.post(other, content=data)
    assert wrong.status_code == 400
    assert wrong.json()["error"] == f'digest mismatch, expected "{serving.sha256(b"other")}", got "{serving.sha256(data)}"'
    assert daemon.http.head(other).status_code == 404
    assert daemon.http.post(other, content=b"other").status_code == 201
    for bad in ("sha256:abc", "md5:" + "0" * 64, "sha256:" + "g" * 64, "..%2f..%2fetc%2fpasswd"):
        assert daemon.http.head(f"/api/blobs/{bad}").status_code in (400, 404)
        assert daemon.http.post(f"/api/blobs/{bad}", content=b"x").status_code in (400, 404)


def test_an_upload_that_breaks_off_leaves_nothing_and_blocks_nobody(daemon: Daemon) -> None:
    data = b"x" * 200_000
    digest = serving.sha256(data)
    head = f"POST /api/blobs/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(daemon.url.rpartition(":")[2]))) as client:
        client.sendall(head + data[:100_000])
        wait_until(lambda: daemon.store.blobs.partial(digest).exists())
    wait_until(lambda: not daemon.store.blobs.partial(digest).exists())
    assert daemon.http.post(f"/api/blobs/{digest}", content=data).status_code == 201


def test_an_upload_larger_than_what_may_wait(daemon: Daemon) -> None:
    data = bytes(range(256)) * 80_000
    assert daemon.http.post(f"/api/blobs/{serving.sha256(data)}", content=data).status_code == 201


# ---- pull ---------------------------------------------------------------------------------------------------------------------


def test_pull_reports_and_stops_with_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = threading.Event()

    def pull(self: Any, name: str, progress: Callable[[PullProgress], None], cancelled: Callable[[], bool], **options: Any) -> None:
        progress(PullProgress("pulling manifest"))
        done = 0
        while not cancelled():
            done += 1
            progress(PullProgress("pulling abc", "sha256:abc", 10**9, done))
            time.sleep(0.001)
        stopped.set()
        raise LocalrunError("cancelled")

    with serving.daemon(tmp_path) as running:
        monkeypatch.setattr(type(running.store), "pull", pull)
        with running.http.stream("POST", "/api/pull", json={"model": "x"}) as response:
            lines = response.iter_lines()
            assert next(lines) == '{"status":"pulling manifest"}'
            first = next(lines)
            assert first.startswith('{"status":"pulling abc","digest":"sha256:abc","total":1000000000,"completed":')
        assert stopped.wait(120), "the pull went on without its client"
    gc.collect()
    # what a pull ends with that nobody waits for is nobody's mistake
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


def test_pull_without_stream_answers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(self: Any, name: str, progress: Callable[[PullProgress], None], cancelled: Callable[[], bool], **options: Any) -> None:
        for status in ("pulling manifest", "verifying sha256 digest", "writing manifest", "success"):
            progress(PullProgress(status))

    with serving.daemon(tmp_path) as running:
        monkeypatch.setattr(type(running.store), "pull", pull)
        assert running.http.post("/api/pull", json={"model": "x", "stream": False}).json() == {"status": "success"}
        assert [line["status"] for line in running.lines("/api/pull", {"name": "x"})][-1] == "success"
        assert running.http.post("/api/pull", json={}).json() == {"error": "model is required"}


# ---- create -------------------------------------------------------------------------------------------------------------------


def test_create_from_a_path_and_from_a_modelfile(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(serving.tiny_gguf(keys={"general.note": ("string", "path")}))
    made = daemon.lines("/api/create", {"model": "pathed", "from": str(path)})
    assert made[-1] == {"status": "success"}
    text = 'FROM ./weights.gguf\nPARAMETER temperature 0.25\nSYSTEM """be\nbrief"""\nMESSAGE user a\n'
    made = daemon.lines("/api/create", {"model": "filed", "modelfile": text, "folder": str(tmp_path)})
    assert made[-1] == {"status": "success"}
    shown = daemon.http.post("/api/show", json={"model": "filed"}).json()
    assert shown["system"] == "be\nbrief" and "0.25" in shown["parameters"] and shown["messages"] == [{"role": "user", "content": "a"}]
    again = daemon.lines("/api/create", {"model": "third", "modelfile": shown["modelfile"], "folder": str(tmp_path)})
    assert again[-1] == {"status": "success"}
    digests = {one["name"]: one["digest"] for one in daemon.http.get("/api/tags").json()["models"]}
    assert digests["third:latest"] == digests["filed:latest"]
    wrong = daemon.http.post("/api/create", json={"model": "x", "modelfile": "FROM a\nPARAMETER heat 1", "folder": str(tmp_path)})
    assert wrong.status_code == 400 and wrong.json()["error"].startswith("line 2, column")


def test_create_refuses_what_it_cannot_do() -> None:
    def spec(*, local: bool = True, **body: Any) -> Any:
        sent = {"model": "x", **{name.rstrip("_"): value for name, value in body.items()}}
        return create_spec(CreateBody.model_validate(sent), local=local)

    assert spec(from_="base").from_name == "base"
    assert spec(files={"a.gguf": "sha256:1"}).files == {"a.gguf": "sha256:1"}
    assert spec(from_="base", license="MIT").license == ["MIT"]
    assert spec(from_="base", adapters={"a.gguf": "sha256:1", "b.gguf": "sha256:2"}).adapters == ["sha256:1", "sha256:2"]
    with pytest.raises(BadRequest, match="clients on this machine only"):
        spec(local=False, from_=str(Path("x.gguf").absolute()))
    with pytest.raises(BadRequest, match="no absolute path"):
        spec(from_="x.gguf")
    with pytest.raises(BadRequest, match="folder"):
        spec(modelfile="FROM ./x.gguf")
    with pytest.raises(BadRequest, match="clients on this machine only"):
        spec(local=False, modelfile=f"FROM {Path('x.gguf').absolute()}")
    with pytest.raises(BadRequest, match="clients on this machine only"):
        spec(local=False, modelfile="FROM ./x.gguf", folder=str(Path.cwd()))
    assert spec(local=False, modelfile="FROM base").from_name == "base"
    field: str
    for field in ("renderer", "parser", "remote_host", "info", "draft_files"):
        with pytest.raises(Unsupported, match=f'"{field}" is not supported'):
            spec(from_="base", local=True, **{field: {"a": "b"} if field in ("info", "draft_files") else "q4_0"})


def test_a_go_template_is_a_template(daemon: Daemon) -> None:
    template = "{{ if .Suffix }}<P>{{ .Prompt }}<S>{{ .Suffix }}<M>{{ else }}{{ .Prompt }}{{ end }}{{ .Response }}"
    daemon.add_model("theirs", template=template)
    assert daemon.http.post("/api/show", json={"model": "theirs"}).json()["capabilities"] == ["completion", "insert"]
    body = {"model": "theirs", "prompt": "a", "suffix": "b", "_debug_render_only": True}
    assert daemon.http.post("/api/generate", json=body).json()["_debug_info"]["rendered_template"] == "<P>a<S>b<M>"


def test_filling_in_the_middle(daemon: Daemon) -> None:
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    daemon.add_model("coder", serving.tiny_gguf(keys={"tokenizer.ggml.tokens": ("array[string]", [*"abc", *marks])}))
    assert "insert" in daemon.http.post("/api/show", json={"model": "coder"}).json()["capabilities"]
    body = {"model": "coder", "prompt": "def f():", "suffix": "return 1", "_debug_render_only": True}
    rendered = daemon.http.post("/api/generate", json=body).json()["_debug_info"]["rendered_template"]
    assert rendered == "<|fim_prefix|>def f():<|fim_suffix|>return 1<|fim_middle|>"
    completion = {"model": "coder", "prompt": "def f():", "suffix": "return 1", "max_tokens": 1}
    assert daemon.http.post("/v1/completions", json=completion).status_code == 200
    tokens = daemon.http.post("/v1/completions", json=completion | {"prompt": [1, 2]})
    assert tokens.status_code == 400 and tokens.json()["error"]["param"] == "suffix"
