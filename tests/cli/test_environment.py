"""Where the daemon is, by what people write."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from localrun.cli import environment
from localrun.cli.environment import BadAddress, parse_address
from localrun.cli.repl import _history_file


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        ("example.com", "http://example.com:11434"),
        ("example.com:80", "http://example.com:80"),
        ("http://example.com", "http://example.com:80"),
        ("https://example.com", "https://example.com:443"),
        ("https://example.com:8443/llm/", "https://example.com:8443/llm"),
        ("1.2.3.4", "http://1.2.3.4:11434"),
        (":5000", "http://127.0.0.1:5000"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:5000", "http://127.0.0.1:5000"),
        ("[::]:5000", "http://[::1]:5000"),
        ("::1", "http://[::1]:11434"),
        ("[fe80::2]", "http://[fe80::2]:11434"),
        (" 'example.com:5000' ", "http://example.com:5000"),
        ("example.com/path", "http://example.com:11434/path"),
    ],
)
def test_address(text: str, url: str) -> None:
    assert parse_address(text).url == url


@pytest.mark.parametrize("text", ["ftp://x", "host:port", "host:99999", "host:-1", "host:0", "[::1"])
def test_bad_address_is_named(text: str) -> None:
    with pytest.raises(BadAddress, match="LOCALRUN_HOST=") as raised:
        parse_address(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "here"), [("", True), ("localhost:1", True), ("127.0.0.2", True), ("10.0.0.1", False), ("https://localhost", False)]
)
def test_only_this_machine_gets_a_daemon(text: str, here: bool) -> None:
    assert parse_address(text).here is here


def test_our_variable_goes_before_ollamas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:2")
    assert environment.address().port == 2
    monkeypatch.setenv("LOCALRUN_HOST", "127.0.0.1:1")
    assert environment.address().port == 1


def test_relative_folders_reach_the_daemon_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALRUN_MODELS", "here/models")
    assert environment.for_daemon(tmp_path, 600)["LOCALRUN_MODELS"] == str(tmp_path / "here" / "models")


def test_idle_exit_is_the_persons_if_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.for_daemon(tmp_path, 600)["LOCALRUN_IDLE_EXIT"] == "600"
    monkeypatch.setenv("LOCALRUN_IDLE_EXIT", "0")
    assert environment.for_daemon(tmp_path, 600)["LOCALRUN_IDLE_EXIT"] == "0"


@pytest.mark.parametrize(("value", "kept"), [("", True), ("0", True), ("false", True), ("1", False), ("true", False)])
def test_history_can_be_refused(monkeypatch: pytest.MonkeyPatch, value: str, kept: bool) -> None:
    monkeypatch.setenv("OLLAMA_NOHISTORY", value)
    assert environment.keeps_history() is kept


def test_history_file_is_private_and_bounded() -> None:
    path = _history_file()
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entry = "\n# 2026-01-01 00:00:00\n+line {}\n"
    path.write_text("".join(entry.format(number) for number in range(60_000)), encoding="utf-8")
    before = path.stat().st_size
    _history_file()
    text = path.read_text(encoding="utf-8")
    assert len(text) < before / 2
    assert text.startswith("# 2026")
    assert text.endswith("+line 59999\n")
