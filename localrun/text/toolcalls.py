"""Tool calls in a reply that arrives in pieces. Text streams until a call is certain to have begun; a call comes when it is complete.

What looks like a call and cannot be read comes back as the text it is, with the reason. How a family writes its calls is toolformats.py's.

Small models forget their family's marks and begin the reply with the call's JSON, or with that in a Markdown fence (Qwen2.5-Coder does
both): it is a call where it names a tool, and text where not.
"""

from __future__ import annotations

import re
from typing import Any

from localrun.messages import ToolCall
from localrun.text.parts import CallPart, NewId, Part, TextPart, new_call_id
from localrun.text.stops import overlap
from localrun.text.toolformats import Call, ToolFormat, read_json, tool_schemas

_LONGEST_CALL = 1 << 20
_LONGEST_HEAD = 256
"""Characters that may stand before a call's JSON where the JSON's end is the call's."""


class ToolCallParser:
    """Splits a reply into text and tool calls. White space between text and calls, and between calls, belongs to neither."""

    def __init__(self, form: ToolFormat, tools: list[dict[str, Any]], *, new_id: NewId = new_call_id) -> None:
        """tools: those the model was given, in OpenAI's form."""
        self._form = form
        self._tools = tool_schemas(tools)
        self._new_id = new_id
        self._outer = (*form.start, *form.ignored)
        self._buffer = ""
        self._start: str | None = None
        """The mark that the call under way began with; None between calls."""
        self._end = _JsonEnd()
        self._searched = 0
        self._space = ""
        """White space that is text only if text follows it."""
        self._after_call = False
        self._may_begin = True
        """Whether a call without a mark may begin here: the reply does, or a call ended, or an ignored mark came."""
        self._fence = ""
        """The Markdown fence that stood before a call without a mark."""
        self._fenced = False
        """Whether a fence that a call stood in is still to be closed: it belongs to neither text nor call."""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._buffer += text
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        while self._start is not None:
            # The end mark may be missing where the model stops instead; inside a string it was perhaps one after all.
            found = self._first_end(0)
            if found is None or self._readable():
                body, self._buffer = self._buffer, ""
                self._finish(body, "", parts)
            else:
                self._finish_at(*found, parts)
            while self._step(parts):
                pass
        self._text(self._buffer, parts)
        self._buffer = ""
        if self._space and not self._after_call:
            parts.append(TextPart(self._space))
        self._space = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Takes what is certain out of the buffer; returns whether more may be."""
        if self._start is not None:
            return self._inside(parts)
        if self._fenced:
            closing = _FENCE_END.match(self._buffer)
            if closing:
                self._buffer, self._fenced = self._buffer[closing.end() :], False
                return True
            if _FENCE_END_BEGUN.fullmatch(self._buffer):
                return False
        if self._may_begin:
            bare = self._bare()
            if bare is None:
                return False
            if bare:
                return True
        found = min(((at, -len(mark), mark) for mark in self._outer if (at := self._buffer.find(mark)) >= 0), default=None)
        if found is None:
            keep = max((overlap(self._buffer, mark) for mark in self._outer), default=0)
            cut = len(self._buffer) - keep
            self._text(self._buffer[:cut], parts)
            self._buffer = self._buffer[cut:]
            return False
        at, _, mark = found
        self._text(self._buffer[:at], parts)
        self._buffer = self._buffer[at + len(mark) :]
        if mark in self._form.start:
            self._buffer = self._form.kept + self._buffer
            self._begin(mark)
        else:
            self._may_begin = True
        return True

    def _bare(self) -> bool | None:
        """Whether a call without a mark begins here; None if that is not certain yet."""
        begun = self._buffer.lstrip(" \t\r\n;," if self._after_call else None)
        if not begun:
            return None if not self._form.start else False
        fence = _FENCE.match(begun)
        match = _FIRST_KEY.match(begun, fence.end() if fence else 0)
        if match is None:
            return None if _FIRST_KEY_BEGUN.fullmatch(begun) else False
        if match[1] not in (_NAMING_KEYS if self._form.start else _CALL_KEYS):
            self._may_begin = False
            return False
        if not self._after_call:
            self._space += self._buffer[: len(self._buffer) - len(begun)]
        self._buffer = begun[match.start() :]
        self._begin("")
        self._fence = begun[: match.start()]
        return True

    def _begin(self, mark: str) -> None:
        self._start = mark
        self._fence = ""
        self._end = _JsonEnd()
        self._searched = 0

    def _inside(self, parts: list[Part]) -> bool:
        if not self._form.end or not self._start:
            end = self._end.of(self._buffer)
            if end is not None:
                body, self._buffer = self._buffer[:end], self._buffer[end:]
                self._finish(body, "", parts)
                return True
            return self._end.hopeless(self._buffer) and self._give_up("it is no JSON", parts)
        while (found := self._first_end(self._searched)) is not None:
            at, mark = found
            if not (self._form.json_body and _in_string(self._buffer[:at])):
                self._finish_at(at, mark, parts)
                return True
            self._searched = at + len(mark)
        self._searched = max(self._searched, len(self._buffer) - max(map(len, self._form.end)) + 1)
        return len(self._buffer) > _LONGEST_CALL and self._give_up("it does not end", parts)

    def _first_end(self, start: int) -> tuple[int, str] | None:
        if not self._start:
            return None
        return min(((at, mark) for mark in self._form.end if (at := self._buffer.find(mark, start)) >= 0), default=None)

    def _read(self, body: str) -> list[Call]:
        read = self._form.read if self._start or not self._form.start else read_json
        return read(body, self._tools)

    def _readable(self) -> bool:
        try:
            self._read(self._buffer)
        except ValueError:
            return False
        return True

    def _finish_at(self, at: int, mark: str, parts: list[Part]) -> None:
        body, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        self._finish(body, mark, parts)

    def _finish(self, body: str, end: str, parts: list[Part]) -> None:
        """The call between its marks is read, or else is text."""
        start = self._start or ""
        try:
            calls = self._read(body)
            unknown = next((name for name, _, _ in calls if name not in self._tools), None)
            if not start and unknown is not None:
                raise ValueError(f"there is no tool {unknown!r}")
        except ValueError as error:
            self._is_none(body + end, str(error), parts)
            return
        self._start = None
        self._space = ""
        self._after_call = self._may_begin = True
        self._fenced = self._fenced or bool(self._fence)
        parts += [CallPart(ToolCall(id=call_id or self._new_id(), name=name, arguments=arguments)) for name, arguments, call_id in calls]

    def _give_up(self, reason: str, parts: list[Part]) -> bool:
        body, self._buffer = self._buffer[:_LONGEST_HEAD], self._buffer[_LONGEST_HEAD:]
        self._is_none(body, reason, parts)
        return True

    def _is_none(self, body: str, reason: str, parts: list[Part]) -> None:
        text = self._space + self._fence + (self._start or "").removesuffix(self._form.kept) + body
        self._start = None
        self._space = ""
        self._after_call = self._may_begin = False
        parts.append(TextPart(text, f"what looked like a tool call is none: {reason}"))

    def _text(self, text: str, parts: list[Part]) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = self._may_begin = self._fenced = False
            parts.append(TextPart(shown))


_CALL_KEYS = ("name", "type", "function", "id", "parameters", "arguments", "tool_name")
_NAMING_KEYS = ("name", "type", "function", "tool_name")
"""First keys of a call in a family that has marks for one, and whose text would be held back for nothing."""
_FENCE = re.compile(r"```(?:json)?\s*")
_FENCE_END = re.compile(r"\s*```")
_FENCE_END_BEGUN = re.compile(r"\s*`{0,2}")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_FIRST_KEY_BEGUN = re.compile(r'(?:`{1,2}|```(?:j|js|jso)?|(?:```(?:json)?\s*)?(?:\{\s*(?:"[^"\\]*)?)?)')
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class _JsonEnd:
    """Finds where the first JSON object or list in a growing text ends, looking at each character once."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quoted = False
        self._escaped = -1
        self._began = False

    def of(self, text: str) -> int | None:
        """The index behind the value's end, or None as long as it has not ended. `text` must begin with what was given before."""
        if not self._began:
            begin = _json_begin(text)
            if begin is None:
                return None
            self._began = True
            self._at = begin
        for match in _STRUCTURE.finditer(text, self._at):
            at, character = match.start(), match[0]
            if at == self._escaped:
                continue
            if character == "\\":
                self._escaped = at + 1 if self._quoted else -1
            elif character == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return None

    def hopeless(self, text: str) -> bool:
        """Whether no value will come: none began within the first characters, or it is too long."""
        return len(text) > _LONGEST_CALL or (not self._began and len(text) >= _LONGEST_HEAD)


def _json_begin(text: str) -> int | None:
    """Where a call's JSON begins: at once, or behind NAME[ARGS] (Mistral)."""
    head = text[:_LONGEST_HEAD]
    stripped = head.lstrip()
    if stripped[:1] in ("{", "["):
        return len(head) - len(stripped)
    mark = head.find("[ARGS]")
    if mark < 0:
        return None
    brace = head.find("{", mark)
    return brace if brace >= 0 else None


def _in_string(text: str) -> bool:
    """Whether JSON that begins somewhere in `text` is inside a string at its end."""
    quoted = False
    escaped = -1
    for match in re.finditer(r'["\\]', text):
        if match.start() == escaped:
            continue
        if match[0] == "\\":
            escaped = match.start() + 1 if quoted else -1
        else:
            quoted = not quoted
    return quoted
