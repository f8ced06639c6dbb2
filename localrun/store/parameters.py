"""Parameters that a model can carry: their names and types, and how a Modelfile's text becomes a value and back.

What they do is decided where requests are answered.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from localrun.errors import BadRequest

Kind = Literal["int", "float", "bool", "string", "strings"]

KINDS: dict[str, Kind] = {
    "num_ctx": "int", "num_batch": "int", "num_gpu": "int", "gpu_layers": "int", "main_gpu": "int", "use_mmap": "bool", "num_thread": "int",
    "num_thread_batch": "int",
    "num_keep": "int", "num_predict": "int", "draft_num_predict": "int", "draft": "string",
    "draft_rule": "string", "session": "bool", "num_beams": "int",
    "length_penalty": "float", "kv_cache_type": "string", "seed": "int", "stop": "strings",
    "temperature": "float", "top_k": "int", "top_p": "float", "min_p": "float", "typical_p": "float",
    "repeat_last_n": "int", "repeat_penalty": "float", "presence_penalty": "float", "frequency_penalty": "float",
    "top_n_sigma": "float", "xtc_probability": "float", "xtc_threshold": "float", "mirostat": "int", "mirostat_tau": "float",
    "mirostat_eta": "float", "dry_multiplier": "float", "dry_base": "float", "dry_allowed_length": "int", "dry_penalty_last_n": "int",
    "dry_sequence_breakers": "strings", "banned_strings": "strings", "ignore_eos": "bool",
    "adapter_scale": "float",
}  # fmt: skip

DEPRECATED = frozenset({
    "tfs_z", "penalize_newline", "low_vram", "f16_kv", "vocab_only", "use_mlock", "numa", "logits_all",
})  # fmt: skip
"""Names that old Modelfiles have and no engine obeys any more; a create drops them and says so."""

_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "text", "strings": "text or a list of texts"}
_INT = re.compile(r"[+-]?[0-9]{1,19}\Z")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\Z")
_TRUE, _FALSE = ("1", "t", "true"), ("0", "f", "false")


def from_text(name: str, text: str) -> Any:
    """The value of a Modelfile's `PARAMETER name text`; of `stop` one string of the list. Raises BadRequest."""
    kind = _kind(name)
    stripped = text.strip()
    if kind == "int":
        if not _INT.match(stripped):
            raise BadRequest(f"invalid int value [{text}] of parameter {name}", param=name)
        return checked(name, int(stripped))
    if kind == "float":
        if not _FLOAT.match(stripped):
            raise BadRequest(f"invalid float value [{text}] of parameter {name}", param=name)
        return checked(name, float(stripped))
    if kind == "bool":
        if stripped.lower() not in _TRUE + _FALSE:
            raise BadRequest(f"invalid bool value [{text}] of parameter {name}", param=name)
        return stripped.lower() in _TRUE
    return text


def checked(name: str, value: Any) -> Any:
    """`value`, from JSON, as the type that parameter `name` has. Raises BadRequest naming both."""
    kind = _kind(name)
    if kind == "strings":
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return list(texts)
    elif kind == "string":
        if isinstance(value, str):
            return value
    elif kind == "bool":
        if isinstance(value, bool):
            return value
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value)):
        if kind == "int" and value == int(value) and -(2**63) <= value < 2**63:
            return int(value)
        if kind == "float" and abs(value) < 1e308:
            return float(value)
    raise BadRequest(f'parameter "{name}" must be {_WORDS[kind]}, not {str(value)[:60]!r}', param=name)


def to_texts(value: Any) -> list[str]:
    """What a Modelfile's PARAMETER lines say for `value`: one line each."""
    if isinstance(value, list):
        return [text for one in value for text in to_texts(one)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    return [value if isinstance(value, str) else repr(value)]


def _kind(name: str) -> Kind:
    kind = KINDS.get(name)
    if kind is None:
        raise BadRequest(f"unknown parameter '{name}'; known are {', '.join(sorted(KINDS))}", param=name)
    return kind
