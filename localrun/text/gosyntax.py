"""The syntax of Go's text/template: source text to a tree. https://pkg.go.dev/text/template

Actions stand between {{ and }}; `{{- ` and ` -}}` take the white space before and after along. Knows the grammar, names of functions and
variables included, and nothing of what anything evaluates to.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from localrun.errors import TemplateError

_GO = re.compile(r"\{\{-?\s*(\.[A-Z$]|\$|(if|else|range|with|end|define|block|template|json|printf|slice|index|len|and|or|not|eq)\b)")
_JINJA_ONLY = re.compile(r"\{%|\{#")


def is_go_template(text: str) -> bool:
    """Whether a chat template is written for Go's text/template, as Ollama's are, and not in Jinja."""
    return not _JINJA_ONLY.search(text) and _GO.search(text) is not None


# ---- the tree -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Literal:
    """A number, a string, true or false."""

    value: int | float | str | bool


@dataclass(frozen=True)
class Nil:
    pass


@dataclass(frozen=True)
class Dot:
    pass


@dataclass(frozen=True)
class Field:
    """.A.B"""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Variable:
    """$x.A.B; the name has its $."""

    name: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    name: str


@dataclass(frozen=True)
class Chain:
    """(pipeline).A.B"""

    pipe: Pipe
    names: tuple[str, ...]


Operand = Literal | Nil | Dot | Field | Variable | Function | Chain


@dataclass(frozen=True)
class Command:
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Pipe:
    line: int
    commands: tuple[Command, ...]
    variables: tuple[str, ...] = ()
    assigns: bool = False
    """`$x = ...` rather than `$x := ...`."""


@dataclass(frozen=True)
class Action:
    pipe: Pipe


@dataclass(frozen=True)
class Branch:
    """if, with or range."""

    kind: str
    pipe: Pipe
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]


@dataclass(frozen=True)
class Include:
    """{{ template "name" pipeline }}"""

    line: int
    name: str
    pipe: Pipe | None


@dataclass(frozen=True)
class Jump:
    """break or continue."""

    kind: str


Node = Text | Action | Branch | Include | Jump


@dataclass(frozen=True)
class Tree:
    """The main template and those that it defines."""

    body: tuple[Node, ...]
    defined: dict[str, tuple[Node, ...]]


# ---- tokens ---------------------------------------------------------------------------------------------------------------------

_SPACE = " \t\r\n"
_KEYWORDS = frozenset({"if", "else", "end", "range", "with", "define", "template", "block", "break", "continue"})
_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\n]+)
    | (?P<number>[+-]?(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?))
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<raw>`[^`]*`)
    | (?P<char>'(?:[^'\\\n]|\\[^\n][^'\n]*)')
    | (?P<field>\.[^\W\d]\w*)
    | (?P<variable>\$(?:[^\W\d]\w*)?)
    | (?P<word>[^\W\d]\w*)
    | (?P<sign>:=|[.=|(),])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([abfnrtv\\\"'])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"', "'": "'"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


class _End:
    """What ended a list of nodes: end or else, with the rest of its action still to be read."""


def parse(source: str, functions: Collection[str]) -> Tree:
    """The tree of `source`, which may call `functions`. Raises TemplateError: one line with the template's line and what is wrong."""
    return _Parser(_tokens(source), functions).tree()


def _fail(line: int, problem: str) -> TemplateError:
    return TemplateError(f"line {line}: {problem}")


def _tokens(source: str) -> list[_Token]:
    """Text and actions in turn; an action is the tokens "{{", its own, and "}}"."""
    tokens: list[_Token] = []
    at, line, trim = 0, 1, False
    while True:
        start = source.find("{{", at)
        text = source[at:] if start < 0 else source[at:start]
        shown = text.lstrip(_SPACE) if trim else text
        opened = start + 2
        if start >= 0 and source[opened : opened + 1] == "-" and source[opened + 1 : opened + 2] in tuple(_SPACE):
            shown = shown.rstrip(_SPACE)
            opened += 2
        if shown:
            tokens.append(_Token("text", shown, line))
        if start < 0:
            return tokens
        line += text.count("\n")
        at, trim = _action(source, opened, line, tokens)
        line += source.count("\n", start, at)


def _action(source: str, at: int, line: int, tokens: list[_Token]) -> tuple[int, bool]:
    """Reads the action that begins at `at`; returns where the text after it begins and whether that loses its leading space."""
    comment = re.compile(r"/\*.*?\*/([ \t\r\n]-)?\}\}", re.DOTALL).match(source, at)
    if comment:
        return comment.end(), comment[1] is not None
    if source.startswith("/*", at):
        raise _fail(line, "unclosed comment, or a comment that does not end its action")
    tokens.append(_Token("{{", "{{", line))
    while True:
        if source.startswith("}}", at):
            tokens.append(_Token("}}", "}}", line))
            return at + 2, False
        # only a minus after white space trims: {{ 3 -}} does, {{ x-}} does not
        closing = re.compile(r"[ \t\r\n]+-\}\}").match(source, at)
        if closing:
            tokens.append(_Token("}}", "}}", line))
            return closing.end(), True
        found = _TOKEN.match(source, at)
        if found is None:
            rest = source[at : at + 12]
            raise _fail(line, f"unexpected {rest!r} in an action" if rest else "unclosed action")
        kind = found.lastgroup or ""
        if kind in ("number", "char", "string") and re.match(r"\w", source[found.end() : found.end() + 1]):
            raise _fail(line, f"bad {kind}: {source[at : found.end() + 8]!r}")
        tokens.append(_Token(kind, found[0], line))
        line += found[0].count("\n")
        at = found.end()


# ---- the parser -----------------------------------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, tokens: list[_Token], functions: Collection[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.functions = functions
        self.defined: dict[str, tuple[Node, ...]] = {}
        self.variables = ["$"]
        self.loops = 0
        self.depth = 0

    def tree(self) -> Tree:
        body, stop = self.nodes()
        if stop is not None:
            raise _fail(stop.line, f"unexpected {{{{{stop.text}}}}}")
        return Tree(body, self.defined)

    # -- cursor

    def peek(self) -> _Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def next(self) -> _Token:
        token = self.peek()
        if token is None:
            raise _fail(self.tokens[-1].line if self.tokens else 1, "unexpected end of the template")
        self.at += 1
        return token

    def skip_space(self) -> bool:
        before = self.at
        while (token := self.peek()) is not None and token.kind == "space":
            self.at += 1
        return self.at > before

    def expect(self, kind: str, where: str) -> _Token:
        self.skip_space()
        token = self.next()
        if token.kind != kind:
            raise _fail(token.line, f"unexpected {token.text!r} in {where}")
        return token

    # -- lists of nodes

    def nodes(self) -> tuple[tuple[Node, ...], _Token | None]:
        """Nodes up to the keyword `end` or `else`, which is returned, its action open; or to the template's end."""
        self.depth += 1
        if self.depth > 200:
            raise _fail(self.tokens[self.at - 1].line, "blocks are nested more than 200 deep")
        found: list[Node] = []
        while (token := self.peek()) is not None:
            self.at += 1
            if token.kind == "text":
                found.append(Text(token.text))
                continue
            self.skip_space()
            word = self.peek()
            keyword = word.text if word is not None and word.kind == "word" and word.text in _KEYWORDS else ""
            if word is None or not keyword:
                found.append(Action(self.pipe("}}", "command")))
                continue
            self.at += 1
            if keyword in ("end", "else"):
                self.depth -= 1
                return tuple(found), word
            node = self.keyword(word)
            if node is not None:
                found.append(node)
        self.depth -= 1
        return tuple(found), None

    def keyword(self, word: _Token) -> Node | None:
        if word.text in ("if", "with", "range"):
            return self.branch(word.text)
        if word.text in ("break", "continue"):
            if not self.loops:
                raise _fail(word.line, f"{{{{{word.text}}}}} outside {{{{range}}}}")
            self.expect("}}", word.text)
            return Jump(word.text)
        if word.text == "template":
            name = self.name(word)
            self.skip_space()
            token = self.peek()
            if token is not None and token.kind == "}}":
                self.at += 1
                return Include(word.line, name, None)
            return Include(word.line, name, self.pipe("}}", "template clause"))
        if word.text == "define" and self.depth > 1:
            raise _fail(word.line, "{{define}} inside another block")
        # define and block: a template of its own, with variables of its own
        name = self.name(word)
        pipe = None
        if word.text == "block":
            pipe = self.pipe("}}", "block clause")
        else:
            self.expect("}}", "define clause")
        variables, loops = self.variables, self.loops
        self.variables, self.loops = ["$"], 0
        body, stop = self.nodes()
        self.variables, self.loops = variables, loops
        self.ended(word, stop)
        if name not in self.defined or any(not isinstance(node, Text) or node.text.strip() for node in body):
            self.defined[name] = body
        return Include(word.line, name, pipe) if pipe is not None else None

    def name(self, word: _Token) -> str:
        self.skip_space()
        token = self.next()
        if token.kind not in ("string", "raw"):
            raise _fail(token.line, f"unexpected {token.text!r} in {word.text} clause")
        return _string(token)

    def ended(self, word: _Token, stop: _Token | None) -> None:
        if stop is None:
            raise _fail(word.line, f"{{{{{word.text}}}}} has no {{{{end}}}}")
        if stop.text != "end":
            raise _fail(stop.line, f"unexpected {{{{else}}}} in {word.text} clause")
        self.expect("}}", "end")

    def branch(self, kind: str) -> Branch:
        known = len(self.variables)
        word = self.tokens[self.at - 1]
        pipe = self.pipe("}}", kind)
        if kind == "range":
            self.loops += 1
        body, stop = self.nodes()
        if kind == "range":
            self.loops -= 1
        otherwise: tuple[Node, ...] = ()
        if stop is not None and stop.text == "else":
            self.skip_space()
            token = self.peek()
            if token is not None and token.kind == "word" and token.text in ("if", "with") and token.text == kind:
                # {{else if}}: one {{end}} closes both
                self.at += 1
                otherwise = (self.branch(kind),)
                del self.variables[known:]
                return Branch(kind, pipe, body, otherwise)
            self.expect("}}", "else")
            otherwise, stop = self.nodes()
        self.ended(word, stop)
        del self.variables[known:]
        return Branch(kind, pipe, body, otherwise)

    # -- pipelines

    def pipe(self, closing: str, context: str) -> Pipe:
        self.depth += 1
        if self.depth > 200:
            raise _fail(self.tokens[self.at - 1].line, "pipelines are nested more than 200 deep")
        self.skip_space()
        first = self.peek()
        line = first.line if first is not None else 1
        names, assigns = self.declaration(context)
        commands = [self.command(closing, context)]
        while (token := self.next()).kind == "sign" and token.text == "|":
            commands.append(self.command(closing, context))
            if not isinstance(commands[-1].operands[0], (Function, Field, Variable, Chain)):
                raise _fail(token.line, "what follows a | must be a function")
        if token.text != closing:
            raise _fail(token.line, f"unexpected {token.text!r} in {context}")
        self.depth -= 1
        # declared names hold from here on, not in the pipeline itself
        if not assigns:
            self.variables += names
        return Pipe(line, tuple(commands), tuple(names), assigns)

    def declaration(self, context: str) -> tuple[list[str], bool]:
        start = self.at
        names: list[str] = []
        while (token := self.peek()) is not None and token.kind == "variable":
            self.at += 1
            names.append(token.text)
            self.skip_space()
            sign = self.peek()
            if sign is not None and sign.kind == "sign" and sign.text in (":=", "="):
                self.at += 1
                if sign.text == "=":
                    for name in names:
                        self.known(name, sign.line)
                self.skip_space()
                return names, sign.text == "="
            if context == "range" and len(names) == 1 and sign is not None and sign.text == ",":
                self.at += 1
                self.skip_space()
                continue
            break
        self.at = start
        return [], False

    def known(self, name: str, line: int) -> None:
        if name not in self.variables:
            raise _fail(line, f"undefined variable {name!r}")

    def command(self, closing: str, context: str) -> Command:
        operands: list[Operand] = []
        self.skip_space()
        while True:
            token = self.peek()
            if token is None:
                raise _fail(self.tokens[-1].line, "unclosed action")
            if token.text == closing or (token.kind == "sign" and token.text in ("|", ")")) or token.kind == "}}":
                break
            operands.append(self.operand())
            spaced = self.skip_space()
            token = self.peek()
            ends = token is None or token.kind == "}}" or (token.kind == "sign" and token.text in ("|", ")"))
            if not spaced and not ends:
                raise _fail(token.line if token else 0, f"unexpected {token.text if token else ''!r} right after an operand")
        if not operands:
            raise _fail(token.line, f"missing value for {context}")
        if len(operands) > 1 and isinstance(operands[0], (Literal, Nil, Dot)):
            raise _fail(token.line, "a value that is no function is given arguments")
        return Command(tuple(operands))

    def operand(self) -> Operand:
        token = self.next()
        if token.kind == "sign" and token.text == "(":
            pipe = self.pipe(")", "parenthesized pipeline")
            return Chain(pipe, self.names())
        if token.kind == "field":
            self.at -= 1
            return Field(self.names())
        if token.kind == "variable":
            self.known(token.text, token.line)
            return Variable(token.text, self.names())
        simple: Operand
        if token.kind == "word":
            if token.text in ("true", "false"):
                simple = Literal(token.text == "true")
            elif token.text == "nil":
                simple = Nil()
            elif token.text in self.functions:
                simple = Function(token.text)
            else:
                raise _fail(token.line, f"function {token.text!r} not defined")
        elif token.kind == "sign" and token.text == ".":
            simple = Dot()
        elif token.kind in ("string", "raw"):
            simple = Literal(_string(token))
        elif token.kind == "char":
            simple = Literal(_char(token))
        elif token.kind == "number":
            simple = Literal(_number(token))
        else:
            raise _fail(token.line, f"unexpected {token.text!r} in an operand")
        after = self.peek()
        if after is not None and after.kind == "field":
            raise _fail(token.line, f"unexpected {after.text!r} after {token.text!r}")
        return simple

    def names(self) -> tuple[str, ...]:
        found = []
        while (token := self.peek()) is not None and token.kind == "field":
            self.at += 1
            found.append(token.text[1:])
        return tuple(found)


# ---- constants ------------------------------------------------------------------------------------------------------------------


def _string(token: _Token) -> str:
    if token.kind == "raw":
        return token.text[1:-1]
    return _unescaped(token, token.text[1:-1])


def _unescaped(token: _Token, text: str) -> str:
    def one(found: re.Match[str]) -> str:
        simple, two, four, eight, octal, other = found.groups()
        if simple:
            return _SIMPLE[simple]
        if other is not None:
            raise _fail(token.line, f"bad escape \\{other} in {token.text!r}")
        code = int(octal, 8) if octal else int(two or four or eight, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000 or (octal and code > 255):
            raise _fail(token.line, f"bad escape in {token.text!r}")
        return chr(code)

    return _ESCAPE.sub(one, text)


def _char(token: _Token) -> int:
    text = _unescaped(token, token.text[1:-1])
    if len(text) != 1:
        raise _fail(token.line, f"malformed character constant {token.text}")
    return ord(text)


def _number(token: _Token) -> int | float:
    text = token.text.replace("_", "")
    try:
        if re.fullmatch(r"[+-]?0[0-7]+", text):
            return int(text, 8)
        return int(text, 0) if re.fullmatch(r"[+-]?(0[xXbBoO]\w+|[0-9]+)", text) else float(text)
    except ValueError:
        raise _fail(token.line, f"bad number syntax: {token.text!r}") from None
