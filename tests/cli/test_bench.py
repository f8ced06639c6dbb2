"""`localrun bench`: which file a name stands for, and what becomes of the measuring process."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.fake_daemon import FakeDaemon


def test_a_file_needs_no_daemon(localrun: Run, shared: Path) -> None:
    file = shared / "arch" / "llama" / "q4_0.gguf"
    done = localrun("bench", str(file), "-p", "8", "-n", "2", "-r", "1", "-t", "1", "--json", LOCALRUN_HOST="127.0.0.1:1", timeout=600)
    assert done.returncode == 0, done.stderr
    assert [row["test"] for row in json.loads(done.stdout)] == ["pp8", "tg2"]


def test_a_name_is_looked_up(fake: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    fake.models["smollm2"]["shown"] = {"modelfile": f"# made\n\nFROM {tmp_path}/absent.gguf\n"}
    done = localrun("bench", "smollm2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"Error: {tmp_path}/absent.gguf") and done.stderr.count("\n") == 1


def test_unknown_names_and_files(fake: FakeDaemon, localrun: Run, tmp_path: Path) -> None:
    assert localrun("bench", "nope").stderr == "Error: model 'nope' not found\n"
    assert localrun("bench", str(tmp_path / "no.gguf")).stderr == f"Error: {tmp_path / 'no.gguf'}: no such file\n"


def test_wrong_numbers_are_named(localrun: Run, shared: Path) -> None:
    done = localrun("bench", str(shared / "arch" / "llama" / "q4_0.gguf"), "-p", "many")
    assert done.returncode == 2
    assert "'many' is no list of numbers" in done.stderr
