"""Derived models that differ in their adapters: one runner, one copy of the weights, answers of their own; through the HTTP API."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import serving
from tests.daemon.serving import Daemon
from tests.models.adapters import adapter_bytes

MATRICES = [f"blk.{i}.{name}.weight" for i in range(2) for name in ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")]
NAMES = ("base", "one", "two")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Daemon]:
    """A daemon with a tiny model and two that were derived from it by Modelfiles with ADAPTER."""
    folder = tmp_path_factory.mktemp("adapters")
    base = shared / "arch" / "llama" / "q8_0.gguf"
    with serving.daemon(folder, "localrun.engine.parts:load_parts") as daemon:
        daemon.add_model("base", base.read_bytes())
        for seed, name in enumerate(NAMES[1:]):
            (folder / f"{name}.gguf").write_bytes(adapter_bytes(base, MATRICES, seed=seed, size=1.0))
            create(daemon, name, f"FROM base\nADAPTER ./{name}.gguf\n", folder)
        yield daemon


def create(daemon: Daemon, name: str, modelfile: str, folder: Path) -> None:
    lines = daemon.lines("/api/create", {"model": name, "modelfile": modelfile, "folder": str(folder)})
    assert lines[-1] == {"status": "success"}, lines


def answer(daemon: Daemon, model: str, **options: Any) -> str:
    body = {"model": model, "prompt": "once upon a time", "raw": True, "stream": False}
    options = {"temperature": 0, "num_predict": 12, "ignore_eos": True} | options
    reply = daemon.http.post("/api/generate", json=body | {"options": options})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["response"]
    return text


def test_derived_models_share_a_runner_and_answer_differently(running: Daemon) -> None:
    alone = {name: answer(running, name) for name in NAMES}
    assert len(set(alone.values())) == 3
    loaded = running.loaded()
    assert sorted(one["name"] for one in loaded) == [f"{name}:latest" for name in NAMES]
    assert len({one["pid"] for one in loaded}) == 1
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda name: answer(running, name), NAMES * 2))
    assert together == [alone[name] for name in NAMES * 2]
    assert answer(running, "one", adapter_scale=0) == alone["base"]
    assert answer(running, "one", adapter_scale=2) != alone["one"]


def test_every_dialect_has_the_adapter_act(running: Daemon) -> None:
    """The log-probabilities of /v1/completions and /api/evaluate are the adapted model's."""
    whole = {"prompt": "once upon a time", "max_tokens": 0, "echo": True, "logprobs": 0}
    seen = []
    for name in NAMES:
        body = {"model": name, "prompt": "once upon a time", "temperature": 0, "max_tokens": 6}
        text = running.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        echoed = running.http.post("/v1/completions", json=whole | {"model": name}).json()["choices"][0]["logprobs"]["token_logprobs"][1:]
        lines = running.lines("/api/evaluate", {"model": name, "text": "once upon a time"})
        judged = [-nll for line in lines for nll in line.get("nll", [])]
        assert echoed == pytest.approx(judged[-len(echoed) :], abs=1e-5)
        seen.append((text, tuple(echoed)))
    assert len({text for text, _ in seen}) == len({row for _, row in seen}) == 3


def test_one_name_goes_and_the_others_stay(running: Daemon) -> None:
    for name in NAMES:
        answer(running, name)
    pid = running.loaded()[0]["pid"]
    running.http.post("/api/generate", json={"model": "one", "keep_alive": 0})
    assert sorted((one["name"], one["pid"]) for one in running.loaded()) == [("base:latest", pid), ("two:latest", pid)]
    for name in ("two", "base"):
        running.http.post("/api/generate", json={"model": name, "keep_alive": 0})
    assert not running.loaded()


def test_vectors_of_an_adapted_model_are_refused(running: Daemon) -> None:
    reply = running.http.post("/api/embed", json={"model": "one", "input": "x"})
    assert reply.status_code == 400
    assert "adapters" in reply.json()["error"]


def test_an_adapter_of_another_model_is_refused_when_it_is_created(running: Daemon, tmp_path: Path, shared: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(adapter_bytes(shared / "arch" / "gemma" / "f32.gguf", ["blk.0.attn_q.weight"]))
    body = {"model": "x", "modelfile": "FROM base\nADAPTER ./other.gguf\n", "folder": str(tmp_path)}
    text = running.http.post("/api/create", json=body).text
    assert "architecture gemma" in text
    assert running.http.post("/api/show", json={"model": "x"}).status_code == 404
