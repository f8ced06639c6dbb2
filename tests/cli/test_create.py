"""A Modelfile on its way to the daemon: read by it here, its files sent first when it is elsewhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
import pytest

from localrun.cli.client import Client, CliError
from localrun.cli.create import read_modelfile, with_files_sent
from localrun.cli.environment import parse_address
from tests.cli.conftest import Run
from tests.cli.fake_daemon import FakeDaemon


def test_text_and_folder_are_handed_over(fake: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_bytes("\ufeffFROM ./model.gguf\nSYSTEM 안녕".encode())
    done = localrun("create", "mine", "-f", str(tmp_path / "Modelfile"))
    assert (done.returncode, done.stderr) == (0, "writing manifest\nsuccess\n")
    assert fake.bodies("/api/create") == [{"model": "mine", "modelfile": "FROM ./model.gguf\nSYSTEM 안녕", "folder": str(tmp_path)}]


def test_from_stdin(fake: FakeDaemon, localrun: Run) -> None:
    assert localrun("create", "mine", "-f", "-", stdin="FROM smollm2").returncode == 0
    assert fake.bodies("/api/create")[0]["folder"] == str(Path.cwd())


def test_missing_modelfile(fake: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    done = localrun("create", "mine", "-f", str(tmp_path / "nope"))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot read the Modelfile")
    assert not fake.bodies("/api/create")


def test_utf16_and_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "Modelfile"
    path.write_bytes("FROM x".encode("utf-16"))
    assert read_modelfile(path) == ("FROM x", tmp_path)
    path.write_bytes(b"GGUF\x03\x00\x00\x00\xff\xfe")
    with pytest.raises(CliError, match="is it a model rather than a Modelfile"):
        read_modelfile(path)


@pytest.mark.parametrize("known", [False, True])
def test_files_are_sent_to_a_daemon_elsewhere(tmp_path: Path, known: bool) -> None:
    data = b"GGUF" * 1_000_000
    (tmp_path / "my model.gguf").write_bytes(data)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    seen: list[tuple[str, str, int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, len(request.read())))
        return httpx.Response(200 if known or request.method == "POST" else 404)

    with Client(parse_address("10.0.0.1"), httpx.MockTransport(answer)) as client:
        body = with_files_sent(client, '# FROM x\nfrom  "my model.gguf"\nFROM smollm2\nSYSTEM FROM here', tmp_path)
    assert body == {"modelfile": f"# FROM x\nfrom  @{digest}\nFROM smollm2\nSYSTEM FROM here"}
    sent = [] if known else [("POST", f"/api/blobs/{digest}", len(data))]
    assert seen == [("HEAD", f"/api/blobs/{digest}", 0), *sent]


def test_folders_are_sent_to_a_daemon_elsewhere(tmp_path: Path) -> None:
    """What a checkpoint and an adapter consist of, and nothing else that lies there."""
    for name in ("model/model.safetensors", "model/config.json", "model/1_Pooling/config.json", "model/README.md", "model/run.py",
                 "lora/adapter_model.safetensors", "lora/adapter_config.json", "notes/a.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def digest(name: str) -> str:
        return f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"

    with Client(parse_address("10.0.0.1"), httpx.MockTransport(lambda request: httpx.Response(200))) as client:
        body = with_files_sent(client, "FROM ./model\nADAPTER lora\n# from notes\nSYSTEM x\nfrom notes", tmp_path)
        one = with_files_sent(client, "ADAPTER lora/adapter_model.safetensors", tmp_path)
        with pytest.raises(CliError, match="one folder for each of FROM and ADAPTER"):
            with_files_sent(client, "ADAPTER lora\nADAPTER lora", tmp_path)
    assert body["modelfile"] == "FROM @files\nADAPTER @adapters\n# from notes\nSYSTEM x\nfrom notes"
    assert body["files"] == {
        name: digest(f"model/{name}") for name in ("model.safetensors", "config.json", "1_Pooling/config.json")
    }
    assert body["adapters"] == one["adapters"] == {
        name: digest(f"lora/{name}") for name in ("adapter_model.safetensors", "adapter_config.json")
    }


def test_error_of_the_daemon_is_shown(fake: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    fake.raw["/api/create"] = (400, json.dumps({"error": "line 2, column 1: command must be one of ..."}).encode())
    (tmp_path / "Modelfile").write_text("FROM x\nBOGUS y\n")
    done = localrun("create", "mine", "-f", str(tmp_path / "Modelfile"))
    assert (done.returncode, done.stderr) == (1, "Error: line 2, column 1: command must be one of ...\n")
