"""The chat on a real terminal (a pty, its screen emulated): keys go in, the screen is read."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest

from tests.cli.fake_daemon import FakeDaemon, model

pexpect = pytest.importorskip("pexpect", reason="pseudo-terminals are POSIX")
if sys.platform == "win32":
    pytest.skip("pseudo-terminals are POSIX", allow_module_level=True)

COLUMNS, LINES = 80, 60
TIMEOUT = 120


class Terminal:
    """A person in front of `localrun run`."""

    def __init__(self, *arguments: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._prompts = 0
        command = [sys.executable, "-m", "localrun", "run", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.child = pexpect.spawn(command[0], command[1:], dimensions=(LINES, COLUMNS), timeout=TIMEOUT, env=environment)
        self.child.setecho(False)

    def see(self, pattern: str | Callable[[str], Any]) -> str:
        """Reads until the screen's text has the pattern; the text. Fails when that does not come."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            text = self.text()
            if pattern(text) if callable(pattern) else re.search(pattern, text):
                return text
            assert time.monotonic() < deadline, f"{pattern!r} did not appear on:\n{text}"
            try:
                data = self.child.read_nonblocking(65536, timeout=0.2)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                text = self.text()
                assert pattern(text) if callable(pattern) else re.search(pattern, text), f"ended without {pattern!r}:\n{text}"
                return text
            self._stream.feed(data.replace(b"\x1b[?2026h", b"").replace(b"\x1b[?2026l", b""))
            # prompt_toolkit asks where the cursor is; a terminal answers
            for _ in range(data.count(b"\x1b[6n")):
                self.child.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def ready(self, *, same: bool = False) -> None:
        """At an empty prompt: one that was not there at the last call, unless `same`."""
        least = 1 if same else self._prompts + 1

        def there(text: str) -> bool:
            lines = text.splitlines()
            return lines[-1:] == [">>> Say something (/? for help)"] and sum(line.startswith(">>>") for line in lines) >= least

        text = self.see(there)
        self._prompts = sum(line.startswith(">>>") for line in text.splitlines())

    def enter(self, text: str) -> None:
        self.child.send(text + "\r")

    def ended(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture
def start(fake: FakeDaemon) -> Iterator[Callable[..., Terminal]]:
    begun: list[Terminal] = []

    def begin(*arguments: str) -> Terminal:
        terminal = Terminal(*arguments)
        begun.append(terminal)
        terminal.ready()
        return terminal

    yield begin
    for terminal in begun:
        terminal.child.close(force=True)


Start = Callable[..., Terminal]


def test_conversation_is_carried_on(fake: FakeDaemon, start: Start) -> None:
    fake.answers["안녕"] = ["**반갑", "습니다**\n\n- 하나\n", "- 둘"]
    terminal = start()
    terminal.enter("안녕")
    text = terminal.see("둘")
    assert ">>> 안녕\n반갑습니다\n\n • 하나\n • 둘" in text
    terminal.ready()
    terminal.enter("and then?")
    terminal.see(r"and then\?\nand then\?")
    terminal.ready()
    terminal.enter("/bye")
    assert terminal.ended() == 0
    assert fake.bodies("/api/chat")[-1]["messages"] == [
        {"role": "user", "content": "안녕"},
        {"role": "assistant", "content": "**반갑습니다**\n\n- 하나\n- 둘"},
        {"role": "user", "content": "and then?"},
    ]


def test_interrupt_stops_the_answer_and_not_the_program(fake: FakeDaemon, start: Start) -> None:
    fake.answers["count"] = [f"n{number} " for number in range(100_000)]
    fake.pause = 0.01
    terminal = start()
    terminal.enter("count")
    terminal.see(r"n\d*5 ")
    terminal.child.sendintr()
    terminal.ready()
    assert fake.broken.wait(120), "the daemon was not told"
    fake.pause = 0.0
    terminal.enter("go on")
    terminal.see("go on\ngo on")
    sent = fake.bodies("/api/chat")[-1]["messages"]
    assert sent[1]["role"] == "assistant"
    assert sent[1]["content"].startswith("n0 n1 ")
    assert "^C" not in terminal.text()


def test_interrupt_at_the_prompt(start: Start) -> None:
    terminal = start()
    terminal.child.send("half a line")
    terminal.see("half a line")
    terminal.child.sendintr()
    terminal.ready(same=True)
    assert "half a line" not in terminal.text()
    terminal.child.sendintr()
    terminal.see("Use Ctrl \\+ d or /bye to exit.")
    terminal.ready()
    terminal.child.sendeof()
    assert terminal.ended() == 0


def test_several_lines_between_quotes(fake: FakeDaemon, start: Start) -> None:
    terminal = start()
    terminal.enter('"""def f():')
    terminal.see(r"\n\.\.\.")
    terminal.enter("    return 1")
    terminal.enter('"""')
    terminal.ready()
    assert fake.bodies("/api/chat")[-1]["messages"][-1]["content"] == "def f():\n    return 1"


def test_history_across_chats(start: Start) -> None:
    first = start()
    first.enter("remember me")
    first.see("remember me\nremember me")
    first.ready()
    first.enter("/bye")
    first.ended()
    second = start()
    second.child.send("\x1b[A\x1b[A")
    second.see(">>> remember me")


@pytest.mark.parametrize("variable", ["LOCALRUN_NOHISTORY", "OLLAMA_NOHISTORY"])
def test_no_history_when_refused(start: Start, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    terminal = start()
    terminal.enter("a secret")
    terminal.see("a secret\na secret")
    terminal.ready()
    terminal.enter("/bye")
    terminal.ended()
    assert not (Path(os.environ["LOCALRUN_STATE"]) / "history").exists()


def test_nohistory_within_a_chat(start: Start) -> None:
    terminal = start()
    terminal.enter("/set nohistory")
    terminal.ready()
    terminal.enter("a secret")
    terminal.ready()
    terminal.enter("/bye")
    terminal.ended()
    assert "secret" not in (Path(os.environ["LOCALRUN_STATE"]) / "history").read_text(encoding="utf-8")


def test_settings_reach_the_daemon(fake: FakeDaemon, start: Start) -> None:
    terminal = start()
    for line in (
        "/set parameter temperature 0.5", "/set parameter seed 7", '/set parameter stop "a b" c', "/set format json", "/set think high",
        "/set system Be brief.", "hi",
    ):  # fmt: skip
        terminal.enter(line)
        terminal.ready()
    body = fake.bodies("/api/chat")[-1]
    assert body["options"] == {"temperature": 0.5, "seed": 7, "stop": ["a b", "c"]}
    assert (body["format"], body["think"]) == ("json", "high")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    for line in ("/set noformat", "/set nothink", "/clear", "hello"):
        terminal.enter(line)
        terminal.ready()
    body = fake.bodies("/api/chat")[-1]
    assert "format" not in body
    assert body["think"] is False
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


COMMANDS = [
    ("/set parameter temperature hot", "Error: invalid value 'hot' for temperature"),
    ("/set parameter nonsense 1", "Error: unknown parameter 'nonsense'"),
    ("/set parameter", "/set parameter seed N"),
    ("/set", "/set nohistory"),
    ("/set nonsense", "Unknown command '/set nonsense'"),
    ("/nonsense", "Unknown command '/nonsense'. Type /? for help"),
    ("/?", "/load MODEL"),
    ("/? shortcuts", "Ctrl-K"),
    ("/help set", "/set verbose"),
    ("/show", "/show template"),
    ("/show template", "{{ messages }}"),
    ("/show system", "You are a test."),
    ("/show info", "embedding length    576"),
    ("/show parameters", "<|im_end|>"),
    ("/list", "98 MB"),
    ("/load", "Error: usage: /load <model>"),
    ("/load nope", "Error: pull model manifest: file does not exist"),
]


def test_commands_answer_and_the_chat_goes_on(start: Start) -> None:
    terminal = start()
    for line, answer in COMMANDS:
        terminal.screen.reset()
        terminal.child.send("\x0c")  # Ctrl-L draws the prompt anew on an empty screen
        terminal.ready(same=True)
        terminal.enter(line)
        terminal.see(re.escape(answer))
        terminal.ready(same=True)


def test_path_is_a_message(fake: FakeDaemon, start: Start) -> None:
    terminal = start()
    terminal.enter("/usr/bin/python is missing")
    terminal.see("/usr/bin/python is missing\n/usr/bin/python is missing")


def test_save_and_load(fake: FakeDaemon, start: Start) -> None:
    before = [{"role": "user", "content": "earlier"}, {"role": "assistant", "content": "said"}]
    fake.models["saved"] = model("saved", shown={"messages": before})
    terminal = start()
    terminal.enter("/load saved")
    terminal.see(">>> earlier\nsaid\n\n>>> ")
    terminal.ready()
    terminal.enter("hi")
    terminal.ready()
    terminal.enter("/set parameter seed 3")
    terminal.enter("/save again")
    terminal.see("Created new model 'again'")
    assert fake.bodies("/api/chat")[-1]["messages"] == [{"role": "user", "content": "hi"}], "the daemon puts the model's own in front"
    assert fake.bodies("/api/create") == [
        {
            "model": "again",
            "from": "saved",
            "parameters": {"seed": 3},
            "messages": [*before, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi "}],
        }
    ]


def test_error_of_one_answer_does_not_end_the_chat(fake: FakeDaemon, start: Start) -> None:
    fake.answers["x"] = ["so far ", {"error": "model runner has unexpectedly stopped"}]
    terminal = start()
    terminal.enter("x")
    text = terminal.see("Error: model runner has unexpectedly stopped")
    assert "so far\n" in text
    terminal.ready()
    terminal.enter("still here")
    terminal.see("still here\nstill here")


def test_keys_pressed_during_an_answer_wait_for_the_prompt(fake: FakeDaemon, start: Start) -> None:
    fake.answers["long"] = [f"n{number} " for number in range(60)]
    fake.pause = 0.02
    terminal = start()
    terminal.enter("long")
    terminal.see("n5 ")
    terminal.child.send("typed ahead")
    text = terminal.see(r">>> typed ahead")
    assert text.count("typed ahead") == 1


def test_waiting_line_leaves_no_trace(fake: FakeDaemon, start: Start) -> None:
    fake.pause = 0.3
    terminal = start()
    terminal.enter("hi")
    text = terminal.see(r"\nhi\n")
    assert "loading" not in text
    assert "compiling" not in text
    terminal.ready()
    terminal.enter("/bye")
    terminal.ended()


def test_json_and_nowordwrap_are_not_drawn(fake: FakeDaemon, start: Start) -> None:
    fake.answers["x"] = ["# not a title\n", "**not bold**"]
    terminal = start("--nowordwrap")
    terminal.enter("x")
    terminal.see(r"# not a title\n\*\*not bold\*\*")
