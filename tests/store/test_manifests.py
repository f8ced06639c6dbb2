"""Manifests: Ollama's JSON, bytes kept as they are, nothing unsound believed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.store.manifests import CONFIG_TYPE, LAYER_TYPE, BadManifest, Layer, Manifest, Manifests
from localrun.store.names import Name

HEX = "ab" * 32
DIGEST = f"sha256:{HEX}"


def body(**changes: Any) -> dict[str, Any]:
    layer = {"mediaType": f"{LAYER_TYPE}model", "digest": DIGEST, "size": 7}
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"mediaType": CONFIG_TYPE, "digest": DIGEST, "size": 5},
        "layers": [layer],
    } | changes


def test_built_manifest_byte_for_byte() -> None:
    layers = [Layer(f"{LAYER_TYPE}model", DIGEST, 7), Layer(f"{LAYER_TYPE}system", DIGEST, 1)]
    manifest = Manifest.build(Layer(CONFIG_TYPE, DIGEST, 5), layers)
    assert manifest.raw == (
        b'{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        b'"config":{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"sha256:' + HEX.encode() + b'","size":5},'
        b'"layers":[{"mediaType":"application/vnd.ollama.image.model","digest":"sha256:' + HEX.encode() + b'","size":7},'
        b'{"mediaType":"application/vnd.ollama.image.system","digest":"sha256:' + HEX.encode() + b'","size":1}]}'
    )
    assert manifest.digest == hashlib.sha256(manifest.raw).hexdigest()
    assert manifest.size == 13
    again = Manifest.parse(manifest.raw, "x")
    assert again == manifest and [layer.kind for layer in again.layers] == ["model", "system"]


def test_bytes_of_others_are_kept(tmp_path: Path) -> None:
    raw = json.dumps(body(annotations={"x": 1}), indent=3).encode() + b"\n\n"
    manifests = Manifests(tmp_path)
    name = Name.parse("a")
    manifests.write(name, Manifest.parse(raw, "a"))
    assert manifests.path(name).read_bytes() == raw
    found = manifests.read(name)
    assert found is not None and found.raw == raw and found.digest == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schemaVersion": 1}, "schemaVersion is not 2"),
        ({"layers": None}, "layers is not a list"),
        ({"config": None}, "config is missing or no object"),
        ({"config": {"mediaType": CONFIG_TYPE, "digest": "sha256:../../x", "size": 1}}, "config: invalid digest format"),
        ({"layers": [{"mediaType": "x", "digest": "", "size": 1}]}, r"layers\[0\]: invalid digest format"),
        ({"layers": [{"mediaType": "x", "digest": DIGEST.upper(), "size": 1}]}, r"layers\[0\]: invalid digest format"),
        ({"layers": [{"mediaType": "x", "digest": "../../../etc/passwd", "size": 1}]}, r"layers\[0\]: invalid digest format"),
        ({"layers": [{"mediaType": "x", "digest": DIGEST, "size": -1}]}, r"layers\[0\]: size -1"),
        ({"layers": [{"mediaType": "x", "digest": DIGEST, "size": 2**70}]}, r"layers\[0\]: size"),
        ({"layers": [{"mediaType": "x", "digest": DIGEST, "size": True}]}, r"layers\[0\]: size"),
        ({"layers": [{"mediaType": "x", "digest": DIGEST, "size": 1.5}]}, r"layers\[0\]: size"),
        ({"layers": [{"mediaType": 3, "digest": DIGEST, "size": 1}]}, r"layers\[0\]: mediaType"),
        ({"layers": ["x"]}, r"layers\[0\] is missing"),
    ],
)
def test_unsound_manifests(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadManifest, match=rf"^manifest of where[^\n]*{problem}"):
        Manifest.parse(json.dumps(body(**changes)).encode(), "where")


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_manifest_or_one_line(raw: bytes) -> None:
    try:
        Manifest.parse(raw, "x")
    except BadManifest as error:
        assert "\n" not in str(error)


def test_deep_json_is_refused() -> None:
    with pytest.raises(BadManifest):
        Manifest.parse(b"[" * 200_000, "x")


def test_lookup_ignores_case_and_keeps_the_spelling(tmp_path: Path) -> None:
    manifests = Manifests(tmp_path)
    stored = Name.parse("SmolLM2:Latest")
    manifests.write(stored, Manifest.parse(json.dumps(body()).encode(), "x"))
    assert manifests.find(Name.parse("smollm2")) == stored
    assert manifests.find(Name.parse("smollm2:135m")) is None
    assert list(manifests.names()) == [stored]


def test_delete_takes_empty_folders_along(tmp_path: Path) -> None:
    manifests = Manifests(tmp_path)
    manifest = Manifest.parse(json.dumps(body()).encode(), "x")
    for text in ("a:1", "a:2"):
        manifests.write(Name.parse(text), manifest)
    manifests.delete(Name.parse("a:1"))
    assert list(manifests.names()) == [Name.parse("a:2")]
    manifests.delete(Name.parse("a:2"))
    assert list(manifests.folder.iterdir()) == []


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    manifests = Manifests(tmp_path)
    manifests.write(Name.parse("a"), Manifest.parse(json.dumps(body()).encode(), "x"))
    folder = manifests.path(Name.parse("a")).parent
    (folder / ".DS_Store").write_text("x")
    (folder / ".latest.1-aa.tmp").write_text("half")
    (folder.parent / "file").write_text("x")
    (manifests.folder / "-bad" / "n" / "m").mkdir(parents=True)
    (manifests.folder / "-bad" / "n" / "m" / "t").write_text("x")
    assert list(manifests.names()) == [Name.parse("a")]
