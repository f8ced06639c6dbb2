"""The grammar of a reply that is a tool call, in llguidance's dialect of Lark: what a model writes under it, toolcalls.py can read, and the
arguments satisfy the tool's schema. How a family writes its calls is the table here; how they are read is toolformats.py's.

Marks that are control tokens stand in the grammar as tokens (`<[151657]>`), everything else as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localrun.errors import Unsupported
from localrun.text.harmony import is_harmony
from localrun.text.tokenizer import Tokenizer
from localrun.text.toolformats import tool_format, tool_schemas

_WHITESPACE = r"[ \n\r\t]{0,40}"
"""Between the parts of the arguments' JSON."""


@dataclass(frozen=True, slots=True)
class Written:
    """A family's calls. NAME, ARGS (the arguments as JSON), PARAMETERS, ID and NUMBER stand for what they say."""

    call: str
    first: str = ""
    last: str = ""
    between: str | None = "\n"
    """Between two calls; None: there is never more than one."""
    before_value: str = ""
    """Of a parameter of its own, with KEY and QUOTED (whether the value is text: true or false); its value follows."""
    after_value: str = ""


_HOLE = re.compile(r"(NAME|ARGS|PARAMETERS|ID|NUMBER)")
_LIST = '{"name": "NAME", "arguments": ARGS}'
_QWEN_TAGS = ("<parameter=KEY>\n", "\n</parameter>\n")
_DSML = '<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>\n'
_DSML_TAGS = ('<｜DSML｜parameter name="KEY" string="QUOTED">', "</｜DSML｜parameter>\n")

_WRITTEN: dict[str, Written] = {
    "hermes": Written('<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'),
    "qwen3-coder": Written("<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>", "", "", "\n", *_QWEN_TAGS),
    "seed": Written(
        "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>", "", "", "\n", "<parameter=KEY>", "</parameter>\n"
    ),
    "glm": Written("<tool_call>NAME\nPARAMETERS</tool_call>", "", "", "\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax": Written(
        '<invoke name="NAME">\nPARAMETERS</invoke>\n', "<minimax:tool_call>\n", "</minimax:tool_call>", "",
        '<parameter name="KEY">', "</parameter>\n",
    ),
    "dsml": Written(_DSML, "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", "", *_DSML_TAGS),
    "dsml-functions": Written(_DSML, "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", "", *_DSML_TAGS),
    "minicpm": Written('<function name="NAME">PARAMETERS</function>', "", "", "\n", '<param name="KEY">', "</param>"),
    "llama3": Written('{"name": "NAME", "parameters": ARGS}', between=None),
    "json": Written(_LIST, between=None),
    "mistral": Written(_LIST, "[TOOL_CALLS][", "]", ", "),
    "mistral-args": Written("[TOOL_CALLS]NAME[ARGS]ARGS", between=""),
    "granite": Written(_LIST, "<|tool_call|>[", "]", ", "),
    "phi-4": Written(_LIST, "<|tool_call|>[", "]<|/tool_call|>", ", "),
    "nemotron": Written(_LIST, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "apriel": Written(_LIST, "<tool_calls>[", "]</tool_calls>", ", "),
    "apertus": Written('{"NAME": ARGS}', "<|tools_prefix|>[", "]<|tools_suffix|>", ", "),
    "gigachat": Written("<|function_call|>" + _LIST, between=None),
    "firefunction": Written(_LIST, "functools[", "]", ", "),
    "functionary": Written("<function=NAME>ARGS</function>", between=""),
    "command-r7b": Written(
        '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGS}', "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", ",\n    "
    ),
    "command-r": Written('{"tool_name": "NAME", "parameters": ARGS}', "Action: ```json\n[\n    ", "\n]\n```", ",\n    "),
    "deepseek": Written(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", ""
    ),
    "deepseek-fenced": Written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>", "\n",
    ),
    "kimi": Written(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>", "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>", None,
    ),
    "solar": Written(
        "<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>", "<|tool_calls|>", between=None
    ),
    "harmony": Written("NAME <|constrain|>json<|message|>ARGS", between=None),
}  # fmt: skip


def call_grammar(
    source: str, tools: list[dict[str, Any]], names: list[str], tokenizer: Tokenizer, *, several: bool, after_thinking: bool
) -> str:
    """Lark text of a reply in the way of a chat template's text, which calls one of the tools called `names`, or several calls of them.

    Of harmony's calls, what stands in front of the tool's name (harmony.CALL) is left to engine/gate.py.
    tools: those the model was given, in OpenAI's form. after_thinking: the reply may begin with line breaks.
    Raises Unsupported for a family whose calls cannot be enforced.
    """
    written = _WRITTEN.get(_style(source))
    if written is None:
        raise Unsupported("tool_choice: the form in which this model calls tools cannot be enforced", param="tool_choice")
    schemas = tool_schemas(tools)
    rules = _Rules(tokenizer)
    calls = " | ".join(rules.call(written, name, schemas[name]) for name in names)
    rules.add("call", calls)
    more = f" ({rules.text(written.between)} call)*" if several and written.between is not None else ""
    start = f"{rules.text(written.first)} call{more} {rules.text(written.last)}"
    if after_thinking and not is_harmony(source):
        start = rf'("\n" | "\n\n")? {start}'
    return f"start: {start}\n" + "".join(f"{name}: {body}\n" for name, body in rules.made.items())


def _style(source: str) -> str:
    """Key into the table: the format's name, or a variant of it that the template shows."""
    if is_harmony(source):
        return "harmony"
    form = tool_format(source)
    name = form.name if form is not None else ""
    if name == "mistral" and "[ARGS]" in source:
        return "mistral-args"
    if name == "deepseek" and "```json" in source:
        return "deepseek-fenced"
    if name == "dsml" and "function_calls" in source:
        return "dsml-functions"
    return name


class _Rules:
    """Collects named rules."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.made: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        self.made[name] = body
        return name

    def text(self, text: str) -> str:
        """The text as a sequence of strings and control tokens; nothing for no text."""
        parts: list[str] = []
        plain = b""
        for token in self._tokenizer.encode(text, add_special=False):
            piece = self._tokenizer.piece(token)
            if piece:
                plain += piece
                continue
            parts += [_quoted(plain), f"<[{token}]>"]
            plain = b""
        return " ".join(part for part in [*parts, _quoted(plain)] if part)

    def call(self, written: Written, name: str, schema: Mapping[str, Any]) -> str:
        """The rule of a call of one tool."""
        number = len(self.made)
        body: list[str] = []
        # A hole's name stands alone between marks: what is split off is either a hole or text.
        for part in _HOLE.split(written.call.replace("[ARGS]", "\0")):
            if part == "NAME":
                body.append(_quoted(name.encode()))
            elif part == "ARGS":
                body.append(_json(_closed(schema)))
            elif part == "PARAMETERS":
                body += self._parameters(written, _closed(schema), number)
            elif part == "ID":
                body.append("/[a-z0-9]{10}/")
            elif part == "NUMBER":
                body.append("/[0-9]/")
            elif part:
                body.append(self.text(part.replace("\0", "[ARGS]")))
        return self.add(f"call{number}", " ".join(body))

    def _parameters(self, written: Written, schema: Mapping[str, Any], number: int) -> list[str]:
        """A rule for each property, in the schema's order; those that need not be there are optional."""
        properties = schema.get("properties")
        required = schema.get("required") or []
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        found = []
        for index, (key, inner) in enumerate((properties if isinstance(properties, dict) else {}).items()):
            inner = inner if isinstance(inner, dict) else {}
            name = f"call{number}_{index}"
            quoted = _is_text(inner)
            before = self.text(written.before_value.replace("KEY", key).replace("QUOTED", "true" if quoted else "false"))
            after = self.text(written.after_value)
            if not quoted:
                value = f"{_json({**definitions, **inner})} {after}"
            elif inner.get("enum"):
                value = f"({' | '.join(_quoted(str(one).encode()) for one in inner['enum'])}) {after}"
            else:
                # the text ends where the mark first stands; a mark that is a control token ends it anyway
                value = f"/(?s:.*)/ {after}" if "<[" in after else self._until(f"{name}_text", written.after_value)
            self.add(name, f"{before} {value}")
            found.append(name if key in required else f"{name}?")
        return found

    def _until(self, name: str, mark: str) -> str:
        self.made[f"{name}[suffix={_quoted(mark.encode())}]"] = "/(?s:.*)/"
        return name


def _is_text(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    if kind is None and schema.get("enum"):
        return all(isinstance(one, str) for one in schema["enum"])
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object of what the schema names: properties it does not name would satisfy it, and are never meant."""
    return {"additionalProperties": False, **schema, "type": "object"}


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def _quoted(text: bytes) -> str:
    return json.dumps(text.decode("utf-8"), ensure_ascii=False) if text else ""
