"""The store as a whole: models appear and go in one step, shared blobs stay, others' folders work, several may use it at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import ModelFileRejected, ModelNotFound
from localrun.store import CreateSpec, PullProgress, Store
from localrun.store.blobs import Blobs
from localrun.store.durable import StorageFailed
from localrun.store.manifests import BadManifest
from localrun.store.names import InvalidName, Name
from localrun.store.store import Vanished
from tests.store.conftest import tiny_gguf


def make(store: Store, name: str, gguf: Path, **changes: Any) -> None:
    store.create(name, CreateSpec(path=gguf, **changes), lambda line: None)


def test_empty_store_is_no_error_and_writes_nothing(store: Store) -> None:
    assert store.list() == []
    with pytest.raises(ModelNotFound, match=r"^model 'smollm2' not found$"):
        store.get("smollm2")
    assert not store.root.exists()


def test_get_ignores_case_and_knows_all_spellings(store: Store, gguf: Path) -> None:
    make(store, "Mine:A", gguf)
    for name in ("Mine:A", "mine:a", "library/mine:a", "registry.ollama.ai/library/MINE:a"):
        assert store.get(name).name == "Mine:A"
    with pytest.raises(ModelNotFound):
        store.get("mine")
    make(store, "mine:a", gguf, system="x")
    assert [model.name for model in store.list()] == ["Mine:A"]
    with pytest.raises(InvalidName):
        store.get("../../etc/passwd")


def test_list_has_the_latest_first(store: Store, gguf: Path) -> None:
    for age, name in enumerate(("a", "b", "c")):
        make(store, name, gguf)
        os.utime(store.manifests.path(Name.parse(name)), (1e9 - age, 1e9 - age))
    models = store.list()
    assert [model.name for model in models] == ["a:latest", "b:latest", "c:latest"]
    assert models[0].modified_at == datetime.fromtimestamp(1e9, UTC)


def test_delete_leaves_what_another_model_needs(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, system="one")
    make(store, "b", gguf, system="two")
    weights = store.get("a").model_digest
    store.delete("A")
    assert [model.name for model in store.list()] == ["b:latest"]
    assert store.blobs.has(weights) and store.get("b").system == "two"
    store.delete("b")
    assert list(store.blobs.digests()) == [] and list(store.manifests.folder.iterdir()) == []
    assert gguf.exists()
    with pytest.raises(ModelNotFound, match=r"^model 'b' not found$"):
        store.delete("b")


def test_replacing_drops_what_only_the_old_one_needed(store: Store, gguf: Path, tmp_path: Path) -> None:
    make(store, "a", gguf, system="one")
    before = set(store.blobs.digests())
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf("other"))
    make(store, "a", other)
    assert not set(store.blobs.digests()) & before or {store.get("a").model_digest}.isdisjoint(before)
    needed = set(store.read("a")[1].blobs)
    assert set(store.blobs.digests()) == needed


def test_copy(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, system="one")
    store.copy("a", "me/b:x")
    first, second = store.get("a"), store.get("me/b:x")
    assert first.digest == second.digest and second.name == "me/b:x"
    store.delete("a")
    assert store.get("me/b:x").system == "one"
    with pytest.raises(ModelNotFound):
        store.copy("a", "c")


def test_blob_that_is_gone_or_short_is_said(store: Store, gguf: Path) -> None:
    make(store, "a", gguf, system="one two")
    system = store.blobs.path(next(layer.digest for layer in store.read("a")[1].layers if layer.kind == "system"))
    content = system.read_bytes()
    system.unlink()
    with pytest.raises(StorageFailed, match="is missing from the store"):
        store.get("a")
    assert store.list() == []
    system.write_bytes(content[:-1])
    with pytest.raises(StorageFailed, match="has 6 bytes and should have 7; pull it again"):
        store.get("a")
    store.delete("a")
    assert store.list() == []


def test_changed_file_behind_a_model(store: Store, gguf: Path) -> None:
    make(store, "a", gguf)
    if not store.blobs.links():
        pytest.skip("this file system clones files")
    with gguf.open("ab") as file:
        file.write(b"more")
    assert [model.name for model in store.list()] == ["a:latest"]
    with pytest.raises(ModelFileRejected, match=r"tiny\.gguf, which the model was created from, has changed"):
        store.get("a")


def test_unreadable_manifest_harms_nobody_else(store: Store, gguf: Path) -> None:
    make(store, "a", gguf)
    make(store, "b", gguf, system="only b's")
    store.manifests.path(Name.parse("a")).write_bytes(b"{half")
    assert [model.name for model in store.list()] == ["b:latest"]
    with pytest.raises(BadManifest, match=r"^manifest of a:latest: it is not JSON"):
        store.get("a")
    blobs = set(store.blobs.digests())
    store.delete("b")
    assert set(store.blobs.digests()) == blobs, "what the unreadable one needs is not known"
    store.delete("a")
    assert store.list() == []


def test_prune_takes_old_orphans_only(store: Store, gguf: Path) -> None:
    make(store, "a", gguf)
    old, young = store.blobs.put(b"old"), store.blobs.put(b"young")
    with store.blobs.receive(f"sha256:{'1' * 64}") as writer:
        writer.write(b"partial")
    os.utime(store.blobs.path(old), (1, 1))
    for digest in store.read("a")[1].blobs:
        if not store.blobs.links():
            os.utime(store.blobs.path(digest), (1, 1))
    assert store.prune() == [old]
    assert store.blobs.has(young) and store.blobs.partials() != []
    store.get("a")


def test_commit_notices_a_blob_that_someone_removed(store: Store, gguf: Path) -> None:
    """Between the coming of a blob and the manifest that needs it, another process may delete the last model that had it."""
    make(store, "a", gguf)
    attempts = []

    def rival(line: PullProgress) -> None:
        if line.status == "writing manifest":
            attempts.append(line)
            if len(attempts) == 1:
                Store(store.root).delete("a")

    store.create("b", CreateSpec(path=gguf), rival)
    assert len(attempts) == 2
    assert store.get("b").model_path.read_bytes() == gguf.read_bytes()


def test_commit_gives_up_when_blobs_keep_vanishing(store: Store, gguf: Path) -> None:
    def rival(line: PullProgress) -> None:
        if line.status == "writing manifest":
            for digest in list(store.blobs.digests()):
                store.blobs.delete(digest)

    with pytest.raises(Vanished, match="was removed by another process; try again"):
        store.create("b", CreateSpec(path=gguf), rival)
    assert store.list() == []


def test_many_at_once(store: Store, gguf: Path) -> None:
    """Creates, copies and deletes over one blob from many threads: whatever has a name afterwards is whole."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        mine = Store(store.root)
        try:
            for turn in range(4):
                make(mine, f"m{number}", gguf, system=f"{number} {turn}")
                mine.copy(f"m{number}", f"c{number}")
                assert mine.get(f"m{number}").system == f"{number} {turn}"
                mine.delete(f"m{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert sorted(model.name for model in store.list()) == [f"c{number}:latest" for number in range(6)]
    for number in range(6):
        assert store.get(f"c{number}").system == f"{number} 3"
    assert len(list(store.blobs.digests())) == 1 + 2 * 6  # the weights; a config and a system message each


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.parametrize("step", range(1, 9))
def test_killed_anywhere_in_a_create_and_a_delete(store: Store, gguf: Path, step: int) -> None:
    """The process dies at its `step`-th rename or removal: afterwards each model is whole or not there, and both can be done again."""
    make(store, "before", gguf, system="stays")
    code = f"""
import os, signal
from pathlib import Path
from localrun.store import CreateSpec, Store
count = 0
def dying(call):
    def wrapped(self, *arguments, **options):
        global count
        count += 1
        if count == {step}:
            os.kill(os.getpid(), {int(signal.SIGKILL)})
        return call(self, *arguments, **options)
    return wrapped
Path.replace, Path.unlink = dying(Path.replace), dying(Path.unlink)
store = Store(Path({str(store.root)!r}))
store.create("new", CreateSpec(path=Path({str(gguf)!r}), system="new", parameters={{"seed": 1}}), lambda line: None)
store.delete("before")
print("survived", count)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL, f"only {done.stdout} steps: {done.stderr}"
    for model in store.list():
        assert store.get(model.name).system in ("stays", "new")
    assert "before:latest" in {model.name for model in store.list()} or step > 5
    make(store, "new", gguf, system="new")
    assert store.get("new").system == "new"


# ---- a folder of Ollama's -----------------------------------------------------------------------------------------------------

GO_TEMPLATE = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ .Prompt }}"


def ollama_folder(root: Path) -> dict[str, bytes]:
    """Lays out, byte for byte, what Ollama has on disk after a pull. Returns all files."""
    blobs = {
        "model": tiny_gguf("theirs"),
        "template": GO_TEMPLATE.encode(),
        "system": b"You are theirs.",
        "params": b'{"stop":["<|im_start|>","<|im_end|>"],"temperature":0.5}',
        "license": b"Apache License\nVersion 2.0",
        "messages": b'[{"role":"user","content":"hi"},{"role":"assistant","content":"hello"}]',
    }
    config = (
        b'{"model_format":"gguf","model_family":"llama","model_families":["llama"],"model_type":"7B","file_type":"Q4_0",'
        b'"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:0"]}}'
    )

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    layers = ",".join(
        f'{{"mediaType":"application/vnd.ollama.image.{kind}","digest":"sha256:{digest(data)}","size":{len(data)}}}'
        for kind, data in blobs.items()
    )
    manifest = (
        '{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json","config":{"mediaType":'
        f'"application/vnd.docker.container.image.v1+json","digest":"sha256:{digest(config)}","size":{len(config)}}},"layers":[{layers}]}}\n'
    ).encode()
    files = {f"blobs/sha256-{digest(data)}": data for data in [*blobs.values(), config]}
    files["manifests/registry.ollama.ai/library/theirs/7b"] = manifest
    files[f"blobs/sha256-{'9' * 64}-partial"] = b"theirs, on its way"
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return files


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_ollamas_folder_works_in_place(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    files = ollama_folder(root)
    manifest = files["manifests/registry.ollama.ai/library/theirs/7b"]
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        store = Store(root)
        (listed,) = store.list()
        model = store.get("theirs:7b")
        assert listed == model
        assert model.name == "theirs:7b" and model.digest == hashlib.sha256(manifest).hexdigest()
        assert model.size == sum(len(data) for name, data in files.items() if name.startswith("blobs/") and not name.endswith("partial"))
        assert model.model_path.read_bytes() == tiny_gguf("theirs")
        assert model.template == GO_TEMPLATE and model.system == "You are theirs."
        assert model.params == {"stop": ["<|im_start|>", "<|im_end|>"], "temperature": 0.5}
        assert model.license == ["Apache License\nVersion 2.0"]
        assert [message["content"] for message in model.messages] == ["hi", "hello"]
        assert model.config["file_type"] == "Q4_0"
        assert contents(root) == files, "reading wrote something"
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)


def test_what_is_added_to_ollamas_folder_is_ollamas_too(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    files = ollama_folder(root)
    store = Store(root)
    store.copy("theirs:7b", "second")
    library = "manifests/registry.ollama.ai/library"
    assert (root / library / "second/latest").read_bytes() == files[f"{library}/theirs/7b"]
    store.create("derived", CreateSpec(from_name="theirs:7b", system="Mine."), lambda line: None)
    manifest = json.loads((root / "manifests/registry.ollama.ai/library/derived/latest").read_bytes())
    kinds = [layer["mediaType"].rpartition(".")[2] for layer in manifest["layers"]]
    assert sorted(kinds) == ["license", "messages", "model", "params", "system", "template"]
    for layer in [manifest["config"], *manifest["layers"]]:
        data = (root / "blobs" / layer["digest"].replace(":", "-")).read_bytes()
        assert len(data) == layer["size"] and hashlib.sha256(data).hexdigest() == layer["digest"].removeprefix("sha256:")
    for name in ("derived", "second"):
        store.delete(name)
    after = {name: data for name, data in contents(root).items() if not name.startswith("localrun/")}
    assert after == files, "what they had is left as it was, their partial download too"


def test_models_of_several_kinds_of_layers(store: Store, gguf: Path) -> None:
    """Two weights in one manifest (a model and its experts, say) are not guessed at."""
    make(store, "a", gguf)
    name, manifest = store.read("a")
    body = json.loads(manifest.raw)
    body["layers"] = [layer for layer in body["layers"] if not layer["mediaType"].endswith("model")]
    store.manifests.write(name, dataclasses.replace(manifest, raw=json.dumps(body).encode()))
    with pytest.raises(BadManifest, match="it has no layer with a GGUF file"):
        store.get("a")
    assert Blobs(store.root).links() == store.blobs.links()
