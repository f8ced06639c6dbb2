"""The chat on a terminal: reads lines with an editor, keeps their history, sends what is no command to the model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from localrun.cli import slash
from localrun.cli.answer import Show, ask, load
from localrun.cli.client import Client, CliError
from localrun.cli.environment import keeps_history, state_folder
from localrun.cli.run import open_session
from localrun.cli.session import Session

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Filter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'
HISTORY_NAME = "history"
HISTORY_BYTES = 1024 * 1024
"""The history file is cut to its newer half beyond this."""


def chat(client: Client, session: Session, show: Show) -> None:
    """Until /bye or Ctrl-D. An error of one answer is shown and does not end the chat."""
    context = slash.Context(client, session, show, load_session=lambda name: open_session(client, name))
    editor = Editor(context)
    with contextlib.suppress(KeyboardInterrupt), silent_keys():
        load(client, session.request([]), show)
    context.say_messages(session.info.get("messages") or [])
    while True:
        try:
            line = editor.read()
        except KeyboardInterrupt:
            context.say("\nUse Ctrl + d or /bye to exit.")
            continue
        except EOFError:
            return
        if not line.strip():
            continue
        try:
            with silent_keys():
                if slash.is_command(line):
                    if not slash.run(line, context):
                        return
                else:
                    answer_to(slash.unquoted(line.strip()), context)
        except KeyboardInterrupt:
            context.say("")
        except CliError as error:
            context.show.err.write(f"Error: {error}\n")
            context.show.err.flush()


def answer_to(text: str, context: slash.Context) -> None:
    """One turn. What an interrupted answer had said stays part of the conversation. Raises CliError."""
    answer = ask(context.client, context.session.asked(text), context.show)
    context.session.answered(text, answer.content, answer.thinking)
    context.say("")


class Editor:
    """Reads one message: a line, or several between triple quotes."""

    def __init__(self, context: slash.Context) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition

        self._history = _history_file() if keeps_history() else None
        context.write_history = self._write_history
        unfinished = Condition(lambda: is_open(self._prompt.default_buffer.text))
        self._prompt: PromptSession[str] = PromptSession(
            history=self._history_for(self._history is not None),
            multiline=unfinished,
            prompt_continuation=lambda width, number, wrapped: "" if wrapped else CONTINUED,
            key_bindings=_keys(unfinished),
            complete_while_typing=False,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
        )

    def read(self) -> str:
        """Raises KeyboardInterrupt for Ctrl-C on an empty line, EOFError for Ctrl-D."""
        return self._prompt.prompt(PROMPT, placeholder=self._hint)

    def _hint(self) -> FormattedText:
        """In grey on an empty line, and gone when the line is left behind."""
        from prompt_toolkit.formatted_text import FormattedText

        return FormattedText([] if self._prompt.app.is_done else [("ansibrightblack", "Say something (/? for help)")])

    def _write_history(self, enabled: bool) -> None:
        self._history = _history_file() if enabled else None
        self._prompt.history = self._prompt.default_buffer.history = self._history_for(enabled)

    def _history_for(self, enabled: bool) -> History:
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        return FileHistory(str(self._history)) if enabled and self._history else InMemoryHistory()


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """Keys pressed while an answer is drawn are not drawn into it; they are there at the next prompt. Where terminals have no such mode
    (Windows), nothing changes."""
    if sys.platform == "win32":
        yield
    else:
        import termios

        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        quiet = list(before)
        quiet[3] &= ~termios.ECHO
        termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def is_open(text: str) -> bool:
    """Whether the text began a multi-line message that it has not ended."""
    stripped = text.strip()
    if stripped.startswith("/set system"):
        stripped = stripped.removeprefix("/set system").strip()
    return stripped.startswith(QUOTES) and not (len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES))


def _history_file() -> Path:
    """The file, private to its owner, cut when it has grown long."""
    path = state_folder() / HISTORY_NAME
    path.touch(mode=0o600, exist_ok=True)
    if path.stat().st_size > HISTORY_BYTES:
        newer = path.read_bytes()[-HISTORY_BYTES // 2 :]
        path.write_bytes(newer[newer.find(b"\n# ") + 1 :])
    return path


def _keys(unfinished: Filter) -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        """Empties the line; on an empty one, says how to leave."""
        buffer = event.current_buffer
        if buffer.text:
            buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    @keys.add("c-g")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    @keys.add("enter", filter=unfinished)  # the editor's own would repeat the indentation, also in front of closing quotes
    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
