'''Modelfiles: read, checked, written.

    # a comment
    FROM smollm2
    PARAMETER temperature 0.2
    SYSTEM """You answer
    in verse."""

An instruction is a keyword, in any case, and a value; PARAMETER has a key and MESSAGE a role before it. A value is the rest of the line; or
text between double quotes or three of them, which may span lines and ends at a line's end. There are no escapes: a quote inside is a quote.
This is Ollama's grammar. One form is added, for texts that no quoting there can carry (a line inside ending in three quotes, say):

    SYSTEM <<END
    text, line by line
    END

Knows the grammar and nothing of what the values mean: paths are not looked up, parameters not typed.
'''

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from localrun.errors import BadRequest

KEYWORDS = ("from", "license", "template", "system", "adapter", "draft", "renderer", "parser", "parameter", "message", "requires")
ROLES = ("system", "user", "assistant")

_QUOTES = '"""'
_BLANK = re.compile(r"[ \t]*")
_LINE = re.compile(r"[^\r\n]*")
_BREAK = re.compile(r"\r\n|\r|\n")
_WORD = re.compile(r"[^\s]+")
_HEREDOC = re.compile(r"<<([A-Z_]{1,32})\Z")


class ModelfileError(BadRequest):
    """A Modelfile does not follow the grammar. The message begins with line and column."""

    def __init__(self, line: int, column: int, problem: str) -> None:
        super().__init__(f"line {line}, column {column}: {problem}")
        self.line = line
        self.column = column


@dataclass(frozen=True)
class Instruction:
    """`name` is lower-case. `key` is PARAMETER's key or MESSAGE's role, else empty. Where it stood does not make it another."""

    name: str
    value: str
    key: str = ""
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)

    def error(self, problem: str) -> ModelfileError:
        return ModelfileError(self.line, self.column, problem)


def decode(raw: bytes) -> str:
    """The text of a Modelfile's bytes: UTF-8, or UTF-16 with a byte order mark. Raises ModelfileError where it is neither."""
    encoding = "utf-8-sig"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise ModelfileError(before.count(b"\n") + 1, column, f"this is not {encoding.removesuffix('-sig').upper()} text") from None


def parse(text: str) -> list[Instruction]:
    """The instructions in `text`, in order. Raises ModelfileError; a file without FROM is one."""
    reader = _Reader(text.removeprefix("\ufeff"))
    instructions = []
    while (instruction := reader.next()) is not None:
        instructions.append(instruction)
    if not any(instruction.name == "from" for instruction in instructions):
        raise ModelfileError(*reader.place(reader.at), "no FROM line")
    return instructions


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of an offset."""
        breaks = list(_BREAK.finditer(self.text, 0, at))
        return len(breaks) + 1, at - (breaks[-1].end() if breaks else 0) + 1

    def fail(self, at: int, problem: str) -> ModelfileError:
        return ModelfileError(*self.place(at), problem)

    def next(self) -> Instruction | None:
        """The instruction at or after the cursor, which moves behind it; None at the end."""
        while True:
            self._skip(_BLANK)
            if self.at == len(self.text):
                return None
            if self.text[self.at] == "#":
                self._skip(_LINE)
            elif not self._skip(_BREAK):
                break
        start = self.at
        name = self._word().lower()
        if name not in KEYWORDS:
            known = ", ".join(f'"{keyword}"' for keyword in KEYWORDS[:-1])
            raise self.fail(start, f'command must be one of {known}, or "{KEYWORDS[-1]}"')
        key = ""
        if name in ("parameter", "message"):
            self._skip(_BLANK)
            key_at = self.at
            key = self._word()
            if name == "message":
                key = key.lower()
                if key not in ROLES:
                    raise self.fail(key_at, 'message role must be one of "system", "user", or "assistant"')
            elif not key:
                raise self.fail(key_at, "PARAMETER needs a name and a value")
        value = self._value(f"{name.upper()} {key}".strip())
        line, column = self.place(start)
        return Instruction(name, value, key, line, column)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def _word(self) -> str:
        return self._skip(_WORD)

    def _value(self, owner: str) -> str:
        self._skip(_BLANK)
        start = self.at
        first = self._skip(_LINE).strip()
        if not first:
            raise self.fail(start, f"{owner} needs a value; an empty one is written \"\"")
        heredoc = _HEREDOC.match(first)
        if heredoc and self.at < len(self.text):
            return self._heredoc(start, heredoc[1])
        # a quoted value goes on until a line ends with its closing quotes
        while (value := _unquoted(self.text[start : self.at].strip())) is None:
            if self.at == len(self.text):
                quotes = _QUOTES if first.startswith(_QUOTES) else '"'
                raise self.fail(start, f"unexpected EOF: no line ends with the {quotes} that would close this value")
            self._skip(_BREAK)
            self._skip(_LINE)
        return value

    def _heredoc(self, start: int, word: str) -> str:
        # the break before the last line is not part of the value; which kind it is, the first one tells
        line_break = self._skip(_BREAK)
        body = self.at
        while True:
            line_start = self.at
            if self._skip(_LINE) == word:
                return self.text[body:line_start].removesuffix(line_break)
            if self.at == len(self.text):
                raise self.fail(start, f"unexpected EOF: no line is {word}, which would close this value")
            self._skip(_BREAK)


def _unquoted(text: str) -> str | None:
    """What a value written as `text` is; None when its quotes are still open."""
    if text.startswith(_QUOTES):
        return text[3:-3] if len(text) >= 6 and text.endswith(_QUOTES) else None
    if text.startswith('"'):
        return text[1:-1] if len(text) >= 2 and text.endswith('"') else None
    return text


def write(instructions: list[Instruction], comments: tuple[str, ...] = ()) -> str:
    """A Modelfile that `parse` reads as these instructions. `comments` go first, a line each."""
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines += [" ".join(part for part in (one.name.upper(), one.key, written(one.value)) if part) for one in instructions]
    return "\n".join(lines) + "\n"


def written(value: str) -> str:
    """`value` as a Modelfile spells it: bare where that can be, else quoted, else between marks of its own."""
    plain = value == value.strip() and not _BREAK.search(value) and not value.startswith('"') and not _HEREDOC.match(value)
    if value and plain:
        return value
    triple: Callable[[str], str] = lambda text: f"{_QUOTES}{text}{_QUOTES}"  # noqa: E731
    single: Callable[[str], str] = lambda text: f'"{text}"'  # noqa: E731
    for quoted in (triple(value), single(value)) if _BREAK.search(value) else (single(value), triple(value)):
        if _reads_back(quoted, value):
            return quoted
    word = "END"
    while re.search(rf"(^|[\r\n]){word}([\r\n]|$)", value):
        word += "_"
    return f"<<{word}\n{value}\n{word}"


def _reads_back(quoted: str, value: str) -> bool:
    """Whether a reader who looks for the closing quotes at each line's end finds just `value`."""
    for end in _BREAK.finditer(quoted):
        if _unquoted(quoted[: end.start()].strip()) is not None:
            return False
    return _unquoted(quoted.strip()) == value
