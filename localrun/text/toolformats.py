"""The ways in which model families write tool calls, and how what they write is read. Which one holds is read off the chat template.

    Qwen, Hermes, Granite 4   <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Qwen3-Coder, Nemotron 3   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    GLM                       <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    Llama 3                   {"name": ..., "parameters": {...}}                  the whole reply, or behind <|python_tag|>
    Mistral                   [TOOL_CALLS][{"name": ..., "arguments": {...}}]     or [TOOL_CALLS]NAME[ARGS]{...}
    Granite 3                 <|tool_call|>[{"name": ..., "arguments": {...}}]
    Gemma 4                   <|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>
    DeepSeek                  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    Command R                 <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>
    and more in FORMATS below.

A reader gets what stands between a call's marks and returns the calls, or raises ValueError with the reason, for a person, why it cannot.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any] | str, str | None]
"""Name, arguments, and the id if the model gave one."""
Tools = Mapping[str, Mapping[str, Any]]
"""By name, the JSON Schema of a tool's parameters."""
Reader = Callable[[str, Tools], list[Call]]

_NAME = re.compile(r"[\w./:-]{1,128}")
_MOST_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    start: tuple[str, ...]
    """Marks that begin a call, or a list of them. Without any, the reply itself is a call if it begins with a brace."""
    end: tuple[str, ...]
    """Marks that end it. Without any, it ends with its JSON value."""
    read: Reader
    ignored: tuple[str, ...] = ()
    """Marks around calls that are neither text nor call."""
    json_body: bool = True
    """What stands between the marks is JSON, in whose strings an end mark is no end mark."""
    kept: str = ""
    """How much of the start mark belongs to what is read: its end, spelled out."""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.start + self.end + self.ignored


def tool_schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name, the schemas of tools given in OpenAI's form ({"type": "function", "function": {...}} or the function itself)."""
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return schemas


# ---- JSON ----


def read_json(body: str, tools: Tools) -> list[Call]:
    """One or more JSON values, each a call or a list of calls."""
    calls: list[Call] = []
    for value in _values(body):
        items = value if isinstance(value, list) else [value]
        calls += [_call_of(item, tools) for item in items]
    if not calls:
        raise ValueError("it holds no call")
    return calls


def _values(body: str) -> list[Any]:
    # Models put line breaks into strings; strict=False accepts them.
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    at = 0
    while True:
        while at < len(body) and (body[at].isspace() or body[at] in ",;"):
            at += 1
        if at >= len(body):
            return values
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError) as error:
            if not values and at == len(body) - len(body.lstrip()):
                return [_python_value(body, error)]
            raise ValueError(_why(error)) from None
        values.append(value)


def _python_value(body: str, error: Exception) -> Any:
    """Some models write Python's True, None and single quotes instead of JSON."""
    try:
        return ast.literal_eval(body.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(_why(error)) from None


def _why(error: Exception) -> str:
    return f"it is no JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else "it is nested too deep"


def _call_of(value: Any, tools: Tools) -> Call:
    if not isinstance(value, dict):
        raise ValueError("it is no object with a name and arguments")
    inner = value.get("function")
    if isinstance(inner, dict):
        value = {**value, **inner}
    name = next((value[key] for key in ("name", "tool_name", "function") if isinstance(value.get(key), str)), None)
    if name is None:
        if len(value) == 1:  # Apertus: {NAME: {...}}
            only, arguments = next(iter(value.items()))
            if isinstance(arguments, dict) and (only in tools or not tools):
                return only, arguments, None
        raise ValueError("it names no tool")
    arguments = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    call_id = next((value[key] for key in ("id", "tool_call_id") if isinstance(value.get(key), str) and value[key]), None)
    return _checked_name(name), _as_arguments(arguments), call_id


def _checked_name(name: str) -> str:
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError("it names no tool")
    return name


def _as_arguments(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        values = _values(arguments)
        arguments = values[0] if len(values) == 1 else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    return arguments


def _object(body: str) -> dict[str, Any]:
    """The one object that `body` is, perhaps in a Markdown fence."""
    text = body.strip()
    if text.startswith("```"):
        text = text.removeprefix("```").removeprefix("json").removesuffix("```")
    values = _values(text)
    if len(values) != 1:
        raise ValueError("its arguments are no object" if text.strip() else "it has no arguments")
    return _as_arguments(values[0])


# ---- a name, a mark, and JSON ----


def _read_parted(*marks: str) -> Reader:
    """NAME mark JSON; with two marks, ID mark NAME mark JSON."""

    def read(body: str, tools: Tools) -> list[Call]:
        parts = body.split(marks[-1], 1)
        if len(parts) != 2:
            raise ValueError("it has no arguments")
        head, arguments = parts
        call_id = None
        if len(marks) == 2:
            first, found, second = head.partition(marks[0])
            head, call_id = (second, first.strip() or None) if found else (first, None)
        return [(_checked_name(head), _object(arguments), call_id)]

    return read


def read_mistral(body: str, tools: Tools) -> list[Call]:
    """A JSON list, or NAME [CALL_ID] ID [ARGS] JSON, the middle part optional."""
    if body.lstrip()[:1] in ("[", "{"):
        return read_json(body, tools)
    head, found, arguments = body.partition("[ARGS]")
    if not found:
        raise ValueError("it has no arguments")
    name, _, call_id = head.partition("[CALL_ID]")
    return [(_checked_name(name), _object(arguments), call_id.strip() or None)]


def read_deepseek(body: str, tools: Tools) -> list[Call]:
    """NAME sep JSON, or in older models the word function, sep, NAME, line break, JSON in a fence."""
    head, found, rest = body.partition("<｜tool▁sep｜>")
    if not found:
        raise ValueError("it has no arguments")
    if head.strip() == "function" and not rest.lstrip().startswith("{"):
        head, _, rest = rest.strip().partition("\n")
    return [(_checked_name(head), _object(rest), None)]


def read_kimi(body: str, tools: Tools) -> list[Call]:
    """functions.NAME:INDEX mark JSON; all before the mark is the call's id."""
    head, found, arguments = body.partition("<|tool_call_argument_begin|>")
    if not found:
        raise ValueError("it has no arguments")
    call_id = head.strip()
    name = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
    return [(_checked_name(name), _object(arguments), call_id)]


# ---- tags ----

_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEYED = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKE = re.compile(r"<[^<>/\s]*invoke\s+name=\"([^\"]+)\"\s*>(.*?)(?:</[^<>\s]*invoke>|\Z)", re.DOTALL)
_INVOKED = re.compile(r"<[^<>/\s]*parameter\s+name=\"([^\"]+)\"(?:\s+string=\"(true|false)\")?\s*>(.*?)</[^<>\s]*parameter>", re.DOTALL)
_PARAM = re.compile(r"<param\s+name=\"([^\"]+)\"\s*>(.*?)</param>", re.DOTALL)


def read_function_tags(body: str, tools: Tools) -> list[Call]:
    """<function=NAME> with <parameter=KEY>VALUE</parameter> inside."""
    calls: list[Call] = []
    for name, inside in _FUNCTION.findall(body):
        name = _checked_name(name)
        calls.append((name, {key.strip(): typed(value, tools, name, key.strip()) for key, value in _PARAMETER.findall(inside)}, None))
    if not calls:
        raise ValueError("it names no function")
    return calls


def read_arg_keys(body: str, tools: Tools) -> list[Call]:
    """NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument."""
    name = _checked_name(body.partition("<arg_key>")[0])
    return [(name, {key: typed(value, tools, name, key) for key, value in _KEYED.findall(body)}, None)]


def read_invokes(body: str, tools: Tools) -> list[Call]:
    """<invoke name="NAME"> with <parameter name="KEY">VALUE</parameter> inside; tags may carry a prefix."""
    calls: list[Call] = []
    for name, inside in _INVOKE.findall(body):
        name = _checked_name(name)
        arguments = {
            key: value if is_string == "true" else typed(value, tools, name, key) for key, is_string, value in _INVOKED.findall(inside)
        }
        calls.append((name, arguments, None))
    if not calls:
        raise ValueError("it names no tool")
    return calls


def read_param_tags(body: str, tools: Tools) -> list[Call]:
    """"NAME"> with <param name="KEY">VALUE</param> behind it."""
    quoted, found, inside = body.partition(">")
    if not found:
        raise ValueError("it names no function")
    name = _checked_name(quoted.strip().strip('"'))
    return [(name, {key: typed(value, tools, name, key) for key, value in _PARAM.findall(inside)}, None)]


def typed(value: str, tools: Tools, name: str, key: str) -> Any:
    """A value that was written without quotes, as the type that the tool's schema gives it; unknown ones as JSON if they are, else text."""
    properties = tools.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    if "string" in kinds:
        return None if "null" in kinds and value.strip() == "null" else value
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError):
        if value.strip() in ("True", "False") and (not kinds or "boolean" in kinds):
            return value.strip() == "True"
        return value


# ---- other languages ----


def read_python_calls(body: str, tools: Tools) -> list[Call]:
    """[NAME(KEY=VALUE, ...), ...] as in Python, with constants as values."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls: list[Call] = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
                raise ValueError("it is no list of calls with named arguments")
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
            calls.append((_checked_name(ast.unparse(node.func)), arguments, None))
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("it is no list of calls with named arguments") from None
    if not calls:
        raise ValueError("it holds no call")
    return calls


def _read_braces(quote: str) -> Reader:
    """call:NAME{KEY:VALUE,...} as Gemma writes it: keys bare, texts between two of `quote`."""

    def read(body: str, tools: Tools) -> list[Call]:
        head, brace, _ = body.partition("{")
        name = _checked_name(head.strip().removeprefix("call:"))
        if not brace:
            raise ValueError("it has no arguments")
        value, end = _braced(body, len(head), quote, 0)
        if body[end:].strip() or not isinstance(value, dict):
            raise ValueError("its arguments do not end where it ends")
        return [(name, value, None)]

    return read


_BARE = re.compile(r"[^,{}\[\]<]+")


def _braced(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """The value at `at`, and where it ends."""
    if depth > _MOST_DEPTH:
        raise ValueError("it is nested too deep")
    while text[at : at + 1].isspace():
        at += 1
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise ValueError("a text in it has no end")
        return text[at + len(quote) : end], end + len(quote)
    opening = text[at : at + 1]
    if opening in ("{", "["):
        return _braced_items(text, at + 1, quote, depth + 1, "}" if opening == "{" else "]")
    bare = _BARE.match(text, at)
    if bare is None:
        raise ValueError("a value is missing")
    try:
        return json.loads(bare[0].strip()), bare.end()
    except ValueError:
        return bare[0].strip(), bare.end()


def _braced_items(text: str, at: int, quote: str, depth: int, closing: str) -> tuple[Any, int]:
    items: dict[str, Any] = {}
    values: list[Any] = []
    while True:
        while text[at : at + 1].isspace() or text[at : at + 1] == ",":
            at += 1
        if at >= len(text):
            raise ValueError(f"a {closing} is missing")
        if text[at] == closing:
            return (items if closing == "}" else values), at + 1
        if closing == "}":
            key, at = _braced_key(text, at, quote)
            items[key], at = _braced(text, at, quote, depth)
        else:
            value, at = _braced(text, at, quote, depth)
            values.append(value)


def _braced_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        colon = text.find(":", end)
        key = text[at + len(quote) : end]
    else:
        end = colon = text.find(":", at)
        key = text[at:colon].strip()
    if end < 0 or colon < 0 or not key:
        raise ValueError("a key is missing")
    return key, colon + 1


# ---- which format ----

def _between(name: str, start: str, end: str, read: Reader, *ignored: str, json_body: bool = True) -> ToolFormat:
    """A call between two marks."""
    return ToolFormat(name, (start,), (end,), read, ignored, json_body)


def _tags(name: str, start: str, end: str, read: Reader) -> ToolFormat:
    """A call between two marks, in some other language than JSON."""
    return ToolFormat(name, (start,), (end,), read, json_body=False)


_SOLAR = _read_parted("<|tool_call:name|>", "<|tool_call:args|>")
_DEEPSEEK_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI_AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_LLAMA3 = ToolFormat("llama3", (), (), read_json, ("<|python_tag|>",))
_LFM2 = _tags("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", read_python_calls)

FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|START_ACTION|>",), _between("command-r7b", "<|START_ACTION|>", "<|END_ACTION|>", read_json)),
    (("Action:", "tool_name"), ToolFormat("command-r", ("Action: ```json", "Action:\n```json", "Action:```json"), ("```",), read_json)),
    (
        ("<｜tool▁call▁begin｜>",),
        _between("deepseek", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read_deepseek, *_DEEPSEEK_AROUND),
    ),
    (("｜DSML｜", "function_calls"), _tags("dsml", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", read_invokes)),
    (("｜DSML｜",), _tags("dsml", "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", read_invokes)),
    (("<|tool_call_argument_begin|>",), _between("kimi", "<|tool_call_begin|>", "<|tool_call_end|>", read_kimi, *_KIMI_AROUND)),
    (("<|tool_call:begin|>",), _between("solar", "<|tool_call:begin|>", "<|tool_call:end|>", _SOLAR, "<|tool_calls|>")),
    (("<minimax:tool_call>",), _tags("minimax", "<minimax:tool_call>", "</minimax:tool_call>", read_invokes)),
    (("<seed:tool_call>",), _tags("seed", "<seed:tool_call>", "</seed:tool_call>", read_function_tags)),
    (("<|tool_call>", "<tool_call|>"), _tags("gemma", "<|tool_call>", "<tool_call|>", _read_braces('<|"|>'))),
    (("<start_function_call>",), _tags("function-gemma", "<start_function_call>", "<end_function_call>", _read_braces("<escape>"))),
    (("<|tool_call_start|>",), _LFM2),
    (("<|tool_list_start|>",), _LFM2),
    (("<|tools_prefix|>",), _between("apertus", "<|tools_prefix|>", "<|tools_suffix|>", read_json)),
    (("<TOOLCALL>",), _between("nemotron", "<TOOLCALL>", "</TOOLCALL>", read_json)),
    (("<tool_call>", "<function="), _tags("qwen3-coder", "<tool_call>", "</tool_call>", read_function_tags)),
    (("<tool_call>", "<arg_key>"), _tags("glm", "<tool_call>", "</tool_call>", read_arg_keys)),
    (("<tool_calls>",), _between("apriel", "<tool_calls>", "</tool_calls>", read_json)),
    (("<tool_call>",), _between("hermes", "<tool_call>", "</tool_call>", read_json)),
    (("<function name=", "<param name="), _tags("minicpm", "<function name=", "</function>", read_param_tags)),
    (("<function=", "</function>"), _between("functionary", "<function=", "</function>", _read_parted(">"))),
    (("[TOOL_CALLS]",), ToolFormat("mistral", ("[TOOL_CALLS]",), (), read_mistral)),
    (("<|tool_call|>", "<|/tool_call|>"), _between("phi-4", "<|tool_call|>", "<|/tool_call|>", read_json)),
    (("<|tool_call|>",), ToolFormat("granite", ("<|tool_call|>",), (), read_json)),
    (("<|function_call|>",), ToolFormat("gigachat", ("<|function_call|>",), (), read_json)),
    (("functools[",), ToolFormat("firefunction", ("functools[",), (), read_json, kept="[")),
    (("<|python_tag|>",), _LLAMA3),
    (("ipython", '"parameters"'), _LLAMA3),
    (('"name": function name',), _LLAMA3),
)
"""What a template's text must name, all of it, for a format to hold; the first that fits does."""

BARE_JSON = ToolFormat("json", (), (), read_json)
"""For templates that show tools without showing how a call looks: a reply that is a JSON object naming a tool is a call."""


def tool_format(source: str) -> ToolFormat | None:
    """The format that a chat template's text shows; None if it does not know tools."""
    for named, form in FORMATS:
        if all(mark in source for mark in named):
            return form
    return BARE_JSON if "tools" in source or ".Tools" in source else None
