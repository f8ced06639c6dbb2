"""The values that Go templates work on, and the functions that every one may call: what is true, equal, printed, counted, cut.

Go's kinds are Python's: None is nil, list a slice, dict a map with text keys; a struct is a `Record`. Knows no syntax and no template.
Behaviour: https://pkg.go.dev/text/template and https://pkg.go.dev/fmt
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import quote_plus

LONGEST = 4_000_000
"""Characters that one function may return, and that a template may write."""


class GoError(Exception):
    """An evaluation failed; one line without the place, which the template adds."""


class Record:
    """A struct: has just these fields, is always true. `plain` is its JSON; where `shows` it prints as that."""

    def __init__(self, fields: Mapping[str, Any], plain: Any, shows: bool = False) -> None:
        self.fields = fields
        self.plain = plain
        self.shows = shows


class ShownList(list[Any]):
    """A slice that prints as JSON."""

    plain: Any = None


class ShownDict(dict[str, Any]):
    """A map that prints as JSON."""

    plain: Any = None


class ShownText(ShownList):
    """A slice of type names that prints as the one it holds, where it holds one."""


def to_json(value: Any) -> str:
    """Compact JSON as Go writes it: <, > and & are escaped, keys stay in their order."""
    if isinstance(value, Record) or (isinstance(value, (ShownList, ShownDict)) and value.plain is not None):
        return to_json(value.plain)
    if isinstance(value, list):
        return "[" + ",".join(to_json(one) for one in value) + "]"
    if isinstance(value, dict):
        # a Go map's keys come sorted
        keys = list(value) if type(value) is not dict else sorted(value)
        return "{" + ",".join(f"{to_json(key)}:{to_json(value[key])}" for key in keys) + "}"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise GoError(f"json: unsupported value: {_float(value)}")
        text = _float(value, -6)
        return re.sub(r"e-0([0-9])$", r"e-\1", text)
    text = json.dumps(value, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def true(value: Any) -> bool:
    """Go's truth: zero numbers, empty texts and collections, nil and false are not."""
    return True if isinstance(value, Record) else bool(value)


def type_name(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "float64", str: "string"}
    if value is None:
        return "<nil>"
    if isinstance(value, Record):
        return "struct"
    if isinstance(value, dict):
        return "map[string]interface {}"
    return names.get(type(value), "[]interface {}")


def shown(value: Any, nil: str = "<nil>") -> str:
    """`value` as Go's %v prints it."""
    if value is None:
        return nil
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Record):
        return to_json(value) if value.shows else "{" + " ".join(shown(one) for one in value.fields.values()) + "}"
    if isinstance(value, ShownText):
        return str(value[0]) if len(value) == 1 else "[" + " ".join(value) + "]" if value else ""
    if isinstance(value, (ShownList, ShownDict)):
        return to_json(value)
    if isinstance(value, list):
        return "[" + " ".join(shown(one) for one in value) + "]"
    if isinstance(value, dict):
        return "map[" + " ".join(f"{key}:{shown(value[key])}" for key in sorted(value)) + "]"
    return str(value)


def _float(value: float, least: int = -4) -> str:
    """The shortest text that reads back, with an exponent below 10^least and from 1e21."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    text = "".join(map(str, digits)).lstrip("0").rstrip("0")
    if not text:
        return "-0" if sign else "0"
    point = len("".join(map(str, digits)).lstrip("0")) + int(exponent)
    if not least <= point - 1 < 21:
        head = text[0] + (f".{text[1:]}" if len(text) > 1 else "")
        found = f"{head}e{'-' if point - 1 < 0 else '+'}{abs(point - 1):02}"
    elif point <= 0:
        found = "0." + "0" * -point + text
    elif point >= len(text):
        found = text + "0" * (point - len(text))
    else:
        found = f"{text[:point]}.{text[point:]}"
    return ("-" if sign else "") + found


# ---- comparing ------------------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    for kind, types in (("bool", bool), ("int", int), ("float", float), ("string", str)):
        if isinstance(value, types):
            return kind
    return "nil" if value is None else "other"


def _equal(first: Any, *others: Any) -> bool:
    if not others:
        raise GoError("missing argument for comparison")
    for other in others:
        one, two = _kind(first), _kind(other)
        if "nil" in (one, two):
            if one == two:
                return True
            continue
        if "other" in (one, two):
            raise GoError(f"non-comparable type {type_name(first if one == 'other' else other)}")
        if one != two:
            raise GoError("incompatible types for comparison")
        if first == other:
            return True
    return False


def _not_equal(first: Any, second: Any) -> bool:
    return not _equal(first, second)


def _less(first: Any, second: Any) -> bool:
    one, two = _kind(first), _kind(second)
    if one in ("nil", "other", "bool") or two in ("nil", "other", "bool"):
        raise GoError("invalid type for comparison")
    if one != two:
        raise GoError("incompatible types for comparison")
    result: bool = first < second
    return result


# ---- collections ----------------------------------------------------------------------------------------------------------------


def _len(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, (list, dict)):
        return len(value)
    raise GoError(f"len of {'nil pointer' if value is None else f'type {type_name(value)}'}")


def _position(index: Any, length: int, inclusive: bool) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise GoError(f"cannot index slice/array with {'nil' if index is None else f'type {type_name(index)}'}")
    if not 0 <= index < length + inclusive:
        raise GoError(f"index out of range: {index}")
    return index


def _index(value: Any, *keys: Any) -> Any:
    if value is None:
        raise GoError("index of untyped nil")
    for key in keys:
        if isinstance(value, str):
            data = value.encode()
            value = data[_position(key, len(data), False)]
        elif isinstance(value, list):
            value = value[_position(key, len(value), False)]
        elif isinstance(value, dict):
            if not isinstance(key, str):
                raise GoError(f"value has type {type_name(key)}; should be string")
            value = value.get(key)
        else:
            raise GoError(f"can't index item of type {type_name(value)}")
    return value


def _slice(value: Any, *bounds: Any) -> Any:
    if not isinstance(value, (str, list)):
        raise GoError("slice of untyped nil" if value is None else f"can't slice item of type {type_name(value)}")
    if len(bounds) > (2 if isinstance(value, str) else 3):
        raise GoError("cannot 3-index slice a string" if isinstance(value, str) else f"too many slice indexes: {len(bounds)}")
    data: Any = value.encode() if isinstance(value, str) else value
    places = [_position(bound, len(data), True) for bound in bounds]
    if places != sorted(places):
        raise GoError(f"invalid slice index: {places[0]} > {places[1]}")
    cut = data[slice(*places[:2])] if len(places) > 1 else data[places[0] if places else 0 :]
    return cut.decode("utf-8", errors="replace") if isinstance(cut, bytes) else list(cut)


# ---- printing -------------------------------------------------------------------------------------------------------------------


def _print(*values: Any) -> str:
    # a space goes between two values of which neither is text
    text = ""
    for number, value in enumerate(values):
        if number and not isinstance(value, str) and not isinstance(values[number - 1], str):
            text += " "
        text += shown(value)
    return text


def _println(*values: Any) -> str:
    return " ".join(shown(value) for value in values) + "\n"


_VERB = re.compile(r"%(?P<flags>[-+# 0]*)(?P<width>[0-9]*)(?:\.(?P<precision>[0-9]*))?(?P<verb>.)?", re.DOTALL)


def _printf(form: Any, *values: Any) -> str:
    if not isinstance(form, str):
        raise GoError(f"wrong type for value; expected string; got {type_name(form)}")
    rest = list(values)

    def one(found: re.Match[str]) -> str:
        verb = found["verb"]
        if verb is None:
            return "%!(NOVERB)"
        if verb == "%":
            return "%"
        if not rest:
            return f"%!{verb}(MISSING)"
        width = int(found["width"] or 0)
        if width > 10_000 or int(found["precision"] or 0) > 10_000:
            raise GoError("printf: width or precision over 10000")
        precision = None if found["precision"] is None else int(found["precision"] or 0)
        return _formatted(verb, rest.pop(0), found["flags"], width, precision)

    text = _VERB.sub(one, form)
    if rest:
        text += "%!(EXTRA " + ", ".join(f"{type_name(value)}={shown(value)}" for value in rest) + ")"
    return text


def _formatted(verb: str, value: Any, flags: str, width: int, precision: int | None) -> str:
    """One value under one verb; of collections, each element is formatted so."""

    def inner(one: Any) -> str:
        return _formatted(verb, one, flags, width, precision)

    if verb != "T" and type(value) is list:
        return "[" + " ".join(inner(one) for one in value) + "]"
    if verb != "T" and type(value) is dict:
        return "map[" + " ".join(f"{inner(key)}:{inner(value[key])}" for key in sorted(value)) + "]"
    text = _verb(verb, value, flags, precision)
    if text.startswith("%!"):
        return text
    if "-" in flags:
        return text.ljust(width)
    if "0" in flags and text[:1] in ("-", "+"):
        return text[0] + text[1:].rjust(width - 1, "0")
    return text.rjust(width, "0" if "0" in flags else " ")


def _quote(text: str, mark: str = '"') -> str:
    """`text` as a Go literal."""
    named = {"\a": "a", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v", "\\": "\\", mark: mark}

    def one(character: str) -> str:
        code = ord(character)
        if character in named:
            return "\\" + named[character]
        if character.isprintable():
            return character
        return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return mark + "".join(one(character) for character in text) + mark


def _verb(verb: str, value: Any, flags: str, precision: int | None) -> str:
    plus = "+" if "+" in flags else " " if " " in flags else ""
    number = isinstance(value, int) and not isinstance(value, bool)
    if verb == "v":
        if "#" in flags and isinstance(value, str):
            return _quote(value)
        return (plus if (number or isinstance(value, float)) and value >= 0 else "") + shown(value)
    if verb == "T":
        return type_name(value)
    if verb == "t" and isinstance(value, bool):
        return shown(value)
    if verb in "sq" and isinstance(value, (str, Record, ShownList, ShownDict)):
        text = shown(value)[:precision]
        return text if verb == "s" else _quote(text)
    if verb in "xX" and isinstance(value, str):
        text = value.encode().hex()
        return text.upper() if verb == "X" else text
    if number and verb in "dboxXcUq":
        if verb in "cUq":
            if not 0 <= value <= 0x10FFFF:
                return "\ufffd"
            return {"c": chr(value), "U": f"U+{value:04X}", "q": _quote(chr(value), "'")}[verb]
        prefix = {"x": "0x", "X": "0X", "o": "0", "b": "0b"}.get(verb, "") if "#" in flags else ""
        digits = format(abs(value), verb)
        return ("-" if value < 0 else plus) + prefix + digits.rjust(precision or 0, "0")
    if isinstance(value, float) and verb in "eEfFgG":
        text = _float(value) if verb in "gG" and precision is None else format(value, f".{6 if precision is None else precision}{verb}")
        return (plus if value >= 0 else "") + text
    return f"%!{verb}({type_name(value)}={shown(value)})" if value is not None else f"%!{verb}(<nil>)"


def _text(values: tuple[Any, ...]) -> str:
    return _print(*("<no value>" if value is None else value for value in values))


_HTML = {"\0": "\ufffd", '"': "&#34;", "'": "&#39;", "&": "&amp;", "<": "&lt;", ">": "&gt;"}
_JS = {"\\": "\\\\", "'": "\\'", '"': '\\"', "<": "\\u003C", ">": "\\u003E", "&": "\\u0026", "=": "\\u003D"}


def _html(*values: Any) -> str:
    return "".join(_HTML.get(character, character) for character in _text(values))


def _js(*values: Any) -> str:
    def one(character: str) -> str:
        if character in _JS:
            return _JS[character]
        return character if character.isprintable() else f"\\u{ord(character):04X}"

    return "".join(one(character) for character in _text(values))


def _urlquery(*values: Any) -> str:
    return quote_plus(_text(values), safe="~")


def _call(*values: Any) -> Any:
    raise GoError("call of a value that is no function")


# ---- what Ollama adds -----------------------------------------------------------------------------------------------------------

_TYPESCRIPT = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean", "array": "any[]", "object": "Record<string, any>",
    "null": "null",
}  # fmt: skip


def _typescript(value: Any) -> str:
    """The TypeScript type of a tool's parameter, which is a JSON schema."""
    schema = value.plain if isinstance(value, Record) else value
    if not isinstance(schema, dict):
        raise GoError(f"toTypeScriptType of type {type_name(value)}")
    if schema.get("anyOf"):
        names = [name for one in schema["anyOf"] for name in _typescript(one).split(" | ")]
    else:
        kinds = schema.get("type") or []
        names = [_TYPESCRIPT.get(kind, "any") for kind in ([kinds] if isinstance(kinds, str) else kinds)] or ["any"]
    return " | ".join(dict.fromkeys(names))


def functions(now: datetime) -> dict[str, tuple[Callable[..., Any], int, int]]:
    """Every function by name, with the fewest and the most arguments it takes (-1: any number). `and` and `or`, which look at their
    arguments one by one, are the template's own."""
    return {
        "not": (lambda value: not true(value), 1, 1),
        "eq": (_equal, 1, -1),
        "ne": (_not_equal, 2, 2),
        "lt": (_less, 2, 2),
        "le": (lambda one, two: _less(one, two) or _equal(one, two), 2, 2),
        "gt": (lambda one, two: not (_less(one, two) or _equal(one, two)), 2, 2),
        "ge": (lambda one, two: not _less(one, two), 2, 2),
        "len": (_len, 1, 1),
        "index": (_index, 1, -1),
        "slice": (_slice, 1, -1),
        "print": (_print, 0, -1),
        "println": (_println, 0, -1),
        "printf": (_printf, 1, -1),
        "html": (_html, 0, -1),
        "js": (_js, 0, -1),
        "urlquery": (_urlquery, 0, -1),
        "call": (_call, 1, -1),
        "json": (to_json, 1, 1),
        "currentDate": (lambda *ignored: now.strftime("%Y-%m-%d"), 0, -1),
        "yesterdayDate": (lambda *ignored: (now - timedelta(days=1)).strftime("%Y-%m-%d"), 0, -1),
        "toTypeScriptType": (_typescript, 1, 1),
    }


NAMES = frozenset({*functions(datetime.min + timedelta(days=1)), "and", "or"})
"""Of all functions a template may call."""
