"""`localrun push` and `localrun store ...`: models sent to a registry, and the state of the folder in which models lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from localrun.cli.autostart import connect
from localrun.cli.client import CliError, Json
from localrun.cli.completion import complete_model
from localrun.cli.format import size, table
from localrun.cli.models import AsJson, say, write_json
from localrun.cli.progress import follow

UNSOUND = 1

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look after the folder in which models lie.")


def push(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name with a host: HOST/me/model:tag.", autocompletion=complete_model)],
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept plain HTTP, for a name that begins with http://.")] = False,
) -> None:
    """Send a model to a registry: give it a name there with `localrun cp` first.

    \b
    Examples:
      localrun cp my-assistant registry.example/me/my-assistant
      localrun push registry.example/me/my-assistant
    """
    with connect(say=say) as client, client.stream("/api/push", {"model": model, "insecure": insecure}) as objects:
        follow(objects)


@app.command("check")
def check(
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged or of no use; pull brings the rest again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare every file with its digest, and find what no model needs. The exit status is 1 when a model is harmed.

    \b
    Examples:
      localrun store check
      localrun store check --repair
    """
    last: Json = {}

    def kept(objects: Iterator[Json]) -> Iterator[Json]:
        nonlocal last
        for item in objects:
            last = item
            yield item

    with connect(say=say) as client, client.stream("/api/check", {"repair": repair}) as objects:
        follow(kept(objects), quiet=as_json or not sys.stderr.isatty())
    if as_json:
        write_json({key: value for key, value in last.items() if key != "status"})
    else:
        sys.stdout.write(check_text(last))
    if not last.get("sound"):
        raise typer.Exit(UNSOUND)


def check_text(report: Json) -> str:
    """The last object of /api/check for people."""
    lines = []
    for one in report["problems"]:
        done = f": {one['repaired']}" if one["repaired"] else ""
        lines.append(f"{'problem' if one['harm'] else 'waste'}: {one['text']} ({size(one['bytes'])}){done}")
    verdict = "sound" if report["sound"] else "not sound; localrun store check --repair, then pull the models named above again"
    lines.append(f"{report['models']} models, {report['blobs']} files, {size(report['bytes'])} read: {verdict}")
    return "\n".join(lines) + "\n"


@app.command("partials")
def partials(
    remove: Annotated[bool, typer.Option("--remove", help="Forget them; one that is under way stays.")] = False,
    digest: Annotated[str, typer.Option("--digest", metavar="DIGEST", help="Only this one, as it is listed.")] = "",
    as_json: AsJson = False,
) -> None:
    """List downloads that were interrupted. A pull takes them up again; they are kept until they are removed here.

    \b
    Examples:
      localrun store partials
      localrun store partials --remove
    """
    if digest and not remove:
        raise CliError("--digest goes with --remove")
    with connect(say=say) as client:
        answer = client.request("DELETE", "/api/partials", {"digest": digest}) if remove else client.get("/api/partials")
    if as_json:
        write_json(answer)
        return
    rows = [(one["digest"], size(one["size"])) for one in answer["partials"]]
    if remove:
        sys.stdout.write("".join(f"removed {name} ({much})\n" for name, much in rows))
    else:
        sys.stdout.write(table(("DIGEST", "SIZE"), rows))
