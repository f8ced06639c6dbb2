"""`localrun run`: one question from the command line or a pipe, or a chat. Decides which, and fetches the model when it is not here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from localrun.cli.answer import Show, ask, load
from localrun.cli.autostart import connect
from localrun.cli.client import Client, CliError, DaemonError
from localrun.cli.completion import complete_model
from localrun.cli.models import pull_model, say
from localrun.cli.session import Session, parse_think

STARTER = "smollm2"
"""The model of a person who named none."""
INTERRUPTED = 130


def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name of the model; fetched when it is not here.", autocompletion=complete_model)
    ] = STARTER,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="What to ask. Without it: a chat.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print times and speeds after each answer.")] = False,
    format: Annotated[str, typer.Option("--format", metavar="json", help="Have the model answer in JSON.")] = "",
    keepalive: Annotated[str, typer.Option("--keepalive", metavar="DURATION", help="How long the model stays loaded: 5m, 1h, -1.")] = "",
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", help="Print the text as it is: no Markdown, no wrapping.")] = False,
    think: Annotated[str, typer.Option("--think", metavar="[=LEVEL]", help="Have it think: true, false, low, medium, high, max.")] = "",
    hidethinking: Annotated[bool, typer.Option("--hidethinking", help="Do not show what it thinks.")] = False,
) -> None:
    """Ask a model, or chat with it.

    Without a prompt, and with a terminal on both sides, this is a chat; /? there lists what can be typed. Text that is piped in comes
    before the prompt. When no daemon runs, one is started; it ends itself after ten idle minutes.

    \b
    Examples:
      localrun run
      localrun run smollm2 "Why is the sky blue?"
      localrun run qwen2.5-coder:1.5b "Explain this:" < script.py
    """
    if format not in ("", "json"):
        raise CliError(f"invalid format '{format}' (must be json)")
    text = _question(prompt or [])
    show = Show(wordwrap=not nowordwrap, thinking=not hidethinking, verbose=verbose)
    with connect(say=say) as client:
        session = open_session(client, model)
        session.format = format or None
        session.keep_alive = keepalive or None
        session.think = parse_think(think) if think else None
        if text is None:
            from localrun.cli.repl import chat

            chat(client, session, show)
        elif not text.strip():
            load(client, session.request([]), show)
        elif ask(client, session.asked(text), show).interrupted:
            raise typer.Exit(INTERRUPTED)


def _question(words: list[str]) -> str | None:
    """The text to ask: what is piped in, then the words of the command line. None: a person is there, and gave none."""
    given = " ".join(words)
    if sys.stdin is None or sys.stdin.closed:
        return given
    if sys.stdin.isatty():
        if given:
            return given
        if sys.stdout.isatty():
            return None
        say("Type the prompt; end it with Ctrl-D (Ctrl-Z and Enter on Windows).")
    piped = sys.stdin.buffer.read().decode("utf-8", "replace").removeprefix("\ufeff")
    return " ".join(part for part in (piped.rstrip("\n") if given else piped, given) if part)


def open_session(client: Client, model: str) -> Session:
    """A fresh session on the model, which is pulled first if it is not here. Raises CliError."""
    try:
        info = client.post("/api/show", {"model": model})
    except DaemonError as error:
        if error.status != 404:
            raise
        pull_model(client, model)
        info = client.post("/api/show", {"model": model})
    return Session(model, info)
