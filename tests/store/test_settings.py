"""The table of settings: what each variable may say, and what a bad one is told."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.durations import FOREVER, parse_duration, parse_keep_alive
from localrun.settings import BadSetting, Settings, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("1.2.3.4", "1.2.3.4", 11434),
        (":1234", "127.0.0.1", 1234),
        ("1.2.3.4:1234", "1.2.3.4", 1234),
        ("example.com", "example.com", 11434),
        ("example.com:1234", "example.com", 1234),
        (":0", "127.0.0.1", 0),
        ("0.0.0.0", "0.0.0.0", 11434),
        ("[::1]", "::1", 11434),
        ("[::]", "::", 11434),
        ("::1", "::1", 11434),
        ("[::1]:1337", "::1", 1337),
        (" 1.2.3.4 ", "1.2.3.4", 11434),
        ('"1.2.3.4"', "1.2.3.4", 11434),
        ("http://1.2.3.4", "1.2.3.4", 80),
        ("http://1.2.3.4:5", "1.2.3.4", 5),
        ("http://localhost:11434/", "localhost", 11434),
        ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
    ],
)
def test_host_forms(text: str, host: str, port: int) -> None:
    settings = Settings.from_env({"OLLAMA_HOST": text})
    assert (settings.host, settings.port) == (host, port)


def test_client_forms_of_an_address() -> None:
    assert parse_address("https://example.com") == ("https", "example.com", 443, "")
    assert parse_address("https://example.com:5000/ollama/x") == ("https", "example.com", 5000, "/ollama/x")


@pytest.mark.parametrize(
    "text", [":66000", ":-1", "host:", "1.2.3.4:x", "ftp://x", "https://x", "http://x/path", "a b", "[::1", "x:１２"]
)
def test_a_host_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(BadSetting, match=r"^LOCALRUN_HOST: [^\n]+$"):
        Settings.from_env({"LOCALRUN_HOST": text})


def test_own_variable_goes_first_and_empty_is_unset() -> None:
    both = {"LOCALRUN_MAX_QUEUE": "7", "OLLAMA_MAX_QUEUE": "9"}
    assert Settings.from_env(both).max_queue == 7
    assert Settings.from_env(both | {"LOCALRUN_MAX_QUEUE": "  "}).max_queue == 9
    assert Settings.from_env({}).max_queue == 512


GOOD = {
    "LOCALRUN_HOST": ("127.0.0.1:1", "127.0.0.1"),
    "LOCALRUN_MODELS": (str(Path.home() / "m"), Path.home() / "m"),
    "LOCALRUN_CACHE": ("~/c", Path.home() / "c"),
    "LOCALRUN_KEEP_ALIVE": ("-1", math.inf),
    "LOCALRUN_LOAD_TIMEOUT": ("90", 90.0),
    "LOCALRUN_MAX_QUEUE": ("1", 1),
    "LOCALRUN_MAX_LOADED_MODELS": ("0", 3),
    "LOCALRUN_NUM_PARALLEL": ("4", 4),
    "LOCALRUN_CONTEXT_LENGTH": ("8192", 8192),
    "LOCALRUN_KV_CACHE_TYPE": ("F16", "f16"),
    "LOCALRUN_SESSION_SIZE": ("100", 100),
    "LOCALRUN_NUM_THREAD": ("2", 2),
    "LOCALRUN_NUM_THREAD_BATCH": ("4", 4),
    "LOCALRUN_TUNE": ("false", False),
    "LOCALRUN_ISA": ("AVX2", "avx2"),
    "LOCALRUN_ORIGINS": (" https://a.example , app://*,", ("https://a.example", "app://*")),
    "LOCALRUN_API_KEYS": ("one,two", ("one", "two")),
    "LOCALRUN_HOSTS": ("a.example, *.lan", ("a.example", "*.lan")),
    "LOCALRUN_IDLE_EXIT": ("10m", 600.0),
    "LOCALRUN_GPU_LAYERS": ("-1", -1),
    "LOCALRUN_NOPRUNE": ("1", True),
    "LOCALRUN_HF_TOKEN": ("hf_x", "hf_x"),
    "LOCALRUN_HF_ENDPOINT": ("http://[::1]:1/mirror/", "http://[::1]:1/mirror"),
    "LOCALRUN_PULL_RATE": ("1.5M", 1_500_000),
    "LOCALRUN_OVERCOMMIT": ("true", True),
    "LOCALRUN_LOG_REQUESTS": ("1", True),
    "LOCALRUN_DEBUG": ("2", True),
}

BAD = {
    "LOCALRUN_MODELS": "relative/folder",
    "LOCALRUN_CACHE": "relative",
    "LOCALRUN_KEEP_ALIVE": "5 minutes",
    "LOCALRUN_LOAD_TIMEOUT": "-5m",
    "LOCALRUN_MAX_QUEUE": "0",
    "LOCALRUN_MAX_LOADED_MODELS": "-1",
    "LOCALRUN_NUM_PARALLEL": "1.5",
    "LOCALRUN_CONTEXT_LENGTH": "4k",
    "LOCALRUN_KV_CACHE_TYPE": "f8",
    "LOCALRUN_SESSION_SIZE": "4GB",
    "LOCALRUN_NUM_THREAD": "many",
    "LOCALRUN_NUM_THREAD_BATCH": "-1",
    "LOCALRUN_TUNE": "perhaps",
    "LOCALRUN_GPU_LAYERS": "-2",
    "LOCALRUN_ISA": "avx3",
    "LOCALRUN_IDLE_EXIT": "soon",
    "LOCALRUN_NOPRUNE": "perhaps",
    "LOCALRUN_HF_ENDPOINT": "huggingface.co",
    "LOCALRUN_PULL_RATE": "fast",
    "LOCALRUN_OVERCOMMIT": "maybe",
    "LOCALRUN_LOG_REQUESTS": "all",
    "LOCALRUN_DEBUG": "3",
}


@pytest.mark.parametrize("variable", [row.variables[0] for row in Settings.table()])
def test_every_row_is_read(variable: str) -> None:
    text, value = GOOD[variable]
    row = next(row for row in Settings.table() if row.variables[0] == variable)
    assert getattr(Settings.from_env({variable: text}), row.name) == value
    assert getattr(Settings.from_env({variable: f"' {text} '"}), row.name) == value


@pytest.mark.parametrize("variable", BAD)
def test_a_bad_value_names_its_variable(variable: str) -> None:
    row = next(row for row in Settings.table() if row.variables[0] == variable)
    for name in row.variables:
        with pytest.raises(BadSetting, match=rf"^{name}: [^\n]+$"):
            Settings.from_env({name: BAD[variable]})


def test_table_has_a_row_for_each_field_and_shows_true_defaults() -> None:
    rows = {row.name: row for row in Settings.table()}
    assert set(rows) == {field.name for field in fields(Settings)} - {"port"}
    for row in rows.values():
        assert row.variables[0].startswith("LOCALRUN_") and row.description.endswith(".") and row.here and row.default
        if row.here not in ("none", "false"):
            again = Settings.from_env({row.variables[0]: row.here})
            assert getattr(again, row.name) == getattr(Settings(), row.name)


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().port = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300), ("1h30m", 5400), ("-1m", -60), ("+2s", 2), ("1.5h", 5400), (".5s", 0.5), ("100ms", 0.1), ("1h0m0.5s", 3600.5),
        ("3us", 3e-6), ("3µs", 3e-6), ("3μs", 3e-6), ("7ns", 7e-9), ("0", 0), ("300", 300), ("-1", -1), ("2.5", 2.5), (" 5m ", 300),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", " ", "m", "5 m", "5x", "5m6", "1e3", "nan", "inf", "--5m", "5m-3s", "５m", "-", "."])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["h", "m", "s", "ms"])), min_size=1, max_size=4))
def test_durations_add_up(parts: list[tuple[int, str]]) -> None:
    scale = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse_duration(text) == pytest.approx(sum(number * scale[unit] for number, unit in parts))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0), (300, 300), (2.5, 2.5), (-1, FOREVER), ("5m", 300), ("-1", FOREVER), ("-5m", FOREVER), ("0", 0), ("90", 90)],
)
def test_keep_alive(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", [None, True, [], {}, float("nan"), float("inf"), 10**400, "soon"])
def test_keep_alive_of_other_kinds(value: object) -> None:
    with pytest.raises(ValueError):
        parse_keep_alive(value)


def test_the_page_of_settings_is_not_stale(repository: Path) -> None:
    from localrun.settings_page import settings_markdown, settings_text

    written = (repository / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == settings_markdown(), "run: python -m localrun.settings_page > docs/settings.md"
    for row in Settings.table():
        for variable in row.variables:
            assert f"`{variable}`" in written and variable in settings_text()


def test_what_looks_like_a_setting_and_is_none_is_named() -> None:
    strange = {"LOCALRUN_KEEPALIVE": "5m", "OLLAMA_FLASH_ATTENTION": "1"}
    environ = {**strange, "OLLAMA_HOST": "x", "LOCALRUN_STATE": "/s", "OLLAMA_GPU": " ", "A": "b"}
    assert Settings.strangers(environ) == ["LOCALRUN_KEEPALIVE", "OLLAMA_FLASH_ATTENTION"]
