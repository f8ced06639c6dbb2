"""Images end to end: a tiny random Gemma 3 with a tiny random projector, made by a Modelfile, asked in both dialects."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.daemon import serving
from tests.daemon.serving import Daemon
from tests.models import vision_numpy


def picture(seed: int) -> str:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 25, 3), np.uint8)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


ONE, TWO = picture(1), picture(2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("images")
    with serving.daemon(folder, "localrun.engine.parts:load_parts") as daemon:
        create(daemon, "blind", f"FROM {shared / 'arch' / 'gemma3' / 'f32.gguf'}\n", folder)
        (folder / "mmproj.gguf").write_bytes(vision_numpy.mmproj()[0])
        create(daemon, "seeing", "FROM blind\nFROM ./mmproj.gguf\n", folder)
        daemon.http.post("/api/generate", json={"model": "seeing"}, timeout=300)  # kernels may have to be compiled
        yield daemon


def create(daemon: Daemon, name: str, modelfile: str, folder: Path) -> None:
    lines = daemon.lines("/api/create", {"model": name, "modelfile": modelfile, "folder": str(folder)})
    assert lines[-1] == {"status": "success"}, lines


def chat(daemon: Daemon, images: list[str], model: str = "seeing", **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "what is it?", "images": images}], "stream": False, **fields}
    return daemon.http.post("/api/chat", json=body | {"options": {"temperature": 0, "num_predict": 8, "ignore_eos": True}})


def likely(reply: Any) -> list[float]:
    """How likely each token of an answer was: of a random model, that says more than the tokens."""
    assert reply.status_code == 200, reply.text
    return [one["logprob"] for one in reply.json()["logprobs"]]


def ask_openai(daemon: Daemon, parts: list[dict[str, Any]], model: str = "seeing") -> Any:
    return daemon.http.post(
        "/v1/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8, "logprobs": True},
    )


def url(image: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}


def test_answers_depend_on_the_image_and_both_dialects_agree(running: Daemon) -> None:
    asked: tuple[tuple[str, list[str]], ...] = (("one", [ONE]), ("two", [TWO]), ("none", []), ("again", [ONE]))
    replies = {name: chat(running, images, logprobs=True) for name, images in asked}
    said = {name: tuple(likely(reply)) for name, reply in replies.items()}
    assert said["one"] == said["again"] and len({said["one"], said["two"], said["none"]}) == 3
    counts = {name: reply.json()["prompt_eval_count"] for name, reply in replies.items()}
    assert counts["one"] - counts["none"] > 9
    same = ask_openai(running, [url(ONE), {"type": "text", "text": "what is it?"}])
    assert same.status_code == 200, same.text
    assert same.json()["usage"]["prompt_tokens"] == counts["one"]
    assert [one["logprob"] for one in same.json()["choices"][0]["logprobs"]["content"]][:1] == list(said["one"][:1])
    short = {"type": "image_url", "image_url": f"data:;base64,{TWO}"}
    behind = ask_openai(running, [{"type": "text", "text": "what is it?"}, url(ONE), short])
    assert behind.json()["usage"]["prompt_tokens"] > counts["one"] + 9


def test_generate_takes_images(running: Daemon) -> None:
    body = {"model": "seeing", "prompt": "it is", "stream": False, "logprobs": True, "options": {"temperature": 0, "num_predict": 4}}
    asked: list[dict[str, Any]] = [{"images": [ONE]}, {"images": [TWO]}, {"images": []}, {"images": [ONE], "prompt": ""}]
    seen = [tuple(likely(running.http.post("/api/generate", json=body | extra))) for extra in asked]
    assert len(set(seen)) == len(seen)
    raw = likely(running.http.post("/api/generate", json=body | {"images": [ONE], "raw": True}))
    assert tuple(raw) == seen[0], "without a template, raw is the same"


def test_show_and_tags_say_who_sees(running: Daemon) -> None:
    for name, sees in (("seeing", True), ("blind", False)):
        assert ("vision" in running.http.post("/api/show", json={"model": name}).json()["capabilities"]) == sees
    tags = {one["name"]: one["capabilities"] for one in running.http.get("/api/tags").json()["models"]}
    assert "vision" in tags["seeing:latest"] and "vision" not in tags["blind:latest"]
    modelfile = running.http.post("/api/show", json={"model": "seeing"}).json()["modelfile"]
    assert len([line for line in modelfile.splitlines() if line.startswith("FROM ")]) == 2


def test_show_modelfile_round_trips(running: Daemon, tmp_path: Path) -> None:
    shown = running.http.post("/api/show", json={"model": "seeing"}).json()["modelfile"]
    create(running, "again", shown, tmp_path)
    digests = {one["name"]: one["digest"] for one in running.http.get("/api/tags").json()["models"]}
    assert digests["again:latest"] == digests["seeing:latest"]


@pytest.mark.parametrize(
    ("images", "model", "word"),
    [
        ([ONE], "blind", "does not support images"),
        (["not base64!"], "seeing", "images[0]: this is not base64"),
        ([""], "seeing", "there is nothing in it"),
        ([base64.b64encode(b"hello").decode()], "seeing", "no image that can be read"),
    ],
)
def test_what_cannot_be_seen_is_answered_with_400(images: list[str], model: str, word: str, running: Daemon) -> None:
    reply = chat(running, images, model)
    assert reply.status_code == 400
    assert word in reply.json()["error"]


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
        ({"type": "image_url"}, "image_url is required"),
    ],
)
def test_urls_that_are_no_data_are_answered_with_400(part: dict[str, Any], word: str, running: Daemon) -> None:
    reply = ask_openai(running, [part])
    assert reply.status_code == 400
    assert word in reply.json()["error"]["message"]


def test_an_image_that_does_not_fit_the_context_is_reported(running: Daemon) -> None:
    reply = chat(running, [ONE] * 60, truncate=False)
    assert reply.status_code == 400
    assert "context" in reply.json()["error"]


def test_a_projector_of_another_kind_is_refused_when_it_is_created(running: Daemon, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(vision_numpy.mmproj(keys={"clip.projector_type": ("string", "ldp")})[0])
    body = {"model": "x", "modelfile": "FROM blind\nFROM ./other.gguf\n", "folder": str(tmp_path)}
    assert 'its type is \\"ldp\\"' in running.http.post("/api/create", json=body).text
    (tmp_path / "wide.gguf").write_bytes(vision_numpy.mmproj(n_embd=32)[0])
    create(running, "wide", "FROM blind\nFROM ./wide.gguf\n", tmp_path)
    reply = chat(running, [ONE], "wide")
    assert reply.status_code == 500 and "mm.input_projection.weight" in reply.json()["error"] and str(tmp_path) not in reply.text
