"""One answer: the request, what comes back, how it is shown, and what it cost. Knows /api/chat's objects; knows nothing of commands or of
how a chat is kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from localrun.cli.client import Client, Json, Unreachable
from localrun.cli.environment import is_dumb
from localrun.cli.format import duration

if TYPE_CHECKING:
    from rich.status import Status

    from localrun.cli.render import Writer

DIM, RESET = "\x1b[2m", "\x1b[0m"


@dataclass
class Show:
    """How answers are shown."""

    wordwrap: bool = True
    """Draw Markdown on a terminal; off: the text as the model wrote it."""
    thinking: bool = True
    verbose: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)


@dataclass
class Answer:
    """What came of a request."""

    content: str = ""
    thinking: str = ""
    interrupted: bool = False
    done: Json | None = None
    """The last object, with the counts and times; None if it did not come."""
    first_token_s: float | None = None
    """From sending the request to the first piece of text."""
    last_token_s: float | None = None


def draws(stream: TextIO) -> bool:
    """Whether the stream is a terminal that obeys escape codes. On Windows that has to be switched on first."""
    if not stream.isatty() or is_dumb():
        return False
    obeys = True
    if sys.platform == "win32":
        obeys = _escapes_on(stream.fileno())
    return obeys


if sys.platform == "win32":

    def _escapes_on(fd: int) -> bool:
        """Has the console obey escape codes; whether it does."""
        import ctypes
        import msvcrt

        handle, mode = msvcrt.get_osfhandle(fd), ctypes.c_ulong()
        kernel, enable_virtual_terminal_processing = ctypes.windll.kernel32, 4
        known = kernel.GetConsoleMode(handle, ctypes.byref(mode))
        return bool(known and kernel.SetConsoleMode(handle, mode.value | enable_virtual_terminal_processing))


def ask(client: Client, body: Json, show: Show) -> Answer:
    """Sends `body` to /api/chat and shows the answer while it comes. Ctrl-C stops the answer: what there is of it is returned.

    Raises DaemonError and Unreachable, after what was shown has been finished.
    """
    answer = Answer()
    terminal = draws(show.out)
    screen = _Screen(show, drawn=terminal and show.wordwrap and not body.get("format"))
    sent = time.monotonic()
    try:
        with Waiting(show.err if terminal else None, f"loading {body.get('model')}") as waiting, _chat(client, body) as objects:
            for item in objects:
                if "status" in item:
                    waiting.progress(item)
                    continue
                message = item.get("message") or {}
                thinking, content = message.get("thinking") or "", message.get("content") or ""
                if thinking or content:
                    waiting.over()
                    answer.last_token_s = time.monotonic() - sent
                    answer.first_token_s = answer.first_token_s or answer.last_token_s
                answer.thinking += thinking
                answer.content += content
                screen.feed(thinking, content)
                if item.get("done"):
                    answer.done = item
    except KeyboardInterrupt:
        answer.interrupted = True
    finally:
        screen.finish()
    if answer.done is None and not answer.interrupted:
        raise Unreachable("the answer broke off: the daemon closed the connection before it was complete")
    _report(answer, show)
    return answer


def _chat(client: Client, body: Json) -> AbstractContextManager[Iterator[Json]]:
    return client.stream("/api/chat", {**body, "stream": True, "load_progress": True})


def load(client: Client, body: Json, show: Show) -> None:
    """Has the daemon load the model of `body` (without a message), showing progress on a terminal. Raises DaemonError, Unreachable."""
    terminal = draws(show.out)
    what = f"loading {body.get('model')}"
    with Waiting(show.err if terminal else None, what) as waiting, _chat(client, {**body, "messages": []}) as objects:
        for item in objects:
            if "status" in item:
                waiting.progress(item)


class _Screen:
    """Thinking in grey between two remarks, then the answer."""

    def __init__(self, show: Show, *, drawn: bool) -> None:
        self._show = show
        self._drawn = drawn
        self._grey = draws(show.out)
        self._thoughts: Writer | None = None
        self._answer: Writer | None = None

    def feed(self, thinking: str, content: str) -> None:
        if thinking and self._show.thinking and self._answer is None:
            if self._thoughts is None:
                self._thoughts = self._plain()
                self._show.out.write(f"{DIM if self._grey else ''}Thinking...\n")
            self._thoughts.feed(thinking)
        if content:
            if self._answer is None:
                self._end_thoughts()
                content = content.lstrip("\n") if self._drawn else content
                self._answer = self._markdown() if self._drawn else self._plain()
            self._answer.feed(content)

    def finish(self) -> None:
        self._end_thoughts()
        if self._answer is not None:
            self._answer.finish()

    def _end_thoughts(self) -> None:
        if self._thoughts is not None:
            self._thoughts.finish()
            self._show.out.write(f"...done thinking.{RESET if self._grey else ''}\n\n")
            self._show.out.flush()
            self._thoughts = None

    def _plain(self) -> Writer:
        from localrun.cli.render import PlainWriter

        return PlainWriter(self._show.out, clean=self._show.out.isatty())

    def _markdown(self) -> Writer:
        from localrun.cli.render import MarkdownWriter

        return MarkdownWriter(self._show.out)


class Waiting:
    """A line that moves while nothing has come yet, and is gone without a trace when something does. Without a terminal: nothing."""

    def __init__(self, terminal: TextIO | None, what: str) -> None:
        """terminal: a stream to draw on, or None."""
        self._terminal = terminal if terminal is not None and draws(terminal) else None
        self._what = what
        self._status: Status | None = None

    def __enter__(self) -> Waiting:
        if self._terminal is not None:
            from rich.console import Console

            self._status = Console(file=self._terminal).status(self._what)
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over()

    def progress(self, item: Json) -> None:
        """Shows what a status object says."""
        if self._status is not None:
            total, done = item.get("total"), item.get("completed")
            amount = f" {done}/{total}" if total and done is not None else ""
            self._status.update(f"{item['status']}{amount}".replace("[", r"\["))

    def over(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _report(answer: Answer, show: Show) -> None:
    """What a person should know about the answer, on stderr."""
    done = answer.done or {}
    if done.get("prompt_tokens_dropped"):
        messages = done.get("messages_dropped", 0)
        show.err.write(
            f"Note: the conversation no longer fits the context: the oldest {messages} messages ({done['prompt_tokens_dropped']} tokens) "
            "were left out. Raise it with /set parameter num_ctx, or start anew with /clear.\n"
        )
    if done.get("done_reason") == "length":
        show.err.write("Note: the answer was cut at its length limit (num_predict, or the context is full).\n")
    if show.verbose and answer.done is not None:
        show.err.write(statistics(answer))
    show.err.flush()


def statistics(answer: Answer) -> str:
    """The lines that --verbose prints. Prompt and generation figures are the daemon's; the last two were measured here."""
    done = answer.done or {}

    def rate(count: str, time_ns: str) -> str:
        nanoseconds = done.get(time_ns) or 0
        return f"{done.get(count, 0) / nanoseconds * 1e9:.2f} tokens/s" if nanoseconds else "-"

    rows = [
        ("total duration", duration(done.get("total_duration", 0))),
        ("load duration", duration(done.get("load_duration", 0))),
        ("prompt eval count", f"{done.get('prompt_eval_count', 0)} token(s)"),
        ("prompt eval duration", duration(done.get("prompt_eval_duration", 0))),
        ("prompt eval rate", rate("prompt_eval_count", "prompt_eval_duration")),
        ("eval count", f"{done.get('eval_count', 0)} token(s)"),
        ("eval duration", duration(done.get("eval_duration", 0))),
        ("eval rate", rate("eval_count", "eval_duration")),
    ]
    if done.get("cached_prompt_eval_count"):
        rows.insert(3, ("prompt cached", f"{done['cached_prompt_eval_count']} token(s)"))
    if answer.first_token_s is not None and answer.last_token_s is not None:
        rows.append(("time to first token", duration(answer.first_token_s * 1e9)))
        if done.get("eval_count", 0) > 1:
            each = (answer.last_token_s - answer.first_token_s) / (done["eval_count"] - 1)
            rows.append(("time per token", duration(each * 1e9)))
    if "seed" in done:
        rows.append(("seed", str(done["seed"])))
    return "\n" + "".join(f"{name + ':':<22}{value}\n" for name, value in rows)
