"""Every command as a process of its own, neither end of it a terminal: what is printed where, and the exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_daemon import FakeDaemon, model


def test_question_is_answered_in_plain_text(fake: FakeDaemon, localrun: Run) -> None:
    fake.answers["Say **it**"] = ["# Ti", "tle\n\n**bold** 한", "국어\n```py\nx\n```"]
    done = localrun("run", "smollm2", "Say", "**it**")
    assert (done.returncode, done.stdout, done.stderr) == (0, "# Title\n\n**bold** 한국어\n```py\nx\n```\n", "")
    assert fake.bodies("/api/chat")[-1]["messages"] == [{"role": "user", "content": "Say **it**"}]


@pytest.mark.parametrize(
    ("stdin", "arguments", "asked"),
    [
        ("from a pipe\n", [], "from a pipe\n"),
        ("text\n", ["Summarize this"], "text Summarize this"),
        ("\ufeff읽기", ["끝"], "읽기 끝"),
        ("", ["alone"], "alone"),
    ],
)
def test_piped_text_comes_before_the_prompt(fake: FakeDaemon, localrun: Run, stdin: str, arguments: list[str], asked: str) -> None:
    assert localrun("run", "smollm2", *arguments, stdin=stdin).returncode == 0
    assert fake.bodies("/api/chat")[-1]["messages"][-1]["content"] == asked


def test_nothing_to_ask_only_loads(fake: FakeDaemon, localrun: Run) -> None:
    done = localrun("run", "smollm2", "--keepalive", "1h")
    assert (done.returncode, done.stdout) == (0, "")
    [body] = fake.bodies("/api/chat")
    assert (body["messages"], body["keep_alive"]) == ([], "1h")


def test_no_model_means_the_starter(fake: FakeDaemon, localrun: Run) -> None:
    assert localrun("run", stdin="hello").returncode == 0
    assert fake.bodies("/api/chat")[-1]["model"] == "smollm2"


def test_missing_model_is_pulled(fake: FakeDaemon, localrun: Run) -> None:
    fake.models.clear()
    done = localrun("run", "smollm2", "hi")
    assert (done.returncode, done.stdout) == (0, "hi \n")
    assert done.stderr.splitlines() == ["pulling manifest", "pulling b179c9523d0e", "success"]


def test_unknown_model(fake: FakeDaemon, localrun: Run) -> None:
    done = localrun("run", "nope", "hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "Error: pull model manifest: file does not exist"


def test_options_reach_the_daemon(fake: FakeDaemon, localrun: Run) -> None:
    localrun("run", "smollm2", "--format", "json", "--think", "--keepalive", "-1", "hi")
    localrun("run", "smollm2", "--think=high", "hi", "--", "--think")
    first, second = fake.bodies("/api/chat")
    assert (first["format"], first["think"], first["keep_alive"]) == ("json", True, "-1")
    assert (second["think"], second["messages"][-1]["content"]) == ("high", "hi --think")


@pytest.mark.parametrize(("option", "message"), [("--format=xml", "invalid format 'xml'"), ("--think=hard", "invalid think value 'hard'")])
def test_wrong_option_values(fake: FakeDaemon, localrun: Run, option: str, message: str) -> None:
    done = localrun("run", "smollm2", option, "hi")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {message}")


def test_thinking_is_set_apart_or_hidden(fake: FakeDaemon, localrun: Run) -> None:
    def piece(thinking: str, content: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": content, "thinking": thinking}, "done": False}

    fake.answers["why"] = [piece("Let me", ""), piece(" see.", ""), piece("", "Because.")]
    assert localrun("run", "smollm2", "why").stdout == "Thinking...\nLet me see.\n...done thinking.\n\nBecause.\n"
    assert localrun("run", "smollm2", "--hidethinking", "why").stdout == "Because.\n"


def test_verbose_prints_on_stderr(fake: FakeDaemon, localrun: Run) -> None:
    done = localrun("run", "smollm2", "--verbose", "one two three")
    assert done.stdout == "one two three \n"
    lines = dict(line.split(":", 1) for line in done.stderr.splitlines() if line)
    values = {name: value.strip() for name, value in lines.items()}
    assert values["load duration"] == "100.0ms"
    assert values["prompt eval count"] == "20 token(s)"
    assert values["prompt eval rate"] == "200.00 tokens/s"
    assert values["eval rate"] == "10.00 tokens/s"
    assert values["seed"] == "7"
    assert {"time to first token", "time per token"} <= set(values)


def test_error_in_the_middle_keeps_what_came(fake: FakeDaemon, localrun: Run) -> None:
    fake.answers["x"] = ["half an ", {"error": "model runner has unexpectedly stopped"}]
    done = localrun("run", "smollm2", "x")
    assert (done.returncode, done.stdout, done.stderr) == (1, "half an \n", "Error: model runner has unexpectedly stopped\n")


def test_what_was_dropped_is_told(fake: FakeDaemon, localrun: Run) -> None:
    dropped = {"messages_dropped": 3, "prompt_tokens_dropped": 99}
    fake.answers["x"] = [{"message": {"content": "ok"}, "done": True, "done_reason": "length", **dropped}]
    done = localrun("run", "smollm2", "x")
    assert "3 messages (99 tokens) were left out" in done.stderr
    assert "cut at its length limit" in done.stderr


def test_list(fake: FakeDaemon, localrun: Run) -> None:
    fake.models["qwen"] = model("Qwen2.5:7b", size=4_700_000_000)
    lines = localrun("list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert lines[1].startswith("smollm2:latest    0123456789ab    98 MB     ")
    assert localrun("ls", "qwen").stdout.splitlines()[1].startswith("Qwen2.5:7b    0123456789ab    4.7 GB    ")
    assert [item["name"] for item in json.loads(localrun("list", "--json").stdout)["models"]] == ["smollm2:latest", "Qwen2.5:7b"]


def test_ps(fake: FakeDaemon, localrun: Run) -> None:
    fake.loaded = [
        model("a", size=1000, size_vram=0, context_length=4096, expires_at="2318-01-01T00:00:00Z"),
        model("b", size=1000, size_vram=520, context_length=8192, expires_at="2020-01-01T00:00:00Z"),
    ]
    rows = [line.split("    ") for line in localrun("ps").stdout.splitlines()]
    assert [cell.strip() for cell in rows[0] if cell] == ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"]
    assert [cell.strip() for cell in rows[1] if cell.strip()] == ["a", "0123456789ab", "1.0 kB", "100% CPU", "4096", "Forever"]
    assert [cell.strip() for cell in rows[2] if cell.strip()] == ["b", "0123456789ab", "1.0 kB", "48%/52% CPU/GPU", "8192", "Stopping..."]


def test_show(fake: FakeDaemon, localrun: Run) -> None:
    text = localrun("show", "smollm2").stdout
    for words in ("architecture        llama", "context length      8192", "quantization        Q4_1", "You are a test."):
        assert f"    {words}\n" in text
    assert "Version 2.0\n    ...\n" in text
    assert localrun("show", "smollm2", "--template").stdout == "{{ messages }}\n"
    assert localrun("show", "smollm2", "--license").stdout == "Apache License\nVersion 2.0\nJanuary 2004\n"
    both = localrun("show", "smollm2", "--template", "--system")
    assert both.returncode == 1
    assert both.stderr.startswith("Error: only one of --license")


def test_rm_stops_and_deletes(fake: FakeDaemon, localrun: Run) -> None:
    done = localrun("rm", "smollm2", "other")
    assert (done.returncode, done.stdout, done.stderr) == (1, "deleted 'smollm2'\n", "Error: model 'other' not found\n")
    assert fake.bodies("/api/generate")[0] == {"model": "smollm2", "keep_alive": 0, "stream": False}


def test_cp_and_stop(fake: FakeDaemon, localrun: Run) -> None:
    assert localrun("cp", "smollm2", "mine").stdout == "copied 'smollm2' to 'mine'\n"
    assert fake.bodies("/api/copy") == [{"source": "smollm2", "destination": "mine"}]
    assert localrun("stop", "smollm2").returncode == 0
    assert localrun("stop", "nope").stderr == "Error: couldn't find model \"nope\" to stop\n"


def test_daemon_of_another_kind_is_recognised(fake: FakeDaemon, localrun: Run) -> None:
    fake.raw["/api/version"] = (200, b"<html>hello</html>")
    done = localrun("list")
    assert done.returncode == 1
    assert "is not localrun" in done.stderr
    assert "LOCALRUN_HOST=" in done.stderr


def test_bad_address(localrun: Run) -> None:
    done = localrun("list", LOCALRUN_HOST="nonsense:port")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: LOCALRUN_HOST=nonsense:port: ")


def test_no_daemon_is_started_elsewhere(localrun: Run) -> None:
    done = localrun("list", LOCALRUN_HOST="192.0.2.1:1", NO_PROXY="*", timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")


def test_usage_errors_are_two() -> None:
    done = subprocess.run([sys.executable, "-m", "localrun", "bogus"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "No such command 'bogus'" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")
class TestEndings:
    def test_interrupt_of_an_answer(self, fake: FakeDaemon) -> None:
        fake.answers["x"] = ["word "] * 100_000
        fake.pause = 0.01
        command = [sys.executable, "-m", "localrun", "run", "smollm2", "x"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(5) == "word "
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            assert process.stdout.read().endswith("\n")
            assert process.stderr.read() == ""
        assert fake.broken.wait(120), "the daemon was not told"

    def test_interrupt_of_a_pull(self, fake: FakeDaemon) -> None:
        steps = [{"status": "step 0"}, *[{"status": "x" * 70_000}] * 10_000]
        fake.routes["POST", "/api/pull"] = lambda body: iter(steps)
        command = [sys.executable, "-m", "localrun", "pull", "smollm2"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "step 0\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 130
        assert "localrun pull smollm2 takes it up again" in errors
        assert "Traceback" not in errors

    def test_reader_that_goes_away(self, fake: FakeDaemon) -> None:
        fake.answers["x"] = ["word " * 1000] * 1000
        command = [sys.executable, "-m", "localrun", "run", "smollm2", "x"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(5)
            process.stdout.close()
            assert process.wait(120) == 141
            assert process.stderr.read() == ""


def test_version_names_both(fake: FakeDaemon, localrun: Run) -> None:
    fake.raw["/api/version"] = (200, b'{"version": "0.12", "localrun": "9.9"}')
    done = localrun("--version")
    assert done.stdout.startswith("localrun version is ")
    assert done.stderr == "Warning: the daemon's version is 9.9\n"


def test_completion_offers_what_is_there(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    from localrun.cli import completion
    from localrun.cli.completion import complete_model

    monkeypatch.setattr(completion, "COMPLETION_SECONDS", 30.0)  # the daemon is a thread of a machine that may be busy
    fake.models["qwen:7b"] = model("qwen:7b")
    assert complete_model("") == ["smollm2", "qwen:7b"]
    assert complete_model("q") == ["qwen:7b"]


def test_completion_is_silent_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    from localrun.cli.completion import complete_model

    monkeypatch.setenv("LOCALRUN_HOST", "bad:bad")
    assert complete_model("") == []


def test_import_from_elsewhere(tmp_path: Path) -> None:
    """The command works in a folder that has a `models` and a `cli` of its own."""
    for name in ("models", "cli"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    done = subprocess.run(
        [sys.executable, "-m", "localrun", "--help"], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
