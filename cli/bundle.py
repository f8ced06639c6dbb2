"""`localrun export` and `localrun import`: models carried to a machine without a network, as one file or as parts that fit on a stick.

Parts are cut and joined here; what is in the file is the daemon's matter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import localrun
from localrun import __version__
from localrun.cli.autostart import connect
from localrun.cli.client import Client, CliError, Json
from localrun.cli.models import say
from localrun.cli.progress import follow

UNITS = {"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
COMPARED = 64 << 10
"""Bytes at the beginning of an export that are compared before an interrupted one is gone on with: they name every blob."""
SMALLEST_PART = 1 << 20
PIECE = 1 << 20


def bytes_of(text: str) -> int:
    """`4GB`, `700MiB`, `1000000`. Raises CliError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise CliError(f"--split {text}: no size; examples are 4GB, 700MB, 4000MiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


class Parts:
    """The files of an export: FILE, or FILE.001, FILE.002 and so on. What is being written has .part behind its name."""

    def __init__(self, file: Path, split: int) -> None:
        self._file = file
        self._split = split

    def path(self, number: int) -> Path:
        return self._file.with_name(f"{self._file.name}.{number:03}") if self._split else self._file

    @property
    def there(self) -> int:
        """Bytes of complete files, and of the one that an earlier attempt was writing."""
        total, number = 0, 1
        while self.path(number).is_file():
            total += self.path(number).stat().st_size
            number += 1
            if not self._split:
                return total
        part = self._draft(number)
        return total + (part.stat().st_size if part.is_file() else 0)

    def beginning(self) -> bytes:
        first = self.path(1) if self.path(1).is_file() else self._draft(1)
        with first.open("rb") as file:
            return file.read(COMPARED)

    def clear(self) -> None:
        number = 1
        while self.path(number).is_file() or self._draft(number).is_file():
            self.path(number).unlink(missing_ok=True)
            self._draft(number).unlink(missing_ok=True)
            number += 1
            if not self._split:
                return

    def _draft(self, number: int) -> Path:
        path = self.path(number)
        return path.with_name(path.name + ".part")

    def write(self, chunks: Iterator[bytes], start: int, size: int) -> Iterator[int]:
        """Writes the stream's bytes from `start` on; yields how far it is. Each file gets its name when it is complete."""
        at = start
        limit = self._split or size
        number = at // limit + 1
        file = self._draft(number).open("ab")
        try:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    room = number * limit - at
                    file.write(rest[:room])
                    at += len(rest[:room])
                    rest = rest[room:]
                    if at == number * limit or at == size:
                        file.close()
                        self._draft(number).replace(self.path(number))
                        number += 1
                        if at < size:
                            file = self._draft(number).open("ab")
                yield at
        finally:
            file.close()


def export(
    models: Annotated[list[str], typer.Argument(metavar="MODEL... FILE", help="Models, and the file to write.")],
    split: Annotated[str, typer.Option("--split", metavar="SIZE", help="Write parts of at most this size: 4GB for FAT32.")] = "",
    with_app: Annotated[bool, typer.Option("--with-app", help="Put localrun itself beside it, as wheels.")] = False,
) -> None:
    """Write models into a file, for a machine without a network.

    An export that was interrupted is gone on with when the same command is given again.

    \b
    Examples:
      localrun export smollm2 smollm2.tar
      localrun export smollm2 qwen2.5-coder:1.5b /media/stick/models.tar --split 4GB --with-app
    """
    if len(models) < 2:
        raise CliError("name the models and, last, the file to write")
    *names, target = models
    limit = bytes_of(split) if split else 0
    if split and limit < SMALLEST_PART:
        raise CliError(f"--split {split}: parts are at least 1MiB")
    parts = Parts(Path(target), limit)
    with connect(say=say) as client:
        try:
            follow(_export(client, names, parts))
        except OSError as error:
            raise CliError(f"cannot write {error.filename or target}: {error.strerror}") from None
    if with_app:
        wheels(Path(target).absolute().parent / f"{Path(target).name}-app")


def _export(client: Client, names: list[str], parts: Parts) -> Iterator[Json]:
    start = parts.there
    if start:
        with client.receive("/api/export", {"models": names}) as (_, chunks):
            wanted = parts.beginning()
            found = bytearray()
            for chunk in chunks:
                found += chunk
                if len(found) >= len(wanted):
                    break
        if bytes(found[: len(wanted)]) != wanted:
            say("what is there is another export; it is written anew")
            parts.clear()
            start = 0
    with client.receive("/api/export", {"models": names, "offset": start}) as (headers, chunks):
        size = int(headers["x-localrun-bundle-size"])
        yield {"status": "exporting", "total": size, "completed": start}
        if start < size:
            for done in parts.write(chunks, start, size):
                yield {"status": "exporting", "total": size, "completed": done}
    if parts.there != size:
        raise CliError(f"the export broke off at {parts.there} of {size} bytes; the same command goes on with it")
    yield {"status": "success"}


def wheels(folder: Path) -> None:
    """localrun and everything it needs as wheels in `folder`, with a line on how they are installed. Raises CliError."""
    root = Path(localrun.__file__).resolve().parent.parent
    what = str(root) if (root / "pyproject.toml").is_file() else f"localrun=={__version__}"
    say(f"collecting wheels in {folder}")
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--wheel-dir", str(folder), what]
    if subprocess.run(command, check=False).returncode:
        raise CliError("pip could not collect the wheels; what it said is above")
    text = (
        "On the other machine, with the same kind of system and Python:\n\n"
        f"    python3 -m venv localrun-env\n    localrun-env/bin/pip install --no-index --find-links {folder.name} localrun\n"
        "    localrun-env/bin/localrun import FILE\n"
    )
    (folder / "INSTALL.txt").write_text(text, encoding="utf-8")


def files_of(file: Path) -> list[Path]:
    """The file, or all parts of it: given by the name without number or by the first part. Raises CliError."""
    stem = file.with_name(file.name.removesuffix(".001")) if file.name.endswith(".001") else file
    if file.is_file() and stem == file:
        return [file]
    found: list[Path] = []
    while (path := stem.with_name(f"{stem.name}.{len(found) + 1:03}")).is_file():
        found.append(path)
    if not found:
        raise CliError(f"{file}: no such file")
    return found


def import_models(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `localrun export` wrote; of parts, the first or the common name.")],
) -> None:
    """Take in the models of a file that `localrun export` wrote.

    Everything is verified. An import that was interrupted can be given again: what came whole is not written twice.

    \b
    Examples:
      localrun import smollm2.tar
      localrun import /media/stick/models.tar.001
    """
    paths = files_of(file)
    total = sum(path.stat().st_size for path in paths)
    came: list[str] = []

    def objects(client: Client) -> Iterator[Json]:
        from queue import SimpleQueue
        from threading import Thread

        news: SimpleQueue[Json | BaseException | None] = SimpleQueue()

        def chunks() -> Iterator[bytes]:
            done = 0
            for path in paths:
                with path.open("rb") as part:
                    while data := part.read(PIECE):
                        yield data
                        done += len(data)
                        news.put({"status": "importing", "total": total, "completed": done})

        def work() -> None:
            try:
                came.extend(client.send("/api/import", chunks())["models"])
            except BaseException as error:
                news.put(error)
            else:
                news.put(None)

        thread = Thread(target=work, daemon=True)
        thread.start()
        while (item := news.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
        yield {"status": "success"}

    with connect(say=say) as client:
        try:
            follow(objects(client))
        except OSError as error:
            raise CliError(f"cannot read {error.filename or file}: {error.strerror}") from None
    for name in came:
        sys.stdout.write(f"imported '{name}'\n")
