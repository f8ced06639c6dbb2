"""What a person sees while Markdown streams in, on an emulated terminal: at the end always what drawing it at once shows, whatever the
pieces, the width and the height were."""

from __future__ import annotations

import io
import itertools
import os
import random

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.cli.render import MarkdownWriter, PlainWriter, printable, rows_of

DOCUMENT = """\
# 안녕하세요

여기는 한국어 문단입니다. 이 문장은 화면의 너비를 넘어가도록 충분히 길게 써서 줄바꿈이 올바르게 되는지 확인합니다.
Second line with **bold**, *soft*, `code`, <b>html</b> and [a link](http://example.com/x).

1. first
2. second, which is long enough that it has to be wrapped on a terminal of the usual width, at least once
   - nested
   ```sh
   ls -la
   ```

```python
def hello(name: str) -> str:
    \"\"\"Doc
    string.\"\"\"

    return "a line that is much longer than the terminal is wide, 한국어 too, and the terminal wraps it 한국어 한국어 한국어"
```

| name | 값 |
|------|----|
| a    | 한글 |

> quoted
> twice

* * *

Last words.
"""


class Terminal(io.StringIO):
    """A terminal with all the scroll-back there is."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, lines, history=100_000, ratio=0.0001)
        self.screen.set_mode(pyte.modes.LNM)
        self.stream = pyte.Stream(self.screen)
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        # pyte prints the letter of private modes it does not know, as no terminal does
        self.writes.append(text)
        self.stream.feed(text.replace("\x1b[?2026h", "").replace("\x1b[?2026l", ""))
        return len(text)

    def text(self) -> str:
        """Scroll-back and screen, without trailing blanks."""
        columns = self.screen.columns
        rows = [*self.screen.history.top, *(self.screen.buffer[row] for row in range(self.screen.lines))]
        lines = ["".join(row[column].data for column in range(columns)).rstrip() for row in rows]
        return "\n".join(lines).rstrip("\n")


def shown(pieces: list[str], columns: int, lines: int, *, frame: float = 1.0) -> str:
    terminal = Terminal(columns, lines)
    ticks = itertools.count()
    writer = MarkdownWriter(terminal, lambda: os.terminal_size((columns, lines)), clock=lambda: next(ticks) * frame)
    for piece in pieces:
        writer.feed(piece)
    writer.finish()
    return terminal.text()


def cut(text: str, seed: int) -> list[str]:
    """The text in random pieces, a few characters each, as tokens are."""
    random_ = random.Random(seed)
    pieces = []
    while text:
        length = random_.choice((1, 2, 3, 5, 8, 40))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("columns", [30, 71, 120])
def test_streaming_ends_as_drawing_at_once(seed: int, columns: int) -> None:
    assert shown(cut(DOCUMENT, seed), columns, 50) == shown([DOCUMENT], columns, 50)


@given(
    blocks=st.lists(
        st.sampled_from(
            [
                "word " * 30, "한국어 " * 20, "# Title", "```\ncode\n\nmore\n```", "    indented\n", "> quote", "* a\n* b\n", "1. x",
                "para\nline", "***",
            ]
        ),
        max_size=8,
    ),
    seed=st.integers(0, 1000),
    columns=st.integers(12, 100),
    frame=st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_any_document_in_any_pieces(blocks: list[str], seed: int, columns: int, frame: float) -> None:
    document = "\n\n".join(blocks)
    assert shown(cut(document, seed), columns, 200, frame=frame) == shown([document], columns, 200)


def test_long_answer_scrolls_and_loses_nothing() -> None:
    """A paragraph, a list and a fence each taller than the screen: lines out of reach stay as they were."""
    code = "```python\n" + "".join(f"value_{number} = {number}\n" for number in range(60)) + "```\n"
    items = "".join(f"- item {number}\n" for number in range(60))
    words = " ".join(f"word{number}" for number in range(400))
    document = f"{words}\n\n{items}\n{code}\nEnd.\n"
    text = shown(cut(document, 1), 60, 10)
    assert text == shown([document], 60, 500)
    for name in [f"value_{number} = {number}" for number in range(60)] + [f"item {number}" for number in range(60)] + ["word399"]:
        assert text.count(f"{name}\n") + text.count(f"{name} ") == 1, name


def test_unchanged_lines_are_not_written_again() -> None:
    """No flicker: while the third paragraph grows, the bytes of the first two do not come again."""
    terminal = Terminal(80, 24)
    ticks = itertools.count()
    writer = MarkdownWriter(terminal, lambda: os.terminal_size((80, 24)), clock=lambda: float(next(ticks)))
    for piece in ["first paragraph\n\n", "second paragraph\n\n", *("growing " * 40).split()]:
        writer.feed(piece + " ")
    writer.finish()
    everything = "".join(terminal.writes)
    assert everything.count("first paragraph") == everything.count("second paragraph") == 1
    assert "\x1b[2J" not in everything


def test_fences_stay_and_long_code_lines_are_whole() -> None:
    """What is copied from the terminal is the code: one line is written as one line, however wide the terminal is."""
    line = "x = " + " + ".join(f"name_{number}" for number in range(40))
    out = Terminal(40, 200)
    writer = MarkdownWriter(out, lambda: os.terminal_size((40, 200)), color=None)
    writer.feed(f"```python\n{line}\n\ty = 1\n```\n")
    writer.finish()
    assert "".join(out.writes).split("\n") == ["```python", line, "    y = 1", "```", ""]


def test_no_frame_before_its_time() -> None:
    """Drawing must not take the cores from the model: pieces that come together are drawn together."""
    out = Terminal(80, 24)
    writer = MarkdownWriter(out, lambda: os.terminal_size((80, 24)), clock=lambda: 0.0)
    for word in ["one", "two", "three"]:
        writer.feed(word + " ")
    assert len(out.writes) == 1
    writer.finish()
    assert out.text() == "one two three"


def test_resize_leaves_what_is_there() -> None:
    size = [os.terminal_size((60, 24))]
    out = Terminal(60, 24)
    ticks = itertools.count()
    writer = MarkdownWriter(out, lambda: size[0], clock=lambda: float(next(ticks)))
    writer.feed("done\n\ngrow\ning ")
    size[0] = os.terminal_size((40, 24))
    writer.feed("more")
    writer.finish()
    assert out.text().split("\n") == ["done", "", "grow", "ing", "", "grow", "ing more"]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9b2J\r\nc\td") == "a�[31mb��2J\nc\td"
    assert "\x1b]0;" not in "".join(_written("title \x1b]0;owned\x07"))


@pytest.mark.parametrize("off", [False, True])
def test_colours_can_be_refused(monkeypatch: pytest.MonkeyPatch, off: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if off:
        monkeypatch.setenv("NO_COLOR", "1")
    text = "".join(_written("**bold** and `code`\n\n```python\nimport os\n```\n", color="truecolor"))
    assert ("\x1b[36m" in text) is not off
    assert "\x1b[1m" in text


def _written(text: str, color: str | None = None) -> list[str]:
    out = Terminal(80, 24)
    writer = MarkdownWriter(out, lambda: os.terminal_size((80, 24)), color=color)
    writer.feed(text)
    writer.finish()
    return out.writes


def test_plain_text_is_left_alone() -> None:
    out = io.StringIO()
    writer = PlainWriter(out, clean=False)
    for piece in ["**a** <b>", "\x1b[1m", "\n\nend"]:
        writer.feed(piece)
    writer.finish()
    writer.finish()
    assert out.getvalue() == "**a** <b>\x1b[1m\n\nend\n"


@pytest.mark.parametrize(
    ("text", "columns", "rows"),
    [("", 10, 1), ("a" * 10, 10, 1), ("a" * 11, 10, 2), ("한" * 5, 10, 1), ("a" + "한" * 5, 10, 2), ("한" * 3, 3, 3)],
)
def test_rows(text: str, columns: int, rows: int) -> None:
    assert rows_of(text, columns) == rows
