"""Facts of a model that is anywhere: in the store, in a file, in the catalogue, or on the web, where only the first megabytes are read.

What a source is, and how its header comes here; what a header says is known in facts.py.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localrun.errors import DownloadFailed, ModelFileRejected, ModelNotFound
from localrun.models.errors import ModelFileError
from localrun.models.gguf import MAX_HEADER, open_gguf
from localrun.store import catalogue, hub
from localrun.store.facts import Facts, facts_of
from localrun.store.hub import Choice, Web, WebSource
from localrun.store.names import Name

if TYPE_CHECKING:
    from localrun.store.store import Store

STEPS = (1 << 20, 4 << 20, 16 << 20, 48 << 20, MAX_HEADER)
"""Bytes of a remote file that are fetched, until the header is whole. A vocabulary of 262,144 tokens needs 16 MiB."""


@dataclass(frozen=True)
class Found:
    source: str
    """In words: "the store", "catalogue", the path or the address."""
    facts: Facts
    download: int = 0
    """Bytes that would have to come over the network first."""
    others: tuple[Choice, ...] = ()
    """The models of the same repository."""


def find(store: Store, text: str, *, local: bool = True, insecure: bool = False) -> Found:
    """local: paths of this machine are meant. Raises InvalidName, ModelNotFound, ModelFileRejected, DownloadFailed, StorageFailed."""
    if hub.is_address(text):
        return from_web(store.web, hub.at_address(text), text, insecure=insecure)
    if local and _is_path(text):
        return Found(str(Path(text)), read(Path(text)))
    name = Name.parse(text)
    try:
        return Found("store", read(store.get(text).model_path))
    except ModelNotFound:
        entry = catalogue.find(name)
        if entry is not None and entry.facts is not None:
            return Found("catalogue", entry.facts, entry.download)
        if name.host not in hub.HOSTS:
            raise
    with WebSource(store.web) as source:
        where = f"{name.host}/{name.namespace}/{name.model}"
        choices = source.choices(name.namespace, name.model)
        return from_web(store.web, hub.choose(choices, name.tag, where), where, others=tuple(choices))


def _is_path(text: str) -> bool:
    return Path(text).is_absolute() or text.lower().endswith(".gguf")


def read(path: Path) -> Facts:
    """Raises ModelFileRejected."""
    try:
        with open_gguf(path) as gguf:
            return facts_of(gguf)
    except ModelFileError as error:
        raise ModelFileRejected(str(error)) from error


def from_web(web: Web, choice: Choice, where: str, *, insecure: bool = False, others: tuple[Choice, ...] = ()) -> Found:
    """Reads the header, or all headers of a model in parts, and nothing more. Raises DownloadFailed, ModelFileRejected."""
    with WebSource(web, insecure=insecure) as source, tempfile.TemporaryDirectory(prefix="localrun-plan-") as folder:
        paths = [Path(folder, f"{number}.gguf") for number in range(len(choice.files))]
        sizes = [0] * len(paths)
        for step in STEPS:
            for number, file in enumerate(choice.files):
                if not sizes[number] or paths[number].stat().st_size < sizes[number]:
                    data, sizes[number] = source.head_of(file, step)
                    paths[number].write_bytes(data)
            whole = all(path.stat().st_size == min(size, MAX_HEADER) for path, size in zip(paths, sizes))
            final = whole or step == STEPS[-1]
            with _problem(final=final, name=choice.files[0].name), open_gguf(paths[0], parts=paths[1:] or None, sizes=sizes) as gguf:
                return Found(where, facts_of(gguf), sum(sizes), others)
        raise DownloadFailed(f"{where}: the header of {choice.files[0].name} did not come")


@contextlib.contextmanager
def _problem(*, final: bool, name: str) -> Iterator[None]:
    """A header that ends too early is no error before all of it has been asked for."""
    try:
        yield
    except ModelFileError as error:
        if final or error.field in ("magic", "version"):
            raise ModelFileRejected(f"{name}: {error.field or 'file'}: {error.problem}") from error


def largest_that_fits(choices: tuple[Choice, ...], fits: Callable[[int], bool]) -> str:
    """Label of the largest model of a repository of which `fits` says, given its bytes, that it fits; empty when none does."""
    for choice in sorted(choices, key=lambda one: one.size, reverse=True):
        if choice.size and fits(choice.size):
            return choice.label
    return ""
