"""plan, push, export, import, store: as processes of their own against a real daemon; files in parts on their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrun.cli.bundle import Parts, bytes_of, files_of
from localrun.cli.client import CliError
from localrun.models.gguf import open_gguf
from tests.cli.conftest import Run
from tests.daemon import serving
from tests.daemon.serving import Daemon
from tests.models.build import Builder, Tensor
from tests.store.conftest import tiny_gguf


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with serving.daemon(tmp_path / "daemon") as running:
        monkeypatch.setenv("LOCALRUN_HOST", running.url)
        yield running


# ---- parts -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("700 mib", 700 * 2**20), ("1000000", 10**6), ("1.5G", 15 * 10**8)])
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1GB", "4 parsecs"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(CliError, match="no size"):
        bytes_of(text)


@pytest.mark.parametrize("split", [0, 7, 10, 100])
@pytest.mark.parametrize("stops", [[], [3], [7, 12], [10, 20]])
def test_parts_make_up_the_stream_however_often_it_broke_off(tmp_path: Path, split: int, stops: list[int]) -> None:
    data = bytes(range(23))
    parts = Parts(tmp_path / "x.tar", split)
    for stop in [*stops, len(data)]:
        start = parts.there
        for _ in parts.write(iter([data[at : at + 4][: stop - at] for at in range(start, stop, 4)]), start, len(data)):
            pass
        assert parts.there == stop
    assert not list(tmp_path.glob("*.part")) and parts.beginning() == data[: split or None]
    assert b"".join(path.read_bytes() for path in files_of(tmp_path / "x.tar")) == data
    if split:
        assert files_of(tmp_path / "x.tar.001") == files_of(tmp_path / "x.tar")
        assert max(path.stat().st_size for path in files_of(tmp_path / "x.tar")) <= split
    parts.clear()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CliError, match="no such file"):
        files_of(tmp_path / "x.tar")


# ---- commands --------------------------------------------------------------------------------------------------------------------


def test_plan(daemon: Daemon, localrun: Run, tmp_path: Path) -> None:
    done = localrun("plan", "tiny", "--ctx", "100", "--users", "2")
    assert done.returncode == 0, done.stderr
    assert "  Memory for 2 users with 100 tokens of context\n" in done.stdout and "    fits                yes\n" in done.stdout
    file = tmp_path / "other.gguf"
    file.write_bytes(tiny_gguf())
    answer = json.loads(localrun("plan", str(file), "--json").stdout)
    assert answer["source"] == str(file) and answer["fits"]
    done = localrun("plan", "smollm2", "--users", "65536")
    assert done.returncode == 3 and "fits                no" in done.stdout and "download 93 MB" in done.stdout
    done = localrun("plan", "nobody-has-this")
    assert (done.returncode, done.stderr) == (1, "Error: model 'nobody-has-this' not found\n")


def test_export_and_import(daemon: Daemon, localrun: Run, tmp_path: Path) -> None:
    daemon.add_model("big", tiny_gguf("big", padding=5_000_000))
    file = tmp_path / "out.tar"
    done = localrun("export", "big", "tiny", str(file), "--split", "2MB")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "exporting\nsuccess\n")
    assert [path.name for path in sorted(tmp_path.glob("out*"))] == ["out.tar.001", "out.tar.002", "out.tar.003"]
    whole = b"".join(path.read_bytes() for path in files_of(file))

    # broken off in the second part, it goes on there
    (tmp_path / "out.tar.003").unlink()
    (tmp_path / "out.tar.002").rename(tmp_path / "out.tar.002.part")
    (tmp_path / "out.tar.002.part").write_bytes(whole[2_000_000:2_700_000])
    assert localrun("export", "big", "tiny", str(file), "--split", "2MB").returncode == 0
    assert b"".join(path.read_bytes() for path in files_of(file)) == whole

    # other models under the same name: written anew
    done = localrun("export", "tiny", str(file), "--split", "2MB")
    assert "written anew" in done.stderr and len(files_of(file)) == 1

    other = tmp_path / "all.tar"
    other.write_bytes(whole)
    before = daemon.store.get("big").digest
    for name in ("big", "tiny"):
        daemon.http.request("DELETE", "/api/delete", json={"model": name})
    done = localrun("import", str(other))
    assert (done.returncode, done.stdout) == (0, "imported 'big:latest'\nimported 'tiny:latest'\n"), done.stderr
    assert daemon.store.get("big").digest == before
    other.write_bytes(b"nonsense" * 1000)
    done = localrun("import", str(other))
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("Error: this is no bundle")
    assert localrun("export", "tiny").returncode == 1
    assert "smallest" not in localrun("export", "tiny", str(other), "--split", "1kB").stdout


def test_store_check_and_partials(daemon: Daemon, localrun: Run) -> None:
    done = localrun("store", "check")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith(": sound\n")
    path = daemon.store.get("tiny").model_path
    path.write_bytes(b"x" + path.read_bytes()[1:])
    done = localrun("store", "check")
    assert done.returncode == 1 and done.stdout.startswith("problem: blob sha256:") and "not sound" in done.stdout
    assert json.loads(localrun("store", "check", "--json", "--repair").stdout)["problems"][0]["kind"] == "damaged"
    assert not path.exists()

    digest = "sha256:" + "1" * 64
    with daemon.store.blobs.receive(digest) as writer:
        writer.write(b"beginning")
    assert localrun("store", "partials").stdout.splitlines()[1].split() == [digest, "9", "B"]
    assert localrun("store", "partials", "--digest", digest).returncode == 1
    assert localrun("store", "partials", "--remove", "--digest", digest).stdout == f"removed {digest} (9 B)\n"
    assert daemon.store.blobs.partials() == []


def test_push_and_insecure_pull_say_what_is_wrong(daemon: Daemon, localrun: Run) -> None:
    daemon.store.copy("tiny", "127.0.0.1:1/me/tiny")
    done = localrun("push", "http://127.0.0.1:1/me/tiny")
    assert done.returncode == 1 and "insecure" in done.stderr
    done = localrun("push", "http://127.0.0.1:1/me/tiny", "--insecure")
    assert done.returncode == 1 and "could not be reached" in done.stderr
    assert "insecure" in localrun("pull", "http://127.0.0.1:1/me/tiny").stderr
    assert "could not be reached" in localrun("pull", "http://127.0.0.1:1/me/tiny", "--insecure").stderr


def test_create_copy(daemon: Daemon, localrun: Run, tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(tiny_gguf("w"))
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM ./w.gguf\n")
    assert localrun("create", "copied", "-f", str(modelfile), "--copy").returncode == 0
    assert daemon.store.blobs.links() == {}


def test_quantize(localrun: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "in.gguf", tmp_path / "out.gguf"
    data = np.random.default_rng(0).standard_normal(256 * 16).astype(np.float32).tobytes()
    keys: list[tuple[str | bytes, str, Any]] = [("general.architecture", "string", "llama")]
    source.write_bytes(Builder(keys=keys, tensors=[Tensor("blk.0.ffn_up.weight", (256, 16), 0, data)]).bytes())
    done = localrun("quantize", str(source), str(target), "q6_K")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "quantizing to q6_K\nsuccess\n")
    with open_gguf(target) as gguf:
        assert gguf.tensors["blk.0.ffn_up.weight"].nbytes == 16 * 210
    done = localrun("quantize", str(target), str(tmp_path / "again.gguf"), "q4_0")
    assert done.returncode == 1 and done.stderr.startswith("Error: quantization is only supported for F16, BF16 and F32 models")
    assert localrun("quantize", str(target), str(tmp_path / "again.gguf"), "q4_0", "--requantize").returncode == 0
    assert "unsupported quantization type q9" in localrun("quantize", str(source), str(target), "q9").stderr
    assert "is the file to read" in localrun("quantize", str(source), str(source), "q8_0").stderr
    assert "no such file" in localrun("quantize", str(tmp_path / "x"), str(target), "q8_0").stderr
