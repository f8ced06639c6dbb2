"""Jinja2 as chat templates expect it, with bounds: a template from an untrusted file can neither reach Python nor run or grow without end.

The environment is the one that `transformers` documents for `apply_chat_template` and that templates are written against: an immutable
sandbox, trimmed blocks, loop controls, `{% generation %}`, `tojson` without HTML escapes, `raise_exception`, `strftime_now`.

Bounds, which work in any thread because nothing depends on signals:
- every pass of a loop and every call of a macro counts, and the clock is looked at now and then (`Limits.steps`, `Limits.seconds`);
- output, and every text a macro or block builds on the way, has a greatest length (`Limits.characters`);
- operators and calls that could make something huge at once (`*`, `**`, `%`, `~`, `ljust`, `replace`, ...) are checked before they run.
Counting is compiled into the template as a node at the head of each body, so it cannot be reached or switched off from inside.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_CLOCK_EVERY = 1024
_WIDTH = re.compile(r"\d{5,}")
"""A field width or precision beyond four digits, in either style of format strings."""
_SIZED = (str, bytes, list, tuple)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may use."""

    steps: int = 5_000_000
    """Passes of loops and calls of macros."""
    seconds: float = 20.0
    characters: int = 8_000_000
    number: int = 1_000_000
    """Greatest integer handed to a function, and most items or characters one operator may make."""
    source: int = 1_000_000
    """Characters of a template."""


LIMITS = Limits()


class LimitExceeded(Exception):
    """A bound was reached. `str(error)` says which."""


class _Run(threading.local):
    """The rendering that is under way in this thread."""

    steps_left: int = 0
    deadline: float = 0.0
    now: datetime | None = None


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The one environment all chat templates are compiled in. Several threads may render at once."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=_checked_tree, extensions=[_Generation, loopcontrols])
        self._run = _Run()
        self.filters.update(_bounded_filters(self.filters))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now
        self.globals.pop("lipsum")  # filler text, of any length

    def begin(self, now: datetime) -> None:
        """Before a rendering in this thread: resets the counters. now: what `strftime_now` formats."""
        self._run.steps_left = LIMITS.steps
        self._run.deadline = time.monotonic() + LIMITS.seconds
        self._run.now = now

    @property
    def step(self) -> str:
        """Compiled into every loop and macro body. Raises LimitExceeded."""
        run = self._run
        run.steps_left -= 1
        if run.steps_left < 0:
            raise LimitExceeded(f"it takes more than {LIMITS.steps:,} loop steps")
        if run.steps_left % _CLOCK_EVERY == 0 and time.monotonic() > run.deadline:
            raise LimitExceeded(f"it takes more than {LIMITS.seconds:g} seconds")
        return ""

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """How compiled templates join what they put out. Raises LimitExceeded."""
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            _check_length(length)
            kept.append(part)
        return "".join(kept)

    def joined(self, parts: list[object]) -> str:
        """The `~` operator. Raises LimitExceeded."""
        return self.concat(str(_checked_tree(part)) for part in parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _check_length(len(left) + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_number(left.bit_length() * right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            values = right if isinstance(right, tuple) else tuple(right.values()) if isinstance(right, dict) else (right,)
            _check_format(left, *values)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _strftime_now(self, form: str) -> str:
        _check_format(form)
        return (self._run.now or datetime.now()).strftime(form)

    def _generate(self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False) -> str:
        _Bounded(self).visit(source)
        return super()._generate(source, name, filename, defer_init)


class _Bounded(NodeTransformer):
    """Puts `environment.step` at the head of every body that can run more than once, and `environment.joined` for the `~` operator."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes)
        return self._placed(nodes.Call(nodes.EnvironmentAttribute("joined"), [parts], [], None, None), node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._placed(nodes.ExprStmt(nodes.EnvironmentAttribute("step")), node.lineno))
        return node

    def _placed(self, node: nodes.Node, lineno: int) -> nodes.Node:
        return node.set_lineno(lineno).set_environment(self._environment)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what an assistant said for training. Here its body is just put out."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_put_out"), [], [], body).set_lineno(lineno)

    def _put_out(self, caller: Callable[[], str]) -> str:
        return caller()


# ---- globals and filters ----


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON as `json.dumps` writes it; Jinja's own filter would escape HTML characters."""
    if isinstance(indent, int):
        _check_number(indent)
    return json.dumps(_checked_tree(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's `join`, with a look at how much that makes."""
    items = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    parts = [str(item) for item in _checked_tree(items)]
    _check_length(sum(map(len, parts)) + len(parts) * len(str(d)))
    return str(d).join(parts)


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's `sum`; lists can be added up too, and then grow."""
    items = list(iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable))
    _check_length(sum(len(item) for item in items if isinstance(item, (list, tuple))))
    return sum(items, start)


def _bounded_filters(filters: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters that can make much out of little, with a check in front."""
    checks: dict[str, Callable[..., object]] = {
        "batch": _check_numbers,
        "center": _check_numbers,
        "slice": _check_numbers,
        "format": _check_format,
        "indent": _check_indent,
        "wordwrap": lambda value, *rest: _check_length(len(str(value)) * max((len(r) for r in rest if isinstance(r, str)), default=1)),
        "replace": lambda value, old, new, *_: _check_replace(str(value), str(old), str(new)),
        "pprint": _checked_tree,
        "string": _checked_tree,
        "xmlattr": _checked_tree,
    }

    def bounded(name: str, check: Callable[..., object]) -> Callable[..., Any]:
        inner = filters[name]
        # What Jinja passes in front by itself (the environment, an evaluation context) is no argument of the template's.
        own = 1 if hasattr(inner, "jinja_pass_arg") else 0

        @wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            check(*args[own:], *kwargs.values())
            return inner(*args, **kwargs)

        return run

    return {name: bounded(name, check) for name, check in checks.items()} | {"join": _join, "sum": _sum, "tojson": _tojson}


# ---- checks: each raises LimitExceeded ----


def _check_length(length: int) -> None:
    if length > LIMITS.characters:
        raise LimitExceeded(f"it makes something of more than {LIMITS.characters:,} characters or items")


def _check_number(number: int) -> None:
    if number > LIMITS.number:
        size = f"of size {number:,}, more than {LIMITS.number:,}" if number < 10**18 else "of a size beyond all bounds"
        raise LimitExceeded(f"it asks for something {size}")


def _check_numbers(*values: object) -> None:
    for value in values:
        if isinstance(value, int):
            _check_number(value)


def _check_format(form: object, *values: object) -> None:
    """For all ways of formatting: `%`, `format`, `strftime`."""
    form = str(form)
    if _WIDTH.search(form) or ("*" in form and "%" in form):
        raise LimitExceeded("it formats to a very large width")
    _check_numbers(*values)
    longest = max((len(value) for value in values if isinstance(value, (str, bytes))), default=0)
    _check_length(len(form) + (form.count("%") + form.count("{")) * longest)


def _check_indent(value: object, width: object = 4, *_: object) -> None:
    _check_numbers(width)
    each = width if isinstance(width, int) else len(str(width))
    text = str(value)
    _check_length(len(text) + (text.count("\n") + 1) * each)


def _check_replace(value: str | bytes, old: Any, new: Any) -> None:
    _check_length(len(value) + value.count(old) * len(new))


def _check_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, _SIZED) and isinstance(times, int):
            _check_number(len(many) * times)


def _check_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Methods of texts that can make much out of little."""
    # The sandbox puts its own function in front of `format`.
    method = getattr(function, "__wrapped__", function)
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, (str, bytes)):
        return
    name = getattr(method, "__name__", "")
    if name in ("center", "ljust", "rjust", "zfill"):
        _check_numbers(*args)
    elif name == "expandtabs":
        tab = args[0] if args and isinstance(args[0], int) else 8
        _check_number(tab * (owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], type(owner)) and isinstance(args[1], type(owner)):
        _check_replace(owner, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_length(sum(len(part) for part in args[0] if isinstance(part, (str, bytes))) + len(owner) * len(args[0]))
    elif name in ("format", "format_map"):
        given = [*args, *kwargs.values()]
        _check_format(owner, *given, *(args[0].values() if name == "format_map" and args and isinstance(args[0], dict) else ()))
    elif name == "translate":
        raise LimitExceeded("it calls translate, which is not supported here")


def _checked_tree(value: Any) -> Any:
    """`value`, after counting what writing it out would visit: a list that holds one list twice, and so on, doubles at each level."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    left = LIMITS.number
    length = 0
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        left -= 1
        if left < 0:
            raise LimitExceeded(f"it writes out a value of more than {LIMITS.number:,} parts")
        if isinstance(item, str):
            length += len(item)
            _check_length(length)
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
    return value
