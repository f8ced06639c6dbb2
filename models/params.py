"""Typed reading of a file's keys: each call says which key, which type, which range, and what holds when it is absent.

    keys = Keys(gguf)                                       # of architecture "llama"
    n_layers = keys.int("block_count", minimum=1)           # llama.block_count, must be there
    n_kv = keys.int("attention.head_count_kv", n_heads)     # the second argument is the default
    base = keys.float("rope.freq_base", 10000.0, above=0)

A key that is missing without a default, of another type or out of range raises ModelFileError: one line with the file, the key and what is
wrong. Defaults are not checked. Nothing here knows which keys an architecture has.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final, TypeAlias, TypeVar

from localrun.models.errors import ModelFileError
from localrun.models.gguf import GGUFFile, printable

T = TypeVar("T")

# Inside Keys these names mean its methods.
_bool: TypeAlias = bool
_float: TypeAlias = float
_int: TypeAlias = int
_str: TypeAlias = str

INT_MAX: Final = 2**31 - 1


class _Required:
    """Stands where a default could: the key must be there."""


REQUIRED: Final = _Required()

_SHARED = ("general.", "tokenizer.", "split.", "quantize.", "xielu.")
"""Roots of keys that carry no architecture before them."""


class Keys:
    """The keys of one file. Names are given without the architecture ("block_count"); general.* and tokenizer.* are whole names."""

    def __init__(self, gguf: GGUFFile, architecture: _str | None = None) -> None:
        """architecture: the prefix to read under; the file's own when None. Raises ModelFileError when the file names none."""
        self.path = gguf.path
        self.architecture = gguf.architecture if architecture is None else architecture
        self._values = gguf.metadata
        self._types = gguf.value_types

    def full(self, name: _str) -> _str:
        """The key's whole name in the file."""
        return name if name.startswith(_SHARED) else f"{self.architecture}.{name}"

    def has(self, name: _str) -> _bool:
        return self.full(name) in self._values

    def error(self, name: _str, problem: _str) -> ModelFileError:
        """For checks that need more than one key: the error to raise, naming the file and the key."""
        return ModelFileError(self.path, printable(self.full(name)), problem)

    def length(self, name: _str, *kinds: _str) -> _int:
        """Items of an array of one of these kinds ("string", "float32" ...), which need not be decoded for it."""
        full = self.full(name)
        if not self.has(name):
            raise self.error(name, "is missing; the model cannot run without it")
        self._check_array(name, kinds)
        return self._values.length(full)

    # ---- single values ----

    def int(self, name: _str, default: T | _Required = REQUIRED, *, minimum: _int = 0, maximum: _int = INT_MAX) -> _int | T:
        """An unsigned 32-bit integer in minimum..maximum."""
        if not self.has(name):
            return self._default(name, default)
        return self._in_range(name, self._typed(name, "uint32"), minimum, maximum)

    def float(self, name: _str, default: T | _Required = REQUIRED, *, above: _float = -math.inf, maximum: _float = math.inf) -> _float | T:
        """A finite 32-bit float, greater than `above` and at most `maximum`."""
        if not self.has(name):
            return self._default(name, default)
        value: _float = self._typed(name, "float32")
        if not math.isfinite(value):
            raise self.error(name, f"is {value}, which is no finite number")
        if value <= above:
            raise self.error(name, f"is {value:g}, but must be greater than {above:g}")
        if value > maximum:
            raise self.error(name, f"is {value:g}, but must be at most {maximum:g}")
        return value

    def bool(self, name: _str, default: T | _Required = REQUIRED) -> _bool | T:
        if not self.has(name):
            return self._default(name, default)
        value: _bool = self._typed(name, "bool")
        return value

    def str(self, name: _str, default: T | _Required = REQUIRED, *, choices: Collection[_str] | None = None) -> _str | T:
        """A string; with `choices`, one of them."""
        if not self.has(name):
            return self._default(name, default)
        value: _str = self._typed(name, "string")
        if choices is not None and value not in choices:
            known = ", ".join(sorted(choices))
            raise self.error(name, f"is {printable(repr(value))}, which is not supported (supported: {known})")
        return value

    # ---- arrays; with `length`, of that many items ----

    def strings(self, name: _str, default: T | _Required = REQUIRED, *, length: _int | None = None) -> list[_str] | T:
        return self._list(name, length, "string") if self.has(name) else self._default(name, default)

    def ints(self, name: _str, default: T | _Required = REQUIRED, *, length: _int | None = None) -> list[_int] | T:
        """Signed or unsigned, 32 bits."""
        return self._list(name, length, "int32", "uint32") if self.has(name) else self._default(name, default)

    def floats(self, name: _str, default: T | _Required = REQUIRED, *, length: _int | None = None) -> list[_float] | T:
        """32 bits; may hold NaN and infinities."""
        return self._list(name, length, "float32") if self.has(name) else self._default(name, default)

    def bools(self, name: _str, default: T | _Required = REQUIRED, *, length: _int | None = None) -> list[_bool] | T:
        return self._list(name, length, "bool") if self.has(name) else self._default(name, default)

    def per_layer(
        self, name: _str, n_layers: _int, default: _int | _Required = REQUIRED, *, minimum: _int = 0, maximum: _int = INT_MAX
    ) -> tuple[_int, ...]:
        """A count that is one number for all layers, or an array with one for each: n_layers ints either way."""
        if not self._types.get(self.full(name), "").startswith("array["):
            return (self.int(name, default, minimum=minimum, maximum=maximum),) * n_layers
        values = self.ints(name)
        if len(values) < n_layers:
            raise self.error(name, f"has {len(values)} items, but {n_layers} layers need one each")
        return tuple(self._in_range(name, value, minimum, maximum) for value in values[:n_layers])

    # ---- what is not supported ----

    def refuse(self, name: _str, why: _str) -> None:
        """Raises ModelFileError if the key has a value other than zero, false or empty: the file asks for what is not implemented."""
        value = self._values.get(self.full(name))
        if value:
            raise self.error(name, f"is {printable(repr(value))}, {why}")

    # ---- how ----

    def _default(self, name: _str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            raise self.error(name, "is missing; the model cannot run without it")
        return default

    def _typed(self, name: _str, kind: _str) -> Any:
        full = self.full(name)
        if self._types[full] != kind:
            raise self.error(name, f"is of type {self._types[full]}, not {kind}")
        return self._values[full]

    def _list(self, name: _str, length: _int | None, *kinds: _str) -> list[Any]:
        self._check_array(name, kinds)
        values: list[Any] = self._values[self.full(name)]
        if length is not None and len(values) != length:
            raise self.error(name, f"has {len(values)} items, but {length} are needed")
        return values

    def _check_array(self, name: _str, kinds: Collection[_str]) -> None:
        kind = self._types[self.full(name)]
        if kind not in [f"array[{k}]" for k in kinds]:
            raise self.error(name, f"is of type {kind}, not an array of {' or '.join(kinds)}")

    def _in_range(self, name: _str, value: _int, minimum: _int, maximum: _int) -> _int:
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise self.error(name, f"is {value}, but must be {bound}")
        return value
