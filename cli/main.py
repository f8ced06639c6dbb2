"""The `localrun` command: its sub-commands by name, and how anything that fails reaches the person. Starting it must be quick, so whatever
takes time to import is imported by the function that needs it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from localrun import __version__
from localrun.cli import bench, bundle, create, models, perplexity, plan, quantize, run, serve, storage
from localrun.cli.client import CliError
from localrun.cli.environment import BadAddress

INTERRUPTED = 130
BROKEN_PIPE = 141


class Commands(TyperGroup):
    """The sub-commands, in the order in which they are registered below; errors are one line on stderr."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (CliError, BadAddress) as error:
            sys.stderr.write(f"Error: {error}\n")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # the reader of our output has gone (localrun list | head): not an error, but nothing more can be said there
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None


app = typer.Typer(
    name="localrun",
    cls=Commands,
    help="Run language models on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def print_version(asked: bool = True) -> None:
    """Of this program, and of a daemon that runs and is another one."""
    if not asked:
        return
    from localrun.cli.client import Client
    from localrun.cli.environment import address

    sys.stdout.write(f"localrun version is {__version__}\n")
    try:
        with Client(address()) as client:
            answer = client.get("/api/version", timeout=2)
    except CliError:
        sys.stderr.write("Warning: could not connect to a running localrun\n")
    else:
        theirs = answer.get("localrun", f"{answer.get('version')} (not localrun)")
        if theirs != __version__:
            sys.stderr.write(f"Warning: the daemon's version is {theirs}\n")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", "-v", help="Print the version.", callback=print_version, is_eager=True)] = False,
) -> None:
    """Run language models on this machine."""


def version() -> None:
    """Print the version of this program and of the daemon."""
    print_version()


app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("run")(run.run)
app.command("pull")(models.pull)
app.command("list")(models.list_models)
app.command("ls", hidden=True)(models.list_models)
app.command("ps")(models.running)
app.command("show")(models.show)
app.command("stop")(models.stop)
app.command("rm")(models.remove)
app.command("cp")(models.copy)
app.command("create")(create.create)
app.command("plan")(plan.plan)
app.command("push")(storage.push)
app.command("export")(bundle.export)
app.command("import")(bundle.import_models)
app.command("quantize")(quantize.quantize)
app.add_typer(storage.app, name="store")
app.command("perplexity")(perplexity.evaluate)
app.command("bench")(bench.bench)
app.command("version")(version)


def prepared(arguments: list[str]) -> list[str]:
    """`--think` may stand alone, its value only comes after "=": what the parser has no form for is said in one it has."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ["--think=true" if word == "--think" else word for word in arguments[:end]] + arguments[end:]


def main() -> None:
    """Entry point of the `localrun` command and of `python -m localrun`."""
    for stream in (sys.stdout, sys.stderr):
        # a model may say anything; a terminal or file that cannot encode it must not end the answer
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prepared(sys.argv[1:]))
