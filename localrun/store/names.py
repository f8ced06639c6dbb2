"""Names of models, and digests: read, checked, written.

Everything that becomes part of a path passes through here first, so that no name and no digest, whoever sent it, reaches outside the store.
Knows nothing of what is stored.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from localrun.errors import BadRequest

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_LONGEST = {"host": 350, "namespace": 80, "model": 80, "tag": 80}
# \Z, not $: a newline at the end must not pass
_PART = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*\Z"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"),
}
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})\Z")
# device names that Windows gives a meaning in every folder, whatever the extension
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?\Z", re.IGNORECASE)


class InvalidName(BadRequest):
    """A text is no model name. The message begins with the words that clients of this API compare."""


def check_digest(text: str) -> str:
    """`sha256:<64 hex>` for `text`, which may be written with a colon or, as file names are, a hyphen.

    Raises BadRequest for anything else: a short one, upper-case digits, another algorithm, a path.
    """
    found = _DIGEST.match(text) if isinstance(text, str) else None
    if found is None:
        raise BadRequest(f"invalid digest format: {_show(text)} is not sha256: and 64 lower-case hex digits", param="digest")
    return f"sha256:{found[1]}"


@dataclass(frozen=True, order=True)
class Name:
    """A checked name. `scheme` is how to reach the host and no part of a name's identity."""

    host: str
    namespace: str
    model: str
    tag: str
    scheme: str = field(default="https", compare=False)

    @classmethod
    def parse(cls, text: str) -> Name:
        """`[scheme://][host/][namespace/]model[:tag]`, missing parts taken as registry.ollama.ai, library and latest.

        Raises InvalidName, with the part at fault, for anything whose parts hold other characters than their kind allows (letters, digits,
        `_`, `-`; a `.` in hosts, models and tags; a `:` in hosts), do not begin with a letter, a digit or `_`, are empty, or too long.
        """
        if not isinstance(text, str) or not text.strip():
            raise InvalidName("invalid model name: it is empty", param="model")
        scheme, found, rest = text.partition("://")
        if not found:
            scheme, rest = "https", text
        elif scheme not in ("https", "http"):
            raise InvalidName(f"invalid model name: {_show(text)}: scheme {_show(scheme)} is not https or http", param="model")
        front, slash, last = rest.rpartition("/")
        model, colon, tag = last.partition(":")
        host, namespace = DEFAULT_HOST, DEFAULT_NAMESPACE
        if slash:
            host_text, two, namespace = front.rpartition("/")
            if two:
                host = host_text
        name = cls(host, namespace, model, tag if colon else DEFAULT_TAG, scheme)
        for kind in ("host", "namespace", "model", "tag"):
            part = getattr(name, kind)
            if len(part) > _LONGEST[kind]:
                raise InvalidName(f"invalid model name: its {kind} is longer than {_LONGEST[kind]} characters", param="model")
            if not _PART[kind].match(part):
                raise InvalidName(f"invalid model name: {_show(text)}: {kind} {_show(part)} is not allowed", param="model")
            if os.name == "nt" and (_DEVICES.match(part) or part.endswith(".")):
                raise InvalidName(f"invalid model name: {_show(text)}: Windows cannot keep a folder named {_show(part)}", param="model")
        return name

    def __str__(self) -> str:
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    @property
    def short(self) -> str:
        """As people see it: the default host and namespace left out, the tag always there."""
        if self.host != DEFAULT_HOST:
            return str(self)
        if self.namespace != DEFAULT_NAMESPACE:
            return f"{self.namespace}/{self.model}:{self.tag}"
        return f"{self.model}:{self.tag}"

    @property
    def path(self) -> Path:
        """HOST/NAMESPACE/MODEL/TAG, relative to the folder of manifests."""
        host = self.host.replace(":", "%3A") if os.name == "nt" else self.host
        return Path(host, self.namespace, self.model, self.tag)

    @classmethod
    def from_path(cls, path: Path) -> Name:
        """The inverse of `path`. Raises InvalidName for a path of another depth or with parts that no name has."""
        if len(path.parts) != 4:
            raise InvalidName(f"invalid model name: {_show(str(path))} is not HOST/NAMESPACE/MODEL/TAG")
        host, namespace, model, tag = path.parts
        if os.name == "nt":
            host = host.replace("%3A", ":")
        name = cls.parse(f"{host}/{namespace}/{model}:{tag}")
        if name.path != path:
            raise InvalidName(f"invalid model name: {_show(str(path))} is not HOST/NAMESPACE/MODEL/TAG")
        return name

    def same_as(self, other: Name) -> bool:
        """Whether both name one model: letters' case does not count."""
        return str(self).casefold() == str(other).casefold()

    def with_tag(self, tag: str) -> Name:
        return replace(self, tag=tag)


def _show(text: object) -> str:
    """`text` quoted on one line and of bounded length, for an error message."""
    shown = repr(text)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."
