"""Writes docs/cli.md from the commands themselves: `python scripts/cli_docs.py`. A test fails when the file is not what this writes."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "cli.md"
HEAD = """\
# The `localrun` command

Made by `python scripts/cli_docs.py` from the commands themselves; `localrun COMMAND --help` says the same.

"""
TAIL = """\
## In a chat

{chat}Keys:

{keys}## Exit status

| status | when |
|---|---|
| 0 | done |
| 1 | an error; one line on stderr says which |
| 2 | the command line was not understood |
| 130 | stopped with Ctrl-C (in a chat, Ctrl-C stops the answer and the chat goes on) |
| 141 | whoever read the output went away |

## Environment

{environment}
The daemon has settings of its own; `LOCALRUN_IDLE_EXIT` is one that matters here: a daemon which the command started ends after that many
seconds without a request (600 unless it is set; 0: never).

## Completion

`localrun --install-completion` teaches the shell the commands, options and names of models.
"""


def command_text(name: str, command: Any) -> str:
    """One command: its help, its arguments and options as a table."""
    description = inspect.cleandoc(command.help or "").replace("\f", "")
    words, _, examples = description.partition("\b\nExamples:\n")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and "--help" not in one.opts]
    usage = " ".join(one.metavar if one.required else f"[{one.metavar}]" for one in arguments)
    repeated = "..." if arguments and arguments[-1].nargs == -1 else ""
    called = f"localrun {name}{' [OPTIONS]' if options else ''} {usage}{repeated}".rstrip()
    text = f"## localrun {name}\n\n    {called}\n\n{words.strip()}\n\n"
    if arguments or options:
        text += "| | |\n|---|---|\n"
        for one in arguments:
            text += f"| `{one.metavar}` | {one.help or ''}{_default(one)} |\n"
        for one in options:
            value = f" {one.metavar}" if one.metavar and not one.is_flag else ""
            value = value.replace(" [=", "[=")
            text += f"| `{'`, `'.join(opt + value for opt in one.opts)}` | {one.help or ''}{_default(one)} |\n"
        text += "\n"
    if examples:
        text += "\n".join(f"    {line.strip()}" for line in examples.strip().splitlines()) + "\n\n"
    return text


def _default(param: Any) -> str:
    default = param.default
    if callable(default) or getattr(param, "is_flag", False) or default in (None, "", [], ()) or repr(default).startswith("Sentinel"):
        return ""
    return f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."


def document() -> str:
    """The whole file."""
    import typer.main

    from localrun.cli import environment, slash
    from localrun.cli.main import app

    def indented(text: str) -> str:
        return "".join(f"    {line}\n" if line else "\n" for line in text.rstrip().splitlines()) + "\n"

    group: Any = typer.main.get_command(app)
    commands: list[tuple[str, Any]] = []
    for name, command in group.commands.items():
        # a command with commands of its own is told by those
        inner: dict[str, Any] = getattr(command, "commands", {})
        commands += [(f"{name} {sub}", one) for sub, one in inner.items()] or [(name, command)]
    shown = {name: command for name, command in commands if not command.hidden}
    lines = inspect.cleandoc(environment.__doc__ or "").splitlines()
    variables = "\n".join(line for line in lines if line.startswith("    "))
    chat = "".join(map(indented, (slash.HELP, slash.HELP_SET, slash.HELP_PARAMETERS, slash.HELP_SHOW)))
    return (
        HEAD
        + "".join(command_text(name, command) for name, command in shown.items())
        + TAIL.format(chat=chat, keys=indented(slash.HELP_SHORTCUTS), environment=variables + "\n")
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(document(), encoding="utf-8")
