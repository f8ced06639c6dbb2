"""The few settings the terminal program has of its own: where the daemon is, where history and logs go. Reads os.environ; the daemon's
settings are in localrun/settings.py, which this program does not know.

    LOCALRUN_HOST        where the daemon listens; OLLAMA_HOST is read when it is not set
    LOCALRUN_STATE       folder of the history and of the log of a daemon that was started by this program
    LOCALRUN_NOHISTORY   1: lines typed in a chat are not written down (OLLAMA_NOHISTORY too)
    LOCALRUN_API_KEY     sent as a bearer token (OLLAMA_API_KEY too)
    NO_COLOR             1: no colours; TERM=dumb: nothing but text
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_PORT = 11434
IDLE_EXIT_SECONDS = 600
FOLDERS = ("LOCALRUN_MODELS", "OLLAMA_MODELS", "LOCALRUN_CACHE", "LOCALRUN_STATE")
"""Settings that are paths: made absolute for a daemon that is started elsewhere."""


class BadAddress(ValueError):
    """`str(error)` is the line to show."""


@dataclass(frozen=True)
class Address:
    """Where the daemon is."""

    scheme: str
    host: str
    port: int
    path: str
    explicit: bool
    """Whether a person named it, rather than it being the default."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def here(self) -> bool:
        """Whether it is this machine's loopback, where a daemon can be started."""
        return self.scheme == "http" and (self.host in ("localhost", "::1") or self.host.startswith("127."))


def parse_address(text: str, variable: str = "LOCALRUN_HOST") -> Address:
    """`host`, `host:port`, `:port`, `[v6]:port`, a URL. A scheme without a port means that scheme's port, as in Ollama.

    An address to listen on everywhere (0.0.0.0, ::) is reached through loopback. Raises BadAddress.
    """
    text = text.strip().strip("\"'").strip()
    if not text:
        return Address("http", "127.0.0.1", DEFAULT_PORT, "", explicit=False)
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "http", text
    if scheme not in ("http", "https"):
        raise BadAddress(f"{variable}={text}: the scheme is {scheme!r}; http or https is needed")
    if not rest.startswith("[") and rest.split("/")[0].count(":") > 1:
        host, _, path = rest.partition("/")
        rest = f"[{host}]" + (f"/{path}" if path else "")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        port = parts.port
    except ValueError as error:
        raise BadAddress(f"{variable}={text}: no address of the form host:port ({error})") from None
    if port is None:
        port = DEFAULT_PORT if not separator else (443 if scheme == "https" else 80)
    if port == 0:
        raise BadAddress(f"{variable}={text}: port 0 cannot be connected to")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "")
    return Address(scheme, host, port, parts.path.rstrip("/"), explicit=True)


def address() -> Address:
    """Where LOCALRUN_HOST or OLLAMA_HOST say that the daemon is. Raises BadAddress."""
    for variable in ("LOCALRUN_HOST", "OLLAMA_HOST"):
        value = os.environ.get(variable, "")
        if value.strip():
            return parse_address(value, variable)
    return parse_address("")


def api_key() -> str | None:
    return os.environ.get("LOCALRUN_API_KEY") or os.environ.get("OLLAMA_API_KEY") or None


def keeps_history() -> bool:
    """Whether lines typed in a chat may be written to the history file."""
    values = (os.environ.get(name, "").strip().lower() for name in ("LOCALRUN_NOHISTORY", "OLLAMA_NOHISTORY"))
    return all(value in ("", "0", "false", "no", "off") for value in values)


def is_dumb() -> bool:
    """Whether the terminal says of itself that it only prints."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def state_folder() -> Path:
    """Made when it is missing."""
    named = os.environ.get("LOCALRUN_STATE", "").strip()
    if named:
        folder = Path(named).expanduser().absolute()
    else:
        import platformdirs

        folder = Path(platformdirs.user_state_dir("localrun", appauthor=False))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def for_daemon(package_root: Path, idle_exit: float = IDLE_EXIT_SECONDS) -> dict[str, str]:
    """The environment of a daemon that does not run in this folder: paths made absolute, the package found again, and an end after
    `idle_exit` idle seconds unless a person set another."""
    environment = {"LOCALRUN_IDLE_EXIT": str(idle_exit), **os.environ}
    for name in FOLDERS:
        if environment.get(name):
            environment[name] = str(Path(environment[name]).expanduser().absolute())
    paths = [str(package_root), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def for_serving(host: str) -> dict[str, str]:
    """What a daemon in this process reads its settings from; `host` goes before the environment."""
    return {**os.environ, "LOCALRUN_HOST": host} if host else dict(os.environ)
