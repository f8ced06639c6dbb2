"""`localrun create`: hands a Modelfile to the daemon, which reads it. The one thing done here is for a daemon on another machine: files of
this one that FROM and ADAPTER name are sent there first."""

from __future__ import annotations

import codecs
import hashlib
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from localrun.cli.autostart import connect
from localrun.cli.client import Client, CliError, DaemonError, Json
from localrun.cli.models import say
from localrun.cli.progress import follow

FILE_LINE = re.compile(r"^([ \t]*(?:from|adapter)[ \t]+)(.+?)[ \t]*$", re.IGNORECASE | re.MULTILINE)


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the new model is called.")],
    file: Annotated[Path, typer.Option("--file", "-f", metavar="MODELFILE", help="The Modelfile; -: stdin.")] = Path("Modelfile"),
    quantize: Annotated[str, typer.Option("--quantize", "-q", metavar="TYPE", help="Make the weights smaller: q4_K_M, q8_0, ...")] = "",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the GGUF file that FROM names, rather than link to it.")] = False,
) -> None:
    """Make a model from a Modelfile: another model or a GGUF file, with settings of one's own.

    \b
    Examples:
      localrun create reviewer -f Modelfile.example
      echo "FROM ./model.gguf" | localrun create mine -f -
    """
    text, folder = read_modelfile(file)
    with connect(say=say) as client:
        body: Json = {"model": name, "modelfile": text}
        if copy:
            body["copy"] = True
        if quantize:
            body["quantize"] = quantize
        if client.where.here:
            body["folder"] = str(folder)
        else:
            body["modelfile"] = with_files_sent(client, text, folder)
        with client.stream("/api/create", body) as objects:
            follow(objects)


def read_modelfile(file: Path) -> tuple[str, Path]:
    """Text of a Modelfile, and the folder that relative paths in it begin at. Raises CliError."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise CliError(f"cannot read the Modelfile {file}: {error.strerror}") from None
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is no text (byte {error.start}); is it a model rather than a Modelfile?") from None
    return text, (Path.cwd() if str(file) == "-" else file.absolute().parent)


def with_files_sent(client: Client, text: str, folder: Path) -> str:
    """The Modelfile with each FROM and ADAPTER that names a file here replaced by the digest under which the daemon has it now."""

    def replaced(match: re.Match[str]) -> str:
        path = folder / Path(match[2].strip('"')).expanduser()
        return f"{match[1]}@{send(client, path)}" if path.is_file() else match[0]

    return FILE_LINE.sub(replaced, text)


def send(client: Client, path: Path) -> str:
    """Uploads a file unless the daemon has it; its digest, `sha256:<hex>`."""
    with path.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    try:
        client.request("HEAD", f"/api/blobs/{digest}")
    except DaemonError as error:
        if error.status != 404:
            raise
        say(f"sending {path.name}")
        client.upload(f"/api/blobs/{digest}", path)
    return digest
