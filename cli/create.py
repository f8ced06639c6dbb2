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
    """Make a model from a Modelfile: another model, a GGUF file or a safetensors checkpoint, with settings and adapters of one's own.

    \b
    Examples:
      localrun create reviewer -f Modelfile.example
      echo "FROM ./model.gguf" | localrun create mine -f -
      echo "FROM ./checkpoint-folder" | localrun create mine -f - --quantize q4_K_M
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
            body |= with_files_sent(client, text, folder)
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


def with_files_sent(client: Client, text: str, folder: Path) -> Json:
    """What /api/create needs: the Modelfile with each FROM and ADAPTER that names a file here replaced by the digest under which the daemon
    has it now. Of a folder, the daemon gets the files that make up a checkpoint or an adapter; the line says @files or @adapters then.
    Raises CliError for a second folder of a kind.
    """
    folders: Json = {}

    def replaced(match: re.Match[str]) -> str:
        path = folder / Path(match[2].strip('"')).expanduser()
        if path.is_file() and path.suffix.lower() != ".safetensors":
            return f"{match[1]}@{send(client, path)}"
        kind = "adapters" if match[1].strip().lower() == "adapter" else "files"
        parts = _parts(path)
        if not parts:
            return match[0]
        if kind in folders:
            raise CliError(f"{path}: one folder for each of FROM and ADAPTER can be sent to a daemon elsewhere")
        folders[kind] = {name: send(client, part) for name, part in parts.items()}
        return f"{match[1]}@{kind}"

    return {"modelfile": FILE_LINE.sub(replaced, text), **folders}


def _parts(path: Path) -> dict[str, Path]:
    """The files that a folder of safetensors, or one such file, consists of; by name, / between folders."""
    if path.is_file():
        beside = path.with_name("adapter_config.json")
        return {"adapter_model.safetensors": path, **({beside.name: beside} if beside.is_file() else {})}
    if not path.is_dir() or not any(part.suffix in (".safetensors", ".gguf") for part in path.iterdir()):
        return {}
    patterns = ("*.safetensors", "*.json", "*.gguf", "tokenizer.model", "vocab.txt", "chat_template.jinja", "1_Pooling/config.json")
    return {part.relative_to(path).as_posix(): part for pattern in patterns for part in sorted(path.glob(pattern)) if part.is_file()}


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
