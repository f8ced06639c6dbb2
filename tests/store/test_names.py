"""Names and digests: which are read, how they are written, and that no text reaches outside the store."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.store.blobs import Blobs
from localrun.store.names import InvalidName, Name, check_digest

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "full", "short"),
    [
        ("smollm2", "registry.ollama.ai/library/smollm2:latest", "smollm2:latest"),
        ("smollm2:135m", "registry.ollama.ai/library/smollm2:135m", "smollm2:135m"),
        ("me/mine", "registry.ollama.ai/me/mine:latest", "me/mine:latest"),
        ("hf.co/owner/repo-GGUF:Q4_K_M", "hf.co/owner/repo-GGUF:Q4_K_M", "hf.co/owner/repo-GGUF:Q4_K_M"),
        ("https://hf.co/owner/repo", "hf.co/owner/repo:latest", "hf.co/owner/repo:latest"),
        ("http://localhost:5000/ns/model:tag", "localhost:5000/ns/model:tag", "localhost:5000/ns/model:tag"),
        ("qwen2.5-coder:1.5b", "registry.ollama.ai/library/qwen2.5-coder:1.5b", "qwen2.5-coder:1.5b"),
        ("_a/_b:_c", "registry.ollama.ai/_a/_b:_c", "_a/_b:_c"),
        ("x" * 80, f"registry.ollama.ai/library/{'x' * 80}:latest", f"{'x' * 80}:latest"),
    ],
)
def test_names(text: str, full: str, short: str) -> None:
    name = Name.parse(text)
    assert (str(name), name.short) == (full, short)
    assert Name.parse(short) == Name.parse(full) == name
    assert Name.from_path(name.path) == name


def test_scheme_is_kept_and_is_no_identity() -> None:
    assert Name.parse("http://h/n/m").scheme == "http"
    assert Name.parse("http://h/n/m") == Name.parse("https://h/n/m") == Name.parse("h/n/m")


TRAVERSALS = [
    "", " ", ".", "..", "../x", "../../etc/passwd", "a/../b", "a/..", "/etc/passwd", "/", "//", "a//b", "a/", ":", "a:", ":a", "a:b:c",
    "a\0", "a\0b/c", "a\\b", "..\\x", "C:\\x", "a/b/c/d", "a b", "a\n", "m:tag\n", "a:../b", "a:..", "é", "a/é", "-a", ".a", "a/-b:c",
    "x" * 81, "a:" + "x" * 81, "n" * 81 + "/m", "h" * 351 + "/n/m", "name.space/model", "a@sha256:" + HEX, "ftp://h/n/m", "://a",
    "%2e%2e/x", "~", "~/x", "$HOME", "a*", "a?", "file:///etc/passwd", "host/na.me/model", "\ufeffa",
]  # fmt: skip


@pytest.mark.parametrize("text", TRAVERSALS)
def test_texts_that_are_no_names(text: str) -> None:
    with pytest.raises(InvalidName, match=r"^invalid model name[^\n]*$") as caught:
        Name.parse(text)
    assert caught.value.status == 400 and len(str(caught.value)) < 400


@given(st.text(max_size=40) | st.text(alphabet="./\\:~ab\0", max_size=12))
def test_a_name_that_passes_stays_inside(text: str) -> None:
    try:
        name = Name.parse(text)
    except InvalidName:
        return
    root = Path("/store/manifests")
    path = root / name.path
    assert path.parts[: len(root.parts)] == root.parts and len(path.parts) == len(root.parts) + 4
    assert not {"", ".", ".."} & set(name.path.parts)
    assert Name.from_path(name.path) == name


PART = st.text(alphabet=string.ascii_letters + string.digits + "_", min_size=1, max_size=10)


@given(PART, PART, PART, PART)
def test_round_trip(host: str, namespace: str, model: str, tag: str) -> None:
    name = Name(host, namespace, model, tag)
    assert Name.parse(str(name)) == Name.parse(name.short) == name


def test_case_does_not_make_another_model() -> None:
    assert Name.parse("SmolLM2").same_as(Name.parse("smollm2:LATEST"))
    assert not Name.parse("smollm2:135m").same_as(Name.parse("smollm2"))


@pytest.mark.skipif("os.name != 'nt'", reason="device names are Windows'")
def test_windows_device_names() -> None:
    for text in ("con", "a/nul", "x:aux.1", "dot."):
        with pytest.raises(InvalidName):
            Name.parse(text)


def test_digests() -> None:
    assert check_digest(f"sha256:{HEX}") == check_digest(f"sha256-{HEX}") == f"sha256:{HEX}"


@pytest.mark.parametrize(
    "text",
    [
        "", HEX, "sha256:", f"sha256:{HEX[:-1]}", f"sha256:{HEX}0", f"sha256:{HEX.upper()}", f"sha256:{HEX[:-1]}g", f"md5:{HEX}",
        f"sha256:{HEX}\n", f"sha256:../../{HEX[6:]}", "sha256:../../../etc/passwd", f"sha256/{HEX}", f" sha256:{HEX}",
        f"sha256:{HEX[:-1]}\0", f"/sha256:{HEX}", "sha256:" + "０" * 64,
    ],
)  # fmt: skip
def test_texts_that_are_no_digests(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"^invalid digest format[^\n]*$"):
        check_digest(text)
    blobs = Blobs(tmp_path)
    for use in (blobs.path, blobs.partial, blobs.staging, blobs.delete, blobs.has, blobs.read, blobs.unchanged):
        with pytest.raises(BadRequest):
            use(text)  # type: ignore[operator]
