"""localrun's own endpoints about models on disk, over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.kernels_cpu.formats import FORMATS
from localrun.models.gguf import open_gguf
from localrun.store.hub import Web
from tests.daemon import serving
from tests.daemon.serving import Daemon
from tests.models.build import Builder, Tensor
from tests.store.conftest import tiny_gguf
from tests.store.web import Hub


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Daemon]:
    """With a store that no other test has seen."""
    with serving.daemon(tmp_path) as running:
        yield running


def test_plan_of_a_stored_model(daemon: Daemon) -> None:
    answer = daemon.http.post("/api/plan", json={"model": "tiny", "num_ctx": 100, "users": 3}).json()
    assert (answer["source"], answer["download"], answer["architecture"]) == ("store", 0, "llama")
    assert (answer["num_ctx"], answer["users"], answer["kv_cache_type"]) == (100, 3, "f16")
    memory = answer["memory"]
    assert memory["total"] == sum(size for part, size in memory.items() if part not in ("total", "available"))
    assert answer["fits"] is (memory["total"] <= memory["available"])
    assert answer["threads"] >= 1 and answer["bandwidth"] > 1e8


def test_plan_of_a_file_of_the_catalogue_and_of_nothing(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny_gguf())
    assert daemon.http.post("/api/plan", json={"model": str(path)}).json()["source"] == str(path)
    known = daemon.http.post("/api/plan", json={"model": "smollm2"}).json()
    assert (known["source"], known["parameters"], known["quantization"]["name"]) == ("catalogue", 134_515_008, "Q4_1")
    assert known["quantization"]["words"] == "4 bits, blocks of 32 with a scale and a minimum"
    assert 80e6 < known["download"] < known["size"]
    missing = daemon.http.post("/api/plan", json={"model": "nobody-has-this"})
    assert (missing.status_code, missing.json()["error"]) == (404, "model 'nobody-has-this' not found")
    wrong = daemon.http.post("/api/plan", json={"model": "tiny", "kv_cache_type": "f8"})
    assert wrong.status_code == 400 and "f8" in wrong.json()["error"]


def test_plan_of_a_repository_names_what_fits(tmp_path: Path) -> None:
    with Hub() as hub, serving.daemon(tmp_path) as running:
        hub.files = {"t-Q4_K_M.gguf": tiny_gguf(), "t-Q8_0.gguf": tiny_gguf(padding=50_000)}
        running.store.web = Web(hub.url)
        answer = running.http.post("/api/plan", json={"model": "hf.co/org/tiny-GGUF"}).json()
        assert [(one["quantization"], one["fits"]) for one in answer["choices"]] == [("Q4_K_M", True), ("Q8_0", True)]
        assert answer["largest_that_fits"] == "Q8_0" and answer["source"] == "hf.co/org/tiny-GGUF"


def test_export_goes_on_at_an_offset_and_import_takes_it_in(daemon: Daemon, tmp_path: Path) -> None:
    daemon.add_model("big", tiny_gguf("big", padding=3_000_000), system="be brief")
    whole = daemon.http.post("/api/export", json={"models": ["big", "tiny"]})
    assert whole.status_code == 200 and whole.headers["x-localrun-bundle-size"] == str(len(whole.content))
    rest = daemon.http.post("/api/export", json={"models": ["big", "tiny"], "offset": 1_500_000})
    assert rest.content == whole.content[1_500_000:]
    with serving.daemon(tmp_path / "other") as other:
        other.http.request("DELETE", "/api/delete", json={"model": "tiny"})
        answer = other.http.post("/api/import", content=whole.content)
        assert answer.json() == {"status": "success", "models": ["big:latest", "tiny:latest"]}
        assert other.store.get("big").digest == daemon.store.get("big").digest


def test_exports_and_imports_that_cannot_be(daemon: Daemon) -> None:
    assert daemon.http.post("/api/export", json={"models": ["nobody"]}).status_code == 404
    assert daemon.http.post("/api/export", json={"models": []}).status_code == 400
    assert daemon.http.post("/api/export", json={"models": ["tiny"], "offset": 10**9}).status_code == 400
    bad = daemon.http.post("/api/import", content=b"x" * 5_000_000)
    assert bad.status_code == 400 and "no bundle" in bad.json()["error"]
    whole = daemon.http.post("/api/export", json={"models": ["tiny"]}).content
    cut = daemon.http.post("/api/import", content=whole[:-3000])
    assert cut.status_code == 400


def test_check_tells_and_repairs(own: Daemon) -> None:
    sound = own.http.post("/api/check", json={"stream": False}).json()
    assert (sound["sound"], sound["problems"], sound["models"]) == (True, [], 1)
    path = own.store.get("tiny").model_path
    path.write_bytes(bytes(reversed(path.read_bytes())))
    lines = own.lines("/api/check", {"repair": True})
    assert lines[-1]["status"] == "success" and [one["kind"] for one in lines[-1]["problems"]] == ["damaged", "missing"]
    assert lines[-1]["problems"][0]["repaired"] and not path.exists()
    assert any(line["status"].startswith("verifying ") for line in lines[:-1])


def test_partial_downloads_are_listed_and_removed(own: Daemon) -> None:
    digests = [f"sha256:{hashlib.sha256(name).hexdigest()}" for name in (b"a", b"b")]
    for digest in digests:
        with own.store.blobs.receive(digest) as writer:
            writer.write(b"beginning")
    listed = own.http.get("/api/partials").json()["partials"]
    assert sorted(one["digest"] for one in listed) == sorted(digests) and {one["size"] for one in listed} == {9}
    with own.store.blobs.lock(digests[0]):
        gone = own.http.request("DELETE", "/api/partials", json={}).json()["partials"]
    assert [one["digest"] for one in gone] == [digests[1]], "one that is under way stays"
    assert own.http.request("DELETE", "/api/partials", json={"digest": "../x"}).status_code == 400
    own.http.request("DELETE", "/api/partials", json={"digest": digests[0]})
    assert own.http.get("/api/partials").json() == {"partials": []}


def test_push_says_what_is_wrong(daemon: Daemon) -> None:
    assert daemon.http.post("/api/push", json={"model": ""}).status_code == 400
    daemon.store.copy("tiny", "127.0.0.1:1/me/tiny")
    refused = daemon.http.post("/api/push", json={"model": "http://127.0.0.1:1/me/tiny"})
    assert refused.status_code == 400 and "insecure" in refused.json()["error"]
    lines = daemon.lines("/api/push", {"model": "http://127.0.0.1:1/me/tiny", "insecure": True})
    assert lines[0] == {"status": "retrieving manifest"} and "could not be reached" in lines[-1]["error"]


def test_create_copies_when_told_to(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(tiny_gguf("mine"))
    daemon.lines("/api/create", {"model": "mine", "from": str(path), "copy": True})
    assert daemon.store.blobs.links() == {}
    path.unlink()
    assert daemon.store.get("mine").model_path.read_bytes() == tiny_gguf("mine")


def test_create_quantizes_what_is_not_quantized(own: Daemon, tmp_path: Path) -> None:
    source = tmp_path / "half.gguf"
    keys: list[tuple[str | bytes, str, Any]] = [("general.architecture", "string", "llama"), ("general.file_type", "uint32", 1)]
    data = np.random.default_rng(0).standard_normal(256 * 64).astype(np.float16).tobytes()
    source.write_bytes(Builder(keys=keys, tensors=[Tensor("blk.0.ffn_up.weight", (256, 64), 1, data)]).bytes())
    lines = own.lines("/api/create", {"model": "small", "from": str(source), "quantize": "q4_K_M"})
    assert lines[-1]["status"] == "success"
    assert [line for line in lines if line["status"] == "quantizing F16 model to Q4_K_M"][-1]["completed"] == 256 * 64
    model = own.store.get("small")
    assert model.config["file_type"] == "Q4_K_M" and model.model_path.stat().st_size < source.stat().st_size / 3
    with open_gguf(model.model_path) as gguf:
        assert FORMATS[gguf.tensors["blk.0.ffn_up.weight"].type].name == "Q4_K"
    assert own.store.blobs.drafts(0) == []

    again = own.http.post("/api/create", json={"model": "smaller", "from": "small", "quantization": "q4_0", "stream": False})
    assert again.status_code == 400
    assert "quantization is only supported for F16, BF16 and F32 models" in again.json()["error"]
    wrong = own.http.post("/api/create", json={"model": "smaller", "from": "small", "quantize": "q9", "stream": False})
    assert (wrong.status_code, own.store.blobs.drafts(0)) == (400, [])
    assert wrong.json()["error"].startswith("unsupported quantization type q9 - supported types are F32, F16")
