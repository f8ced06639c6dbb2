"""Typed reading of a checkpoint's JSON files: each call says which key, which type and what holds when it is absent.

As models/params.py does for GGUF files; an error is one line with the file, the key and what is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from localrun.models.errors import ModelFileError
from localrun.models.gguf import printable

T = TypeVar("T")
_bool: TypeAlias = bool
_float: TypeAlias = float
_int: TypeAlias = int
_str: TypeAlias = str

MAX_JSON = 256 << 20
"""Bytes. The largest tokenizer.json in use, of 262,144 tokens with their merges, has 33 MB."""
REQUIRED: Final = object()


def read_text(path: Path) -> str:
    """A text file. Raises ModelFileError when it is missing or huge; bytes that are no UTF-8 become U+FFFD."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelFileError(path, "", f"has more than {MAX_JSON >> 20} MiB")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ModelFileError(path, "", f"cannot be read: {error.strerror}") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ModelFileError when it is missing, huge or no JSON."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, "", f"is no JSON: {str(error)[:100]}") from error


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


class Config:
    """The keys of one JSON object. null means absent."""

    def __init__(self, path: Path, values: object, prefix: _str = "") -> None:
        """prefix: where in the file the object is, for messages. Raises ModelFileError when `values` is no object."""
        if not isinstance(values, dict):
            raise ModelFileError(path, prefix.rstrip("."), "is no JSON object")
        self.path = path
        self.values: dict[_str, Any] = values
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path) -> Config:
        return cls(path, read_json(path))

    @classmethod
    def read_if_there(cls, path: Path) -> Config:
        """Of a file that may be missing: without keys then."""
        return cls.read(path) if path.is_file() else cls(path, {})

    def has(self, name: _str) -> _bool:
        return self.values.get(name) is not None

    def error(self, name: _str, problem: _str) -> ModelFileError:
        return ModelFileError(self.path, printable(self._prefix + name), problem)

    def part(self, name: _str) -> Config:
        """An object inside; one without keys when absent."""
        return Config(self.path, self.values.get(name) or {}, f"{self._prefix}{name}.")

    def int(self, name: _str, default: Any = REQUIRED, *, minimum: _int = 0, maximum: _int = 2**31 - 1) -> Any:
        """A whole number in minimum..maximum, or the default."""
        if not self.has(name):
            return self._default(name, default)
        value = self.values[name]
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(name, f"is {printable(repr(value))}, and should be a whole number from {minimum} to {maximum}")
        return value

    def float(self, name: _str, default: Any = REQUIRED, *, above: _float = -math.inf) -> Any:
        """A finite number greater than `above`, or the default."""
        if not self.has(name):
            return self._default(name, default)
        value = self.values[name]
        if not _is_number(value) or value <= above:
            raise self.error(name, f"is {printable(repr(value))}, and should be a number{f' above {above:g}' if above > -math.inf else ''}")
        return float(value)

    def bool(self, name: _str, default: _bool) -> _bool:
        value = self.values[name] if self.has(name) else default
        if type(value) is not bool:
            raise self.error(name, f"is {printable(repr(value))}, and should be true or false")
        return value

    def str(self, name: _str, default: Any = REQUIRED, *, choices: Collection[_str] | None = None) -> Any:
        """A string (with `choices` one of them), or the default."""
        if not self.has(name):
            return self._default(name, default)
        value = self.values[name]
        if not isinstance(value, str):
            raise self.error(name, f"is {printable(repr(value))}, and should be a text")
        if choices is not None and value not in choices:
            raise self.error(name, f"is {printable(repr(value))}; supported: {', '.join(choices)}")
        return value

    def floats(self, name: _str, length: _int) -> list[_float]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
            raise self.error(name, f"should be a list of {length} numbers")
        return [float(one) for one in value]

    def refuse(self, name: _str, why: _str, *, harmless: tuple[Any, ...] = ()) -> None:
        """Raises ModelFileError when the key has a value other than null, false, 0 or a harmless one: it asks for what does not exist."""
        value = self.values.get(name)
        if value and value not in harmless:
            raise self.error(name, f"is {printable(repr(value))}: {why}")

    def _default(self, name: _str, default: Any) -> Any:
        if default is REQUIRED:
            raise self.error(name, "is missing")
        return default
