"""Models from Hugging Face's protocol and from plain addresses, on loopback."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadRequest, DownloadFailed, ModelFileRejected, RequestCancelled
from localrun.models.gguf import open_gguf
from localrun.store import PullProgress, Store, download, header, hub
from localrun.store.blobs import DigestMismatch
from localrun.store.hub import Choice, RemoteFile, Web
from tests.models.build import Builder, Tensor
from tests.store.conftest import tiny_gguf
from tests.store.web import Hub


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)
    with Hub() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, web: Hub) -> Store:
    return Store(tmp_path / "models", Web(web.url, "secret"))


def parts(count: int = 2) -> list[bytes]:
    """A model in parts: keys in the first one, a tensor in each."""
    made = []
    for number in range(count):
        keys: list[tuple[str | bytes, str, Any]] = [("split.no", "uint16", number), ("split.count", "uint16", count)]
        keys.append(("split.tensors.count", "int32", count))
        if number == 0:
            keys = [("general.architecture", "string", "llama"), ("llama.context_length", "uint32", 2048), *keys]
        data = hashlib.sha256(str(number).encode()).digest() * 4
        made.append(Builder(keys=keys, tensors=[Tensor(f"part{number}.weight", (32,), 0, data)]).bytes())
    return made


def pulled(store: Store, name: str, *, insecure: bool = False) -> list[str]:
    lines: list[str] = []
    store.pull(name, lambda line: lines.append(line.status), insecure=insecure)
    return lines


# ---- names -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen3-8B-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m", "Q4_K_M"),
        ("Model.IQ2_XXS", "IQ2_XXS"),
        ("Llama-3-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("Phi-3-mini-4k-instruct-fp16", "F16"),
        ("BF16/Qwen3-BF16", "BF16"),
        ("Q8_0/weights", "Q8_0"),
        ("tiny", "tiny"),
    ],
)
def test_label_of_a_file_name(file: str, label: str) -> None:
    assert hub.label_of(file) == label


def choices(*names: str) -> list[Choice]:
    return hub.grouped([RemoteFile("http://x/" + name, name, 10) for name in names])


def test_what_no_quantization_means() -> None:
    listed = choices("m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q4_K_M.gguf", "m-Q4_K_M.imatrix.gguf")
    assert hub.choose(listed, "latest", "hf.co/a/b").label == "Q4_K_M"
    assert hub.choose(choices("m-Q2_K.gguf"), "latest", "hf.co/a/b").label == "Q2_K"
    with pytest.raises(DownloadFailed, match=r"several models; name one of Q2_K, Q3_K_S, as in hf.co/a/b:Q2_K"):
        hub.choose(choices("m-Q2_K.gguf", "m-Q3_K_S.gguf"), "latest", "hf.co/a/b")
    with pytest.raises(DownloadFailed, match="no GGUF files"):
        hub.choose([], "latest", "hf.co/a/b")


def test_quantization_by_name_in_any_case_or_the_file_itself() -> None:
    listed = choices("m-Q8_0.gguf", "m-IQ4_XS.gguf")
    assert hub.choose(listed, "iq4_xs", "w").label == "IQ4_XS"
    assert hub.choose(listed, "m-Q8_0.gguf", "w").label == "Q8_0"
    with pytest.raises(DownloadFailed, match="w has no Q5_0; it has IQ4_XS, Q8_0"):
        hub.choose(listed, "Q5_0", "w")
    with pytest.raises(DownloadFailed, match="2 files that are Q8_0; name one of a-Q8_0, b-Q8_0"):
        hub.choose(choices("a-Q8_0.gguf", "b-Q8_0.gguf"), "Q8_0", "w")


def test_parts_are_one_model_when_all_are_there() -> None:
    listed = choices("m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q4_0-00001-of-00002.gguf")
    assert [(one.label, [file.name for file in one.files]) for one in listed] == [
        ("Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"])
    ]


def test_name_of_an_address() -> None:
    assert hub.name_for("https://h/a/Some%20Model-Q4_0.gguf?x=1").short == "some-model-q4_0:latest"
    assert hub.is_address("https://h/a.gguf?x=1") and not hub.is_address("https://h/a/b") and not hub.is_address("a.gguf")


# ---- pulls -----------------------------------------------------------------------------------------------------------------------


def test_private_repository_with_the_token_which_goes_nowhere_else(store: Store, web: Hub) -> None:
    data = tiny_gguf("hub")
    web.token, web.page, web.files = "secret", 1, {"a-Q8_0.gguf": tiny_gguf("other"), "tiny-Q4_K_M.gguf": data}
    assert pulled(store, "hf.co/org/tiny-GGUF:q4_k_m")[-2:] == ["writing manifest", "success"]
    model = store.get("hf.co/org/tiny-GGUF:Q4_K_M")
    assert model.model_path.read_bytes() == data and model.config["model_family"] == "llama"
    assert web.asked("/resolve/") and all(headers["authorization"] == "Bearer secret" for headers in web.asked("/resolve/"))
    assert web.asked("storage/") and not any("authorization" in headers for headers in web.asked("storage/"))
    assert len(web.asked("/tree/")) == 3
    before = len(web.asked("storage/"))
    pulled(store, "hf.co/org/tiny-GGUF:Q4_K_M")
    assert len(web.asked("storage/")) == before, "what is there is not fetched again"


def test_without_the_token_the_message_says_what_to_set(tmp_path: Path, web: Hub) -> None:
    web.token = "secret"
    with pytest.raises(DownloadFailed, match=r"unauthorized.*set HF_TOKEN"):
        Store(tmp_path / "m", Web(web.url)).pull("hf.co/org/tiny-GGUF", lambda line: None)
    with pytest.raises(DownloadFailed, match=r"unauthorized.*the token in HF_TOKEN gives no access"):
        Store(tmp_path / "m", Web(web.url, "wrong")).pull("hf.co/org/tiny-GGUF", lambda line: None)


def test_parts_are_joined_into_one_blob(store: Store, web: Hub) -> None:
    first, second = parts()
    web.files = {"big/m-Q8_0-00001-of-00002.gguf": first, "big/m-Q8_0-00002-of-00002.gguf": second}
    pulled(store, "hf.co/org/tiny-GGUF:Q8_0")
    with open_gguf(store.get("hf.co/org/tiny-GGUF:Q8_0").model_path) as gguf:
        assert list(gguf.tensors) == ["part0.weight", "part1.weight"] and "split.count" not in gguf.metadata
        assert bytes(gguf.data("part1.weight")) == hashlib.sha256(b"1").digest() * 4
        assert gguf.metadata["llama.context_length"] == 2048
    assert len(list(store.blobs.digests())) == 2, "the model and its config; the parts are gone"


def test_address_of_a_file(store: Store, web: Hub) -> None:
    data = tiny_gguf("plain", padding=5000)
    web.plain = {"/files/My-Tiny.Q4_0.gguf": data}
    with pytest.raises(BadRequest, match="insecure"):
        store.pull("http://localhost:1/files/My-Tiny.Q4_0.gguf", lambda line: None)
    lines = pulled(store, f"{web.url}/files/My-Tiny.Q4_0.gguf", insecure=True)
    assert lines[-2:] == ["the model is called my-tiny.q4_0:latest", "success"]
    model = store.get("my-tiny.q4_0")
    assert model.model_path.read_bytes() == data
    assert model.model_digest == f"sha256:{hashlib.sha256(data).hexdigest()}" and store.blobs.partials() == []


def test_address_of_the_first_part(store: Store, web: Hub) -> None:
    first, second = parts()
    web.plain = {"/m-00001-of-00002.gguf": first, "/m-00002-of-00002.gguf": second}
    pulled(store, f"{web.url}/m-00001-of-00002.gguf", insecure=True)
    with open_gguf(store.get("m").model_path) as gguf:
        assert len(gguf.tensors) == 2
    with pytest.raises(BadRequest, match="part 2 of a split model"):
        store.pull(f"{web.url}/m-00002-of-00002.gguf", lambda line: None, insecure=True)


def test_what_is_no_model_does_not_stay(store: Store, web: Hub) -> None:
    web.plain = {"/a.gguf": b"<html>not found</html>"}
    with pytest.raises(ModelFileRejected, match="magic"):
        store.pull(f"{web.url}/a.gguf", lambda line: None, insecure=True)
    assert list(store.blobs.digests()) == [] and store.list() == []


def test_bytes_that_are_not_what_the_list_promises(store: Store, web: Hub) -> None:
    web.files, web.damage = {"tiny-Q4_K_M.gguf": tiny_gguf()}, {"tiny-Q4_K_M.gguf"}
    with pytest.raises(DigestMismatch, match="digest mismatch, expected"):
        store.pull("hf.co/org/tiny-GGUF", lambda line: None)
    assert store.list() == [] and list(store.blobs.digests()) == []


def test_cancelled_pull_is_taken_up_again(store: Store, web: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(download, "POLL_S", 0)
    data = tiny_gguf("long", padding=100_000)
    web.plain = {"/long.gguf": data}
    came: list[int] = []

    def heard(line: PullProgress) -> None:
        came.append(line.completed or 0)

    with pytest.raises(RequestCancelled):
        store.pull(f"{web.url}/long.gguf", heard, lambda: max(came, default=0) > 30_000, insecure=True)
    before, web.sent = web.sent, 0
    pulled(store, f"{web.url}/long.gguf", insecure=True)
    assert web.sent < len(data) - 20_000, f"{before} bytes had come already"
    assert store.get("long").model_path.read_bytes() == data


# ---- headers ---------------------------------------------------------------------------------------------------------------------


def test_header_of_an_address_takes_megabytes_only(store: Store, web: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "STEPS", (50, 120, 1000, 100_000))
    data = tiny_gguf("large", padding=3_000_000)
    web.plain = {"/large.gguf": data}
    found = header.find(store, f"{web.url}/large.gguf", insecure=True)
    assert found.facts.file_bytes == found.download == len(data)
    assert found.facts.parameters == 32 * (1 + 3_000_000 // 128) and found.facts.context_length == 2048
    assert web.sent <= 1170
    web.ranges, web.sent = False, 0
    assert header.find(store, f"{web.url}/large.gguf", insecure=True).facts == found.facts


def test_header_of_parts(store: Store, web: Hub) -> None:
    first, second = parts()
    web.files = {"m-Q8_0-00001-of-00002.gguf": first, "m-Q8_0-00002-of-00002.gguf": second, "m-Q2_K.gguf": tiny_gguf()}
    found = header.find(store, "hf.co/org/tiny-GGUF:Q8_0")
    assert found.facts.parameters == 64 and found.download == len(first) + len(second)
    assert [one.label for one in found.others] == ["Q2_K", "Q8_0"]


def test_header_of_a_damaged_file(store: Store, web: Hub) -> None:
    web.plain = {"/a.gguf": b"<html>" + bytes(3_000_000), "/b.gguf": tiny_gguf()[:200]}
    with pytest.raises(ModelFileRejected, match=r"a.gguf: magic"):
        header.find(store, f"{web.url}/a.gguf", insecure=True)
    assert web.sent < 2_000_000
    with pytest.raises(ModelFileRejected, match=r"b.gguf"):
        header.find(store, f"{web.url}/b.gguf", insecure=True)
    with pytest.raises(DownloadFailed, match="file does not exist"):
        header.find(store, f"{web.url}/c.gguf", insecure=True)
