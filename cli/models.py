"""Commands about models as things one has: pull, list, ps, show, rm, cp, stop, create. Each is a request and its answer in columns."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, TextIO

import typer

from localrun.cli.autostart import connect
from localrun.cli.client import Client, CliError, DaemonError, Json, Unreachable
from localrun.cli.completion import complete_model
from localrun.cli.format import ago, size, table, until
from localrun.cli.progress import follow

SECTIONS = ("license", "modelfile", "parameters", "template", "system")
PULL_STOPPED = 130
"""Exit status after Ctrl-C, as shells report it."""

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name, as `localrun list` prints it.", autocompletion=complete_model)]
Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="Only models whose name begins so.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the daemon's JSON instead of columns.")]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def write_json(value: Any, out: TextIO | None = None) -> None:
    json.dump(value, out or sys.stdout, indent=2, ensure_ascii=False)
    (out or sys.stdout).write("\n")


# ---- list, ps -------------------------------------------------------------------------------------------------------------------


def print_list(answer: Json, prefix: str, out: TextIO) -> None:
    """Columns for /api/tags."""
    out.write(table(("NAME", "ID", "SIZE", "MODIFIED"), [_list_row(model) for model in matching(answer, prefix)]))


def matching(answer: Json, prefix: str) -> list[Json]:
    """The models whose name begins so, case ignored."""
    return [model for model in answer.get("models") or [] if str(model.get("name", "")).lower().startswith(prefix.lower())]


def _list_row(model: Json) -> tuple[str, str, str, str]:
    return str(model["name"]), _short(model), size(int(model.get("size") or 0)), ago(str(model.get("modified_at", "")))


def _short(model: Json) -> str:
    """The ID people see: the first twelve digits of the manifest's digest."""
    return str(model.get("digest", "")).removeprefix("sha256:")[:12]


def list_models(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List the models that are here.

    \b
    Examples:
      localrun list
      localrun list qwen --json
    """
    with connect(say=say) as client:
        answer = client.get("/api/tags")
    if as_json:
        write_json({**answer, "models": matching(answer, prefix)})
    else:
        print_list(answer, prefix, sys.stdout)


def _ps_row(model: Json) -> tuple[str, ...]:
    total, on_gpu = int(model.get("size") or 0), int(model.get("size_vram") or 0)
    context = model.get("context_length")
    return (
        str(model["name"]),
        _short(model),
        size(total),
        processor(total, on_gpu),
        str(context) if context else "-",
        "Loading..." if model.get("status") else until(str(model.get("expires_at", ""))),
    )


def processor(total: int, on_gpu: int) -> str:
    """Where a model's memory is, in words."""
    if total <= 0:
        return "Unknown"
    if on_gpu <= 0:
        return "100% CPU"
    if on_gpu >= total:
        return "100% GPU"
    share = round((total - on_gpu) / total * 100)
    return f"{share}%/{100 - share}% CPU/GPU"


def running(prefix: Prefix = "", as_json: AsJson = False) -> None:
    """List the models that are loaded.

    \b
    Examples:
      localrun ps
      localrun ps --json
    """
    try:
        with connect(start=False) as client:
            answer = client.get("/api/ps")
    except Unreachable as error:
        if not error.refused:
            raise
        answer = {"models": []}  # no daemon, so nothing is loaded; starting one to be told so would be silly
    models = matching(answer, prefix)
    if as_json:
        write_json({**answer, "models": models})
    else:
        sys.stdout.write(table(("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"), [_ps_row(model) for model in models]))


# ---- show -----------------------------------------------------------------------------------------------------------------------


def show_section(info: Json, section: str) -> str:
    """One part of /api/show's answer as text; empty when the model has none."""
    value = info.get(section)
    if section == "license" and isinstance(value, list):
        value = "\n\n".join(str(text) for text in value)
    return str(value).rstrip("\n") if value else ""


def show_text(info: Json, *, verbose: bool = False) -> str:
    """The overview of a model, in sections."""
    details, facts = info.get("details") or {}, info.get("model_info") or {}
    architecture = str(facts.get("general.architecture") or details.get("family") or "unknown")
    rows: list[tuple[str, Any]] = [("architecture", architecture), ("parameters", details.get("parameter_size"))]
    for label, key in (("context length", "context_length"), ("embedding length", "embedding_length")):
        rows.append((label, facts.get(f"{architecture}.{key}")))
    rows.append(("quantization", details.get("quantization_level")))
    text = block("Model", [(name, str(value)) for name, value in rows if value])
    text += block("Capabilities", [(str(name), "") for name in info.get("capabilities") or []])
    lines = [line.split(None, 1) for line in str(info.get("parameters") or "").splitlines() if line.strip()]
    text += block("Parameters", [(line[0], line[1] if len(line) > 1 else "") for line in lines])
    if verbose:
        text += block("Metadata", [(name, _brief(value)) for name, value in sorted(facts.items())])
        tensors = info.get("tensors") or []
        text += block("Tensors", [(str(t.get("name")), f"{t.get('type')}  {t.get('shape')}") for t in tensors])
    for title in ("system", "license"):
        first = [line for line in show_section(info, title).splitlines() if line.strip()]
        shown = [line.strip() for line in first[:2]] + (["..."] if len(first) > 2 else [])
        text += block(title.capitalize(), [(line, "") for line in shown])
    return text


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."


def block(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    wide = max(20, *(len(name) + 4 for name, value in rows if value)) if any(value for _, value in rows) else 0
    return f"  {title}\n" + "".join(f"    {name:<{wide}}{value}".rstrip() + "\n" for name, value in rows) + "\n"


def show(
    model: Model,
    license: Annotated[bool, typer.Option("--license", help="Print the license.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Print a Modelfile that makes this model.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Print the parameters.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the prompt template.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Print the system message.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Metadata and tensors too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model is.

    \b
    Examples:
      localrun show smollm2
      localrun show smollm2 --modelfile > Modelfile
    """
    chosen = [name for name, given in zip(SECTIONS, (license, modelfile, parameters, template, system)) if given]
    if len(chosen) > 1:
        raise CliError("only one of " + ", ".join(f"--{name}" for name in SECTIONS) + " can be given")
    with connect(say=say) as client:
        info = client.post("/api/show", {"model": model, "verbose": verbose})
    if as_json:
        write_json(info)
    elif chosen:
        text = show_section(info, chosen[0])
        if text:
            sys.stdout.write(text + "\n")
    else:
        sys.stdout.write(show_text(info, verbose=verbose))


# ---- pull, rm, cp, stop ---------------------------------------------------------------------------------------------------------


def pull_model(client: Client, model: str, *, insecure: bool = False, rate: str = "") -> None:
    """Fetches a model, with its progress on stderr. Raises DaemonError; Ctrl-C ends the program."""
    try:
        body: Json = {"model": model, **({"insecure": True} if insecure else {}), **({"rate": rate} if rate else {})}
        with client.stream("/api/pull", body) as objects:
            follow(objects)
    except KeyboardInterrupt:
        say(f"\nStopped before {model} was complete; localrun pull {model} takes it up again.")
        raise typer.Exit(PULL_STOPPED) from None


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model, or the https address of a .gguf file.")],
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept plain HTTP, for a name that begins with http://.")] = False,
    rate: Annotated[str, typer.Option("--limit-rate", metavar="RATE", help="Bytes a second at most: 5M, 800k.")] = "",
) -> None:
    """Fetch a model.

    \b
    Examples:
      localrun pull smollm2
      localrun pull hf.co/OWNER/REPO-GGUF:Q4_K_M --limit-rate 5M
    """
    with connect(say=say) as client:
        pull_model(client, model, insecure=insecure, rate=rate)


def remove(models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Names.", autocompletion=complete_model)]) -> None:
    """Remove models. One that is loaded is stopped first.

    \b
    Examples:
      localrun rm smollm2
    """
    with connect(say=say) as client:
        for model in models:
            try:
                unload(client, model)
            except DaemonError as error:
                if error.status != 404:
                    raise
            client.request("DELETE", "/api/delete", {"model": model})
            sys.stdout.write(f"deleted '{model}'\n")


def copy(
    source: Model,
    destination: Annotated[str, typer.Argument(metavar="NAME", help="The other name.")],
) -> None:
    """Give a model another name. The weights are shared, not copied.

    \b
    Examples:
      localrun cp smollm2 my-assistant
    """
    with connect(say=say) as client:
        client.post("/api/copy", {"source": source, "destination": destination})
    sys.stdout.write(f"copied '{source}' to '{destination}'\n")


def unload(client: Client, model: str) -> None:
    """Raises DaemonError (404: no such model)."""
    client.post("/api/generate", {"model": model, "keep_alive": 0, "stream": False})


def stop(model: Model) -> None:
    """Unload a model from memory.

    \b
    Examples:
      localrun stop smollm2
    """
    with connect(start=False) as client:
        try:
            unload(client, model)
        except DaemonError as error:
            if error.status == 404:
                raise CliError(f"couldn't find model \"{model}\" to stop") from None
            raise
