"""Go's text/template, executed: a tree from gosyntax.py over values of govalues.py.

As in Go with `missingkey=zero`, a map's missing key is nil, a struct's missing field an error. Time and output are bounded. Knows nothing
of conversations: what a chat template is given is gochat.py's.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from localrun.errors import TemplateError
from localrun.text import govalues
from localrun.text.gosyntax import (
    Action,
    Branch,
    Chain,
    Command,
    Dot,
    Field,
    Function,
    Include,
    Literal,
    Nil,
    Node,
    Operand,
    Pipe,
    Text,
    Tree,
    Variable,
    parse,
)
from localrun.text.govalues import GoError, Record, shown, true

MOST_STEPS = 500_000
"""Nodes and calls that one execution may take."""
DEEPEST = 64
"""Templates that may call one another."""


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class GoTemplate:
    """A parsed template. Immutable; may be executed from several threads."""

    def __init__(self, source: str, tree: Tree | None = None) -> None:
        """Raises TemplateError, one line, when `source` is no valid template. tree: the source's, changed by the caller."""
        if len(source) > govalues.LONGEST:
            raise TemplateError(f"the template has {len(source)} characters, more than {govalues.LONGEST}")
        self.source = source
        self.tree = tree or parse(source, govalues.NAMES)

    def execute(self, data: Any, now: datetime | None = None) -> str:
        """The text for `data`, which is the dot and $. Raises TemplateError: one line with the template's line and what went wrong."""
        run = _Run(self.tree, now or datetime.now())
        try:
            run.template(self.tree.body, data)
        except GoError as error:
            raise TemplateError(f"line {run.line}: {error}") from None
        except RecursionError:
            raise TemplateError(f"line {run.line}: templates are nested too deep") from None
        return "".join(run.output)


class _Run:
    """One execution."""

    def __init__(self, tree: Tree, now: datetime) -> None:
        self.tree = tree
        self.functions = govalues.functions(now)
        self.output: list[str] = []
        self.written = 0
        self.steps = 0
        self.depth = 0
        self.line = 1
        self.variables: list[tuple[str, Any]] = []

    def template(self, body: tuple[Node, ...], data: Any) -> None:
        outer, self.variables = self.variables, [("$", data)]
        self.depth += 1
        if self.depth > DEEPEST:
            raise GoError(f"templates call one another more than {DEEPEST} deep")
        self.nodes(body, data)
        self.depth -= 1
        self.variables = outer

    def step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise GoError(f"the template takes more than {MOST_STEPS} steps")

    def write(self, text: str) -> None:
        self.written += len(text)
        if self.written > govalues.LONGEST:
            raise GoError(f"the template writes more than {govalues.LONGEST} characters")
        self.output.append(text)

    # -- nodes

    def nodes(self, body: tuple[Node, ...], dot: Any) -> None:
        for node in body:
            self.step()
            if isinstance(node, Text):
                self.write(node.text)
            elif isinstance(node, Action):
                value = self.pipe(node.pipe, dot)
                if not node.pipe.variables:
                    self.write(shown(value, "<no value>"))
            elif isinstance(node, Branch):
                known = len(self.variables)
                try:
                    self.branch(node, dot)
                finally:
                    del self.variables[known:]
            elif isinstance(node, Include):
                self.include(node, dot)
            else:
                raise _Break if node.kind == "break" else _Continue

    def include(self, node: Include, dot: Any) -> None:
        self.line = node.line
        body = self.tree.defined.get(node.name)
        if body is None:
            raise GoError(f"template {node.name!r} not defined")
        self.template(body, self.pipe(node.pipe, dot) if node.pipe is not None else None)

    def branch(self, node: Branch, dot: Any) -> None:
        if node.kind == "range":
            self.range(node, dot)
            return
        value = self.pipe(node.pipe, dot)
        if true(value):
            self.nodes(node.body, value if node.kind == "with" else dot)
        else:
            self.nodes(node.otherwise, dot)

    def range(self, node: Branch, dot: Any) -> None:
        pipe = node.pipe
        # the variables hold the whole value until, and unless, there are elements
        value = self.pipe(pipe, dot)
        pairs: list[tuple[Any, Any]]
        if isinstance(value, list):
            pairs = list(enumerate(value))
        elif isinstance(value, dict):
            # Go's maps have no order: templates see their keys sorted
            pairs = [(key, value[key]) for key in sorted(value)]
        elif isinstance(value, int) and not isinstance(value, bool):
            if value > MOST_STEPS:
                raise GoError(f"range over {value}")
            pairs = [(number, number) for number in range(value)]
            if len(pipe.variables) > 1:
                raise GoError(f"can't use {value} to iterate over more than one variable")
        elif value is None:
            pairs = []
        else:
            raise GoError(f"range can't iterate over {shown(value)[:60]}")
        if not pairs:
            self.nodes(node.otherwise, dot)
            return
        known = len(self.variables)
        for key, element in pairs:
            self.step()
            names = pipe.variables
            given = (element,) if len(names) == 1 else (key, element)
            for name, one in zip(names, given):
                if pipe.assigns:
                    self.assign(name, one)
                else:
                    self.variables.append((name, one))
            try:
                self.nodes(node.body, element)
            except _Continue:
                continue
            except _Break:
                break
            finally:
                del self.variables[known:]

    # -- pipelines

    def pipe(self, pipe: Pipe, dot: Any) -> Any:
        """The pipeline's value, which its variables get too."""
        self.line = pipe.line
        value = self.command(pipe.commands[0], dot, ())
        for command in pipe.commands[1:]:
            value = self.command(command, dot, (value,))
        for name in pipe.variables:
            if pipe.assigns:
                self.assign(name, value)
            else:
                self.variables.append((name, value))
        return value

    def assign(self, name: str, value: Any) -> None:
        for index in range(len(self.variables) - 1, -1, -1):
            if self.variables[index][0] == name:
                self.variables[index] = (name, value)
                return
        raise GoError(f"undefined variable: {name}")

    def command(self, command: Command, dot: Any, piped: tuple[Any, ...]) -> Any:
        self.step()
        first, rest = command.operands[0], command.operands[1:]
        if isinstance(first, Function):
            return self.call(first.name, rest, dot, piped)
        if isinstance(first, Nil):
            raise GoError("nil is not a command")
        value = self.operand(first, dot)
        if rest or piped:
            name = ".".join(getattr(first, "names", ())) or "value"
            raise GoError(f"{name} has arguments but cannot be invoked as function")
        return value

    def call(self, name: str, operands: tuple[Operand, ...], dot: Any, piped: tuple[Any, ...]) -> Any:
        if name in ("and", "or"):
            return self.logic(name, operands, dot, piped)
        function, fewest, most = self.functions[name]
        count = len(operands) + len(piped)
        if count < fewest or 0 <= most < count:
            raise GoError(f"wrong number of args for {name}: want {fewest if most == fewest else f'at least {fewest}'} got {count}")
        values = [self.operand(operand, dot) for operand in operands]
        try:
            result = function(*values, *piped)
        except GoError as error:
            raise GoError(f"error calling {name}: {error}") from None
        if isinstance(result, str) and len(result) > govalues.LONGEST:
            raise GoError(f"{name} makes more than {govalues.LONGEST} characters")
        return result

    def logic(self, name: str, operands: tuple[Operand, ...], dot: Any, piped: tuple[Any, ...]) -> Any:
        """The first argument that settles it, those after it unseen; else the last one."""
        if not operands and not piped:
            raise GoError(f"wrong number of args for {name}: want at least 1 got 0")
        value: Any = None
        for operand in operands:
            value = self.operand(operand, dot)
            if true(value) == (name == "or"):
                return value
        return piped[0] if piped else value

    def operand(self, operand: Operand, dot: Any) -> Any:
        if isinstance(operand, Literal):
            return operand.value
        if isinstance(operand, Dot):
            return dot
        if isinstance(operand, Field):
            return self.fields(dot, operand.names)
        if isinstance(operand, Variable):
            value = next((value for name, value in reversed(self.variables) if name == operand.name), None)
            return self.fields(value, operand.names)
        if isinstance(operand, Chain):
            return self.fields(self.pipe(operand.pipe, dot), operand.names)
        if isinstance(operand, Nil):
            return None
        return self.call(operand.name, (), dot, ())

    def fields(self, value: Any, names: tuple[str, ...]) -> Any:
        for place, name in enumerate(names):
            if isinstance(value, Record):
                if name not in value.fields:
                    raise GoError(f"can't evaluate field {name} in a value that has {', '.join(value.fields)}")
                value = value.fields[name]
            elif isinstance(value, dict):
                value = value.get(name)
            elif value is None:
                # of a value that is nil as a whole, every field is nil
                if place:
                    raise GoError(f"nil pointer evaluating interface {{}}.{name}")
                return None
            else:
                raise GoError(f"can't evaluate field {name} in type {govalues.type_name(value)}")
        return value
