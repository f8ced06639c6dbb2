"""An answer on its way to the screen: Markdown drawn as it grows on a terminal, the bare text everywhere else.

Markdown is drawn block by block. Blocks that are complete are written once and belong to the scroll-back; only the last, growing block is
redrawn, from its first line that changed, in one write. So nothing flickers, and an answer of any length scrolls as text does. Knows
terminals and Markdown; knows nothing of models or requests.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown
    from rich.segment import Segment

FRAME_SECONDS = 0.04
LOAD_SHARE = 10
"""Drawing may take one part in so many of the time: the model needs the cores."""
MARGIN = 2
"""Cells left free at the right: terminals and tables disagree on the width of some emoji."""
CODE_THEME = "ansi_dark"
STYLES = {"markdown.code": "cyan", "markdown.h1": "bold underline", "markdown.h2": "bold", "markdown.item.number": "cyan"}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def printable(text: str) -> str:
    """`text` without anything a terminal would obey: a model's words must not move the cursor or set the title."""
    return _CONTROL.sub(lambda match: "" if match[0] == "\r" else "�", text)


class Writer(Protocol):
    """Where an answer's text goes."""

    def feed(self, text: str) -> None:
        """The next piece of text."""

    def finish(self) -> None:
        """The text has ended (or was stopped): everything is on the screen, the cursor at the start of a line."""


class PlainWriter:
    """The text as it comes, and a line end after it."""

    def __init__(self, out: TextIO, *, clean: bool) -> None:
        """clean: for a terminal, control characters are taken out."""
        self._out = out
        self._clean = clean
        self._last = ""

    def feed(self, text: str) -> None:
        if self._clean:
            text = printable(text)
        if text:
            self._last = text[-1]  # before writing: Ctrl-C may come right after it
            self._out.write(text)
            self._out.flush()

    def finish(self) -> None:
        if self._last not in ("", "\n"):
            self._out.write("\n")
            self._out.flush()
        self._last = ""


class Line(NamedTuple):
    """A line as it is written, and how many rows of the screen it takes (long lines of code are left to the terminal to wrap, so that
    they can be copied whole)."""

    text: str
    rows: int


class MarkdownWriter:
    """Draws growing Markdown on a terminal. `out` must be one that obeys ANSI escape codes."""

    def __init__(
        self,
        out: TextIO,
        size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
        clock: Callable[[], float] = time.monotonic,
        color: str | None = "auto",
    ) -> None:
        self._out = out
        self._size = size
        self._clock = clock
        self._drawing = _Drawing(color)
        self._tail = ""  # Markdown from the start of the block that grows
        self._live: list[Line] = []  # what is on the screen and may still change
        self._frozen = 0  # lines of the growing block that have scrolled out of reach
        self._separate = False  # a block is on the screen: the next one begins with an empty line
        self._drawn = False  # the cursor is at the end of a line of ours
        self._columns = 0
        self._next_frame = 0.0

    def feed(self, text: str) -> None:
        self._tail += printable(text)
        now = self._clock()
        if now >= self._next_frame:
            self._draw(final=False)
            spent = self._clock() - now
            self._next_frame = now + max(FRAME_SECONDS, spent * LOAD_SHARE)

    def finish(self) -> None:
        self._draw(final=True)
        if self._drawn:
            self._write("\n")
        self._tail, self._live, self._frozen = "", [], 0
        self._separate = self._drawn = False
        self._next_frame = 0.0

    def _draw(self, *, final: bool) -> None:
        columns, height = self._size()
        if columns != self._columns:
            # lines on the screen were wrapped anew by the terminal: leave them, and begin the growing block again below
            self._columns, self._live, self._frozen = columns, [], 0
        *done, growing = self._blocks(final)
        finished: list[Line] = []
        for block in done:
            finished += self._lines(block)
            self._separate = self._separate or bool(finished)
        lines = self._lines(growing)
        self._show((finished + lines)[self._frozen :])
        if done:
            self._tail, self._frozen = growing, 0
            self._live = lines
        while len(self._live) > 1 and sum(line.rows for line in self._live) > height - 1:
            self._frozen += 1
            del self._live[0]

    def _blocks(self, final: bool) -> list[str]:
        """The tail cut into top-level blocks; the last one may grow. A line that is not complete yet cannot begin a block for certain."""
        sure = self._tail if final else self._tail[: self._tail.rfind("\n") + 1]
        starts = self._drawing.block_starts(sure)
        if len(starts) < 2:
            return [self._tail]
        at = [0]
        for line in self._tail.splitlines(keepends=True):
            at.append(at[-1] + len(line))
        cuts = [0, *(at[start] for start in starts[1:]), len(self._tail)]
        return [self._tail[begin:end] for begin, end in itertools.pairwise(cuts)]

    def _lines(self, block: str) -> list[Line]:
        lines = self._drawing.lines(block, self._columns)
        return [Line("", 1), *lines] if lines and self._separate else lines

    def _show(self, lines: list[Line]) -> None:
        """Makes the live part of the screen these lines, writing from the first one that differs."""
        live = self._live
        same = 0
        while same < min(len(live), len(lines)) and live[same] == lines[same]:
            same += 1
        if same == len(live) == len(lines):
            return
        if same == len(live) - 1 == len(lines) - 1 and lines[-1].text.startswith(live[-1].text):
            self._write(lines[-1].text[len(live[-1].text) :])
        elif same == len(live):
            self._write(("\n" if self._drawn else "") + "\n".join(line.text for line in lines[same:]))
        else:
            if same == len(lines) and same > 0:
                same -= 1  # lines go away: end on the last one that stays
            up = sum(line.rows for line in live[same:]) - 1
            move = f"\x1b[{up}A" if up else ""
            self._write(f"\x1b[?2026h\r{move}\x1b[J" + "\n".join(line.text for line in lines[same:]) + "\x1b[?2026l")
        self._live = lines

    def _write(self, text: str) -> None:
        self._drawn = True
        self._out.write(text)
        self._out.flush()


class _Drawing:
    """Markdown source of one block to lines of a terminal."""

    def __init__(self, color: str | None) -> None:
        from markdown_it import MarkdownIt
        from rich.console import Console
        from rich.theme import Theme

        # HTML is text here: a model that explains <b> must not have it swallowed
        self._parser: MarkdownIt = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._blocks_only: MarkdownIt = MarkdownIt("commonmark", {"html": False}).enable("table").disable("inline")
        self._console = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system=color,  # type: ignore[arg-type]
            legacy_windows=False,
            theme=Theme(STYLES),
        )

    def block_starts(self, source: str) -> list[int]:
        """The line each top-level block begins on."""
        return [token.map[0] for token in self._blocks_only.parse(source) if token.level == 0 and token.nesting >= 0 and token.map]

    def lines(self, source: str, columns: int) -> list[Line]:
        """What a block looks like."""
        tokens = self._parser.parse(source)
        if len(tokens) == 1 and tokens[0].type == "fence":
            return self._fence(source, tokens[0], columns)
        for token in tokens:
            for child in token.children or []:
                if child.type == "softbreak":
                    child.type = "hardbreak"  # a poem's lines, an address: a model breaks lines on purpose
        width = max(columns - MARGIN, 8)
        rendered = self._console.render_lines(_markdown(tokens), self._console.options.update(width=width), pad=False)
        filled = [any(segment.text.strip() for segment in segments) for segments in rendered]
        if not any(filled):
            return []
        first, last = filled.index(True), len(filled) - filled[::-1].index(True)
        return [Line(self._ansi(segments), 1) for segments in rendered[first:last]]

    def _fence(self, source: str, token: Token, columns: int) -> list[Line]:
        """A fenced block with its fences, highlighted, each line whole."""
        from rich.syntax import Syntax
        from rich.text import Text

        code = token.content.expandtabs(4).removesuffix("\n")
        language = token.info.split()[0] if token.info.split() else "text"
        texts = [Text(token.markup + token.info, style="dim")]
        if code:
            highlighted = Syntax("", language, theme=CODE_THEME, background_color="default").highlight(code)
            texts += list(highlighted.split("\n", allow_blank=True))[: code.count("\n") + 1]
        last = source.rstrip().rpartition("\n")[2].strip()
        if "\n" in source.rstrip() and last.startswith(token.markup) and not last.strip(token.markup[0]):
            texts.append(Text(last, style="dim"))
        return [Line(self._ansi(text.render(self._console)), rows_of(text.plain, columns)) for text in texts]

    def _ansi(self, segments: Iterable[Segment]) -> str:
        from rich.segment import Segment

        shown = (segment for segment in segments if not segment.control and segment.text != "\n")
        if self._console.no_color:
            shown = (Segment(text, style.without_color if style else None) for text, style, _ in shown)
        system = self._console._color_system
        return "".join(style.render(text, color_system=system) if style else text for text, style, _ in shown).rstrip()


def _markdown(tokens: list[Token]) -> Markdown:
    """rich's Markdown over tokens parsed our way: links with their address, headings at the left."""
    from rich.markdown import CodeBlock, Heading, Markdown
    from rich.syntax import Syntax
    from rich.text import Text

    class LeftHeading(Heading):
        LEVEL_ALIGN = {}  # noqa: RUF012 (rich's own attribute, emptied: rich's default is left)

    class InnerFence(CodeBlock):
        """A fenced block inside a list or a quotation."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            yield Text("```" if self.lexer_name == "text" else f"```{self.lexer_name}", style="dim")
            yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")
            yield Text("```", style="dim")

    class OurMarkdown(Markdown):
        elements = {**Markdown.elements, "heading_open": LeftHeading, "fence": InnerFence}  # noqa: RUF012

    markdown = OurMarkdown("", code_theme=CODE_THEME, hyperlinks=False)
    markdown.parsed = tokens
    return markdown


def rows_of(text: str, columns: int) -> int:
    """Rows that a terminal needs for a line it wraps itself: a wide character that does not fit goes to the next row."""
    from rich.cells import cell_len

    if columns < 2 or cell_len(text) <= columns:
        return 1
    rows, at = 1, 0
    for character in text:
        width = cell_len(character)
        if at + width > columns:
            rows, at = rows + 1, 0
        at += width
    return rows
