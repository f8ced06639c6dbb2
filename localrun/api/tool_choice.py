"""What `tool_choice` asks for, in the forms of three dialects: which tools the model is shown, and which of them it must call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from localrun.errors import BadRequest, Unsupported
from localrun.text.toolformats import tool_schemas


class Choice(NamedTuple):
    """Tools in OpenAI's form, and the names of those of which one must be called."""

    tools: list[dict[str, Any]]
    must_call: list[str]


def choose(choice: str | Mapping[str, Any] | None, tools: Sequence[dict[str, Any]], model: str, capabilities: frozenset[str]) -> Choice:
    """choice: "auto", "none", "required", a function by name, or OpenAI's list of allowed tools. capabilities: of the model of that name.

    Raises BadRequest for what is none of these, names no tool or has no tools to choose from; Unsupported where the model calls no tools.
    """
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice needs tools", param="tool_choice")
        return Choice([], [])
    if "tools" not in capabilities:
        raise Unsupported(f"{model} does not support tools", param="tools")
    known = list(tool_schemas(list(tools)))
    if choice in (None, "auto"):
        return Choice(list(tools), [])
    if choice == "required":
        return Choice(list(tools), known)
    mode, names = _named(choice)
    for name in names:
        if name not in known:
            raise BadRequest(f"tool_choice: there is no tool {json.dumps(name)}", param="tool_choice")
    if mode == "function":
        return Choice(list(tools), names)
    allowed = [tool for tool in tools if not set(names).isdisjoint(tool_schemas([tool]))]
    return Choice(allowed, names if mode == "required" else [])


def _named(choice: str | Mapping[str, Any]) -> tuple[str, list[str]]:
    """(function, [its name]), or (auto or required, allowed names)."""
    wrong = BadRequest(f'tool_choice: {json.dumps(choice)} is none of "auto", "none", "required" or a function', param="tool_choice")
    if isinstance(choice, str):
        raise wrong
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "function", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": [_, *_] as allowed}}:
            pass
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": [_, *_] as allowed}:
            pass
        case _:
            raise wrong
    return mode, [_named(one)[1][0] for one in allowed]
