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

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_CLOCK_EVERY = 1024
_WIDTH = re.compile(r"\d{5,}")
"""A field width or precision beyond four digits, in either style of format strings."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may use."""

    steps: int = 5_000_000
    """Passes of loops and calls of macros."""
    seconds: float = 20.0
    characters: int = 32_000_000
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
        self.filters["tojson"] = _tojson
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
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_length(len(left) + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_number(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_call(__obj, args)
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


def _bounded_filters(filters: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The filters that can make much out of little, with a check in front; those that need context keep their marks."""
    checks: dict[str, Callable[..., None]] = {
        "batch": _check_numbers, "center": _check_numbers, "indent": _check_numbers, "round": _check_numbers, "slice": _check_numbers,
        "truncate": _check_numbers, "wordwrap": _check_numbers, "format": lambda form, *_: _check_format(str(form)),
        "replace": lambda value, old, new, *_: _check_replace(str(value), str(old), str(new)),
        "pprint": lambda value, *_: _checked_tree(value) and None, "string": lambda value, *_: _checked_tree(value) and None,
        "xmlattr": lambda value, *_: _checked_tree(value) and None,
    }  # fmt: skip

    def bounded(name: str, check: Callable[..., None]) -> Callable[..., Any]:
        inner = filters[name]

        @wraps(inner)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            # What Jinja passes in front by itself (environment, evaluation context) is no argument of the template's.
            check(*given[1:] if hasattr(inner, "jinja_pass_arg") else given)
            return inner(*args, **kwargs)

        return run

    return {name: bounded(name, check) for name, check in checks.items()}


# ---- checks: each raises LimitExceeded ----


def _check_length(length: int) -> None:
    if length > LIMITS.characters:
        raise LimitExceeded(f"it makes a text of more than {LIMITS.characters:,} characters")


def _check_number(number: int) -> None:
    if number > LIMITS.number:
        size = f"of size {number:,}, more than {LIMITS.number:,}" if number < 10**18 else "enormous"
        raise LimitExceeded(f"it asks for something {size}")


def _check_numbers(*values: object) -> None:
    for value in values:
        if isinstance(value, int):
            _check_number(value)


def _check_format(form: str) -> None:
    if _WIDTH.search(form) or ("*" in form and "%" in form):
        raise LimitExceeded("it formats to a very large width")


def _check_replace(value: str, old: str, new: str) -> None:
    _check_length(len(value) + value.count(old) * len(new))


def _check_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_number(left.bit_length() + right.bit_length())
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(times, int):
            _check_number(len(many) * times)


def _check_call(function: Any, args: tuple[Any, ...]) -> None:
    """Methods of texts that can make much out of little."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, str):
        return
    name = getattr(function, "__name__", "")
    if name in ("center", "expandtabs", "ljust", "rjust", "zfill"):
        _check_numbers(*args)
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, str(args[0]), str(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_length(sum(len(part) for part in args[0] if isinstance(part, str)) + len(owner) * len(args[0]))
    elif name in ("format", "format_map"):
        _check_format(owner)


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
