"""Chat templates in Go's language, as Ollama's Modelfiles and registry carry them: a conversation in, the prompt out.

Knows what such templates are given and how they are used; the language is gotemplate.py's.

    .System .Prompt .Response .Suffix          one turn: a template that does not name .Messages is executed for each
    .Messages[] .Role .Content .Thinking .Images .ToolCalls[].Function.{Name,Arguments,Index} .ToolName .ToolCallID
    .Tools[] .Type .Function.{Name,Description,Parameters.{Type,Required,Properties}}
    .Think .ThinkLevel .IsThinkSet
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from typing import Any

from localrun.errors import TemplateError
from localrun.text import gosyntax
from localrun.text.gosyntax import Action, Branch, Field, Node, Pipe, Text, Tree
from localrun.text.gotemplate import GoTemplate
from localrun.text.govalues import Record, ShownDict, ShownList, ShownText
from localrun.text.template import ChatTemplate, TokenTexts


class GoChatTemplate(ChatTemplate):
    """A chat template in Go's language. Immutable; safe to use from several threads."""

    def __init__(self, source: str, **tokens: str) -> None:
        """tokens: texts of the special tokens, which such templates spell out themselves. Raises TemplateError, one line, when `source` is
        no valid template."""
        self.source = source
        self.tool_source = None
        self.fallback = False
        self._tokens = TokenTexts(**(dict.fromkeys(TokenTexts.__annotations__, "") | tokens))  # type: ignore[typeddict-item]
        template = GoTemplate(source)
        self._names = set(_names(template.tree))
        if not {"Messages", "Response"} & self._names:
            # a template for one turn that forgot the answer: it goes to the end
            response = Action(Pipe(1, (gosyntax.Command((Field(("Response",)),)),)))
            template = GoTemplate(source, Tree((*template.tree.body, response), template.tree.defined))
        self._whole = template
        self._open = GoTemplate(source, Tree(_cut(template.tree.body)[0], template.tree.defined))
        """Without what comes after the answer: the prompt ends where the model goes on."""

    @property
    def supports_tools(self) -> bool:
        return "Tools" in self._names

    @property
    def knows_levels(self) -> bool:
        return "ThinkLevel" in self._names

    @property
    def supports_thinking(self) -> bool:
        return "Thinking" in self._names or "Think" in self._names or "<think>" in self.source

    @property
    def supports_suffix(self) -> bool:
        """Whether it can ask for a text to be filled into the middle."""
        return "Suffix" in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        define_absent: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text, up to where the model goes on: such a template decides itself whether that is a new answer or the one
        that the conversation ends with, so add_generation_prompt changes nothing; nor does define_absent.

        messages, tools, now: as in ChatTemplate. variables: enable_thinking and reasoning_effort become .Think and .ThinkLevel; others have
        no place in these templates. Raises TemplateError: one line.
        """
        thinks, level = variables.get("enable_thinking"), variables.get("reasoning_effort")
        common = {
            "Think": bool(thinks if thinks is not None else level),
            "ThinkLevel": level if isinstance(level, str) else "",
            "IsThinkSet": thinks is not None or level is not None,
        }
        joined = _joined(messages)
        system = "\n\n".join(str(one.get("content") or "") for one in joined if one["role"] == "system")
        if "Messages" in self._names:
            given = {"System": system, "Messages": [_message(one) for one in joined], "Tools": _tools(tools), "Response": ""}
            return self._whole.execute(given | common, now)
        return self._turns(joined, common, now)

    def fill(self, prompt: str, suffix: str, now: datetime | None = None) -> str:
        """The prompt that asks for the text between `prompt` and `suffix`. Raises TemplateError."""
        if not self.supports_suffix:
            raise TemplateError("the template has no place for a suffix")
        given = {"Prompt": prompt, "Suffix": suffix, "Response": "", "Think": False, "ThinkLevel": "", "IsThinkSet": False}
        return self._whole.execute(given, now)

    def _turns(self, messages: list[dict[str, Any]], common: dict[str, Any], now: datetime | None) -> str:
        """One execution for each turn; the last one stops where the answer begins."""
        text = ""
        turn = {"System": "", "Prompt": "", "Response": ""}

        def write() -> None:
            nonlocal text, turn
            text += self._whole.execute(turn | common, now)
            turn = {"System": "", "Prompt": "", "Response": ""}

        for message in messages:
            role, content = message["role"], str(message.get("content") or "")
            if role == "system":
                if turn["Prompt"] or turn["Response"]:
                    write()
                turn["System"] = content
            elif role == "user":
                if turn["Response"]:
                    write()
                turn["Prompt"] = content
            elif role == "assistant":
                turn["Response"] = content
            else:
                raise TemplateError(f"the template knows system, user and assistant, and the conversation has a message of role {role!r}")
        return text + self._open.execute(turn | common, now)


# ---- the tree -------------------------------------------------------------------------------------------------------------------


def _names(part: Any) -> Iterator[str]:
    """The names of all fields that a template looks at, its variables' and those in the templates it defines included."""
    if isinstance(part, Text):
        return
    if isinstance(part, (Field, gosyntax.Variable, gosyntax.Chain)):
        yield from part.names
    if isinstance(part, dict):
        part = tuple(part.values())
    if isinstance(part, tuple):
        for one in part:
            yield from _names(one)
    elif is_dataclass(part):
        for one in fields(part):
            yield from _names(getattr(part, one.name))


def _cut(body: tuple[Node, ...]) -> tuple[tuple[Node, ...], bool]:
    """`body` up to and with the first action that writes .Response, and whether there is one. A branch that holds it ends with it."""
    kept: list[Node] = []
    for node in body:
        if isinstance(node, Action) and _writes_response(node.pipe):
            return (*kept, node), True
        if isinstance(node, Branch):
            inner, found = _cut(node.body)
            if found:
                return (*kept, replace(node, body=inner, otherwise=())), True
            otherwise, found = _cut(node.otherwise)
            if found:
                return (*kept, replace(node, otherwise=otherwise)), True
        kept.append(node)
    return tuple(kept), False


def _writes_response(pipe: Pipe) -> bool:
    return any("Response" in operand.names for command in pipe.commands for operand in command.operands if isinstance(operand, Field))


# ---- what the template is given ---------------------------------------------------------------------------------------------------


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role as one message, a blank line between; tools' answers stay apart."""
    result: list[dict[str, Any]] = []
    for message in messages:
        one = {**message, "role": str(message.get("role", ""))}
        if result and one["role"] == result[-1]["role"] and one["role"] != "tool":
            parts = [str(part) for part in (result[-1].get("content"), one.get("content")) if part]
            result[-1]["content"] = "\n\n".join(parts)
            for key in ("tool_calls", "images"):
                if one.get(key):
                    result[-1][key] = [*(result[-1].get(key) or []), *one[key]]
        else:
            result.append(one)
    return result


def _message(message: Mapping[str, Any]) -> Record:
    calls = [_call(index, call) for index, call in enumerate(message.get("tool_calls") or [])]
    return Record(
        {
            "Role": message["role"],
            "Content": str(message.get("content") or ""),
            "Thinking": str(message.get("thinking") or message.get("reasoning_content") or ""),
            "Images": list(message.get("images") or []),
            "ToolCalls": calls,
            "ToolName": str(message.get("tool_name") or message.get("name") or ""),
            "ToolCallID": str(message.get("tool_call_id") or ""),
        },
        dict(message),
    )


def _call(index: int, call: Mapping[str, Any]) -> Record:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    inner = Record(
        {"Index": function.get("index", index), "Name": str(function.get("name", "")), "Arguments": _shown(arguments)},
        {"name": function.get("name", ""), "arguments": _shown(arguments)},
    )
    return Record({"ID": str(call.get("id") or ""), "Function": inner}, {"function": inner.plain})


def _shown(value: Any) -> Any:
    """A value of JSON that prints as JSON, its keys in their order."""
    if isinstance(value, Mapping):
        return ShownDict({str(key): _shown(one) for key, one in value.items()})
    if isinstance(value, list):
        return ShownList(_shown(one) for one in value)
    return value


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> ShownList:
    return ShownList(_tool(tool) for tool in tools or [])


def _ordered(value: Mapping[str, Any], first: Sequence[str]) -> ShownDict:
    """The keys named in `first` in that order, then the rest in theirs."""
    keys = [*(key for key in first if key in value), *(key for key in value if key not in first)]
    return ShownDict({key: value[key] for key in keys})


def _tool(tool: Mapping[str, Any]) -> Record:
    function = tool.get("function") or {}
    parameters = function.get("parameters") or {}
    properties = {str(key): _property(one) for key, one in (parameters.get("properties") or {}).items()}
    plain_parameters = _ordered(
        {**_shown(parameters), "properties": ShownDict({key: one.plain for key, one in properties.items()})},
        ("type", "$defs", "items", "required", "properties"),
    )
    about = Record(
        {
            "Type": str(parameters.get("type", "")),
            "Required": list(parameters.get("required") or []),
            "Properties": ShownDict(properties),
            "Defs": _shown(parameters.get("$defs")),
            "Items": _shown(parameters.get("items")),
        },
        plain_parameters,
        shows=True,
    )
    plain_function = _ordered({**_shown(function), "parameters": plain_parameters}, ("name", "description", "parameters"))
    inner = Record(
        {"Name": str(function.get("name", "")), "Description": str(function.get("description", "")), "Parameters": about},
        plain_function,
        shows=True,
    )
    plain = _ordered({**_shown(tool), "function": plain_function}, ("type", "items", "function"))
    return Record({"Type": str(tool.get("type", "")), "Items": _shown(tool.get("items")), "Function": inner}, plain, shows=True)


def _kinds(kinds: Any) -> ShownText:
    found = ShownText([kinds] if isinstance(kinds, str) else kinds)
    found.plain = kinds
    return found


def _property(schema: Any) -> Record:
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = schema.get("type") or []
    plain = _ordered(_shown(schema), ("anyOf", "type", "items", "description", "enum", "properties", "required"))
    return Record(
        {
            "Type": _kinds(kinds),
            "Description": str(schema.get("description", "")),
            "Enum": list(schema.get("enum") or []),
            "Items": _shown(schema.get("items")),
            "AnyOf": _shown(schema.get("anyOf")),
            "Properties": ShownDict({str(key): _property(one) for key, one in (schema.get("properties") or {}).items()}),
            "Required": list(schema.get("required") or []),
        },
        plain,
    )
