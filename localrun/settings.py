"""Every setting of the daemon, in one table: the environment variable, the type, the default, what it does.

`Settings.from_env` is the only reader of the environment for settings. Each row reads `LOCALRUN_X` and, where Ollama has the same setting,
`OLLAMA_X` after it; quotes and spaces around a value are dropped and an empty value counts as unset, as there. A value that cannot be used
stops the start with one line that names the variable. What a setting makes the daemon do is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from localrun.durations import parse_duration, parse_keep_alive
from localrun.errors import LocalrunError
from localrun.rates import parse_rate

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 11434
KV_CACHE_TYPES = ("f16", "bf16", "q8_0", "q4_0")
CLIENT_VARIABLES = {
    "LOCALRUN_STATE", "LOCALRUN_NOHISTORY", "OLLAMA_NOHISTORY", "LOCALRUN_API_KEY", "OLLAMA_API_KEY", "OLLAMA_EDITOR"
}  # fmt: skip
"""Of the terminal program and of Ollama's, which a daemon started by it inherits."""
INSTRUCTION_SETS = ("amx", "avx512", "avxvnni", "avx2", "neon", "generic")
"""Names of kernels_cpu/isa.py, which knows what each is and whether this machine has it."""


class BadSetting(LocalrunError):
    """A setting's value cannot be used; the message names the variable."""

    code = "bad_setting"


class Row(NamedTuple):
    """One line of the table that `serve --help` and the documentation print."""

    name: str
    variables: tuple[str, ...]
    type: str
    here: str
    """The default on this machine."""
    default: str
    """The default, as it can be said of any machine."""
    description: str


class Address(NamedTuple):
    """What LOCALRUN_HOST can say."""

    scheme: str
    host: str
    port: int
    path: str


def parse_address(text: str) -> Address:
    """`[scheme://]host[:port][/path]`, host as a name, an IPv4 or an IPv6 address (in brackets where a port follows).

    Without a port: 11434, or 80 and 443 where a scheme is written. Without a host (`:8080`): loopback; every interface is `0.0.0.0`.
    Raises ValueError with one line.
    """
    scheme, found, rest = text.strip().partition("://")
    if not found:
        scheme, rest = "", text.strip()
    if scheme not in ("", "http", "https"):
        raise ValueError(f"scheme {scheme!r} is not http or https")
    location, _, path = rest.partition("/")
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", location)
    if bracketed:
        host, port_text = bracketed[1], bracketed[2]
    elif location.count(":") > 1:
        host, port_text = location, None
    else:
        host, colon, after = location.partition(":")
        port_text = after if colon else None
    if port_text is None:
        port = {"http": 80, "https": 443}.get(scheme, DEFAULT_PORT)
    elif port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535:
        port = int(port_text)
    else:
        raise ValueError(f"port {port_text!r} is not a number from 0 to 65535")
    if host and not re.fullmatch(r"[A-Za-z0-9_.:%-]+", host):
        raise ValueError(f"host {host!r} holds characters that no host name has")
    return Address(scheme or "http", host or DEFAULT_HOST, port, f"/{path}" if path else "")


def _bind(text: str) -> tuple[str, int]:
    address = parse_address(text)
    if address.scheme == "https":
        raise ValueError("the daemon speaks plain HTTP; leave out https:// (a proxy in front of it can add TLS)")
    if address.path.strip("/"):
        raise ValueError(f"the daemon serves at the root; leave out the path {address.path!r}")
    return address.host, address.port


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "t", "true", "yes", "y", "on"):
        return True
    if lowered in ("0", "f", "false", "no", "n", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false (1 or 0)")


def _debug(text: str) -> bool:
    # Ollama has a second level, "2"; here there is one
    return True if text == "2" else _flag(text)


def _seconds(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 0:
        raise ValueError(f"{text!r} is negative")
    return seconds


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def _folder(text: str) -> Path:
    if "\0" in text:
        raise ValueError("a path cannot hold NUL")
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{text!r} is not an absolute path")
    return path


def _web_address(text: str) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9_.:\[\]-]+(/[^\s?#]*)?", text):
        raise ValueError(f"{text!r} is no address of the form https://host")
    return text.rstrip("/")


def _kv_type(text: str) -> str:
    if text.lower() not in KV_CACHE_TYPES:
        raise ValueError(f"{text!r} is not one of {', '.join(KV_CACHE_TYPES)}")
    return text.lower()


def _isa(text: str) -> str:
    if text.lower() not in INSTRUCTION_SETS:
        raise ValueError(f"{text!r} is not one of {', '.join(INSTRUCTION_SETS)}")
    return text.lower()


def _about(names: str, kind: str, description: str, parse: Callable[[str], Any], shown: str = "") -> dict[str, Any]:
    """What makes a field of `Settings` a row of the table: `names` are the variables, the first one goes first."""
    return {"variables": tuple(names.split()), "type": kind, "description": description, "parse": parse, "shown": shown}


def _data_folder() -> Path:
    return platformdirs.user_data_path("localrun", appauthor=False) / "models"


def _cache_folder() -> Path:
    return platformdirs.user_cache_path("localrun", appauthor=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times are seconds. Made by `from_env`, or directly in tests; nobody changes one."""

    host: str = field(default=DEFAULT_HOST, metadata=_about(
        "LOCALRUN_HOST OLLAMA_HOST", "[http://]host[:port]",
        "Address to listen on. Without a port 11434, or 80 where http:// is written; 0.0.0.0 or [::] means every interface.",
        _bind, f"{DEFAULT_HOST}:{DEFAULT_PORT}"))
    port: int = DEFAULT_PORT
    """Read from LOCALRUN_HOST, as `host`; 0 lets the system choose."""
    models: Path = field(default_factory=_data_folder, metadata=_about(
        "LOCALRUN_MODELS OLLAMA_MODELS", "folder",
        "Where models are kept. A folder of Ollama's can be used as it is.",
        _folder, "localrun/models in the user's data folder"))
    cache: Path = field(default_factory=_cache_folder, metadata=_about(
        "LOCALRUN_CACHE", "folder",
        "Compiled kernels, built tokenizers, saved conversations. Can be deleted while nothing runs.",
        _folder, "localrun in the user's cache folder"))
    keep_alive: float = field(default=300.0, metadata=_about(
        "LOCALRUN_KEEP_ALIVE OLLAMA_KEEP_ALIVE", "duration",
        "How long a model stays loaded after its last request: 5m, 1h30m, seconds; 0 unloads at once, a negative value never.",
        parse_keep_alive, "5m"))
    load_timeout: float = field(default=300.0, metadata=_about(
        "LOCALRUN_LOAD_TIMEOUT OLLAMA_LOAD_TIMEOUT", "duration",
        "How long loading may go without progress before it is given up; 0 waits for ever.",
        _seconds, "5m"))
    max_queue: int = field(default=512, metadata=_about(
        "LOCALRUN_MAX_QUEUE OLLAMA_MAX_QUEUE", "number",
        "Requests that may wait; one more is answered 503.",
        _whole(1), "512"))
    max_loaded_models: int = field(default=3, metadata=_about(
        "LOCALRUN_MAX_LOADED_MODELS OLLAMA_MAX_LOADED_MODELS", "number",
        "Models in memory at once; the least recently used idle one makes room. 0 means the default.",
        lambda text: _whole(0)(text) or 3, "3"))
    num_parallel: int = field(default=0, metadata=_about(
        "LOCALRUN_NUM_PARALLEL OLLAMA_NUM_PARALLEL", "number",
        "Requests one model answers at the same time; 0 leaves it to the memory there is.",
        _whole(0), "0"))
    context_length: int = field(default=0, metadata=_about(
        "LOCALRUN_CONTEXT_LENGTH OLLAMA_CONTEXT_LENGTH", "number",
        "Context of a request that does not set num_ctx; 0 means the model's own, as far as memory allows.",
        _whole(0), "0"))
    kv_cache_type: str = field(default="f16", metadata=_about(
        "LOCALRUN_KV_CACHE_TYPE OLLAMA_KV_CACHE_TYPE", " | ".join(KV_CACHE_TYPES),
        "Number format of the KV cache.",
        _kv_type, "f16"))
    session_size: int = field(default=4096, metadata=_about(
        "LOCALRUN_SESSION_SIZE", "MiB",
        "What K/V of conversations (option session) may take on disk; those used least lately go. 0: none are kept.",
        _whole(0), "4096"))
    num_thread: int = field(default=0, metadata=_about(
        "LOCALRUN_NUM_THREAD", "number",
        "Threads a model writes with, one token at a time; 0 means the physical cores this process may use, or fewer where timing says "
        "that memory is busy before all of them are.",
        _whole(0, 4096), "0"))
    num_thread_batch: int = field(default=0, metadata=_about(
        "LOCALRUN_NUM_THREAD_BATCH", "number",
        "Threads a model reads prompts and serves several answers at once with; 0 means as many as for one token.",
        _whole(0, 4096), "0"))
    tune: bool = field(default=True, metadata=_about(
        "LOCALRUN_TUNE", "true | false",
        "Whether ways to multiply matrices are timed on this processor, once, in an idle moment after a model was loaded. No answer "
        "depends on them.",
        _flag, "true"))
    gpu_layers: int = field(default=-1, metadata=_about(
        "LOCALRUN_GPU_LAYERS", "number",
        "Layers of a model to put on NVIDIA cards, the first ones (option num_gpu); -1 means as many as fit, 0 none.",
        _whole(-1, 100_000), "-1"))
    isa: str = field(default="", metadata=_about(
        "LOCALRUN_ISA", " | ".join(INSTRUCTION_SETS),
        "Instruction set that kernels are compiled for; unset means the best one of this machine.",
        _isa, "none"))
    origins: tuple[str, ...] = field(default=(), metadata=_about(
        "LOCALRUN_ORIGINS OLLAMA_ORIGINS", "list",
        "Web origins, beside those of this machine, whose pages may call the API; separated by commas, * stands for anything.",
        _words, "none"))
    hosts: tuple[str, ...] = field(default=(), metadata=_about(
        "LOCALRUN_HOSTS", "list",
        "Names by which this machine is addressed, beside its own: of a proxy, of a container; separated by commas, * stands for anything.",
        _words, "none"))
    api_keys: tuple[str, ...] = field(default=(), metadata=_about(
        "LOCALRUN_API_KEYS", "list",
        "Where set, every request must carry one of these keys as `Authorization: Bearer KEY`; separated by commas.",
        _words, "none"))
    idle_exit: float = field(default=0.0, metadata=_about(
        "LOCALRUN_IDLE_EXIT", "duration",
        "The daemon ends itself after so long without a request or a loaded model in use; 0 means never.",
        _seconds, "0"))
    noprune: bool = field(default=False, metadata=_about(
        "LOCALRUN_NOPRUNE OLLAMA_NOPRUNE", "flag",
        "Do not remove, at the start, blobs that no model needs.",
        _flag, "false"))
    hf_token: str = field(default="", repr=False, metadata=_about(
        "LOCALRUN_HF_TOKEN HF_TOKEN HUGGING_FACE_HUB_TOKEN", "token",
        "Sent to Hugging Face, and to nobody else, for models of hf.co that are private or gated.",
        str, "none"))
    hf_endpoint: str = field(default="https://huggingface.co", metadata=_about(
        "LOCALRUN_HF_ENDPOINT HF_ENDPOINT", "address",
        "Where models of hf.co are fetched: Hugging Face, or a mirror of it.",
        _web_address, "https://huggingface.co"))
    pull_rate: int = field(default=0, metadata=_about(
        "LOCALRUN_PULL_RATE", "bytes a second",
        "Bandwidth that all pulls together may take, as in 5M or 800k; 0 sets no bound. It does not hold for what comes through pip.",
        parse_rate, "0"))
    overcommit: bool = field(default=False, metadata=_about(
        "LOCALRUN_OVERCOMMIT", "flag",
        "Load models that memory is too small for: their weights are then read from disk again and again.",
        _flag, "false"))
    log_requests: bool = field(default=False, metadata=_about(
        "LOCALRUN_LOG_REQUESTS OLLAMA_DEBUG_LOG_REQUESTS", "flag",
        "Log what clients send, prompts and all; by itself the log says of a request how it went and not what was in it.",
        _flag, "false"))
    debug: bool = field(default=False, metadata=_about(
        "LOCALRUN_DEBUG OLLAMA_DEBUG", "flag",
        "Log more.",
        _debug, "false"))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """The settings that `environ` (os.environ) describes. Raises BadSetting naming the variable whose value cannot be used."""
        values: dict[str, Any] = {}
        for setting in fields(cls):
            for variable in setting.metadata.get("variables", ()):
                text = environ.get(variable, "").strip().strip("\"'").strip()
                if not text:
                    continue
                try:
                    value = setting.metadata["parse"](text)
                except ValueError as error:
                    raise BadSetting(f"{variable}: {error}") from None
                if setting.name == "host":
                    values["host"], values["port"] = value
                else:
                    values[setting.name] = value
                break
        return cls(**values)

    @classmethod
    def strangers(cls, environ: Mapping[str, str]) -> list[str]:
        """Variables that look like settings, of ours or of Ollama's, and are none: a typing error, or something that is not there."""
        known = {variable for setting in fields(cls) for variable in setting.metadata.get("variables", ())} | CLIENT_VARIABLES
        return sorted(name for name in environ if name.startswith(("LOCALRUN_", "OLLAMA_")) and name not in known and environ[name].strip())

    @classmethod
    def table(cls) -> list[Row]:
        """A row for each setting, in the order of declaration. Defaults are shown as a person would write them, folders under ~."""
        rows = []
        for setting in fields(cls):
            if not setting.metadata:
                continue
            about = setting.metadata
            here = about["shown"] if setting.default_factory is MISSING else _under_home(setting.default_factory())
            rows.append(Row(setting.name, about["variables"], about["type"], here, about["shown"], about["description"]))
        return rows


def _under_home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    except ValueError:
        return str(path)
