"""Whether a call's arguments are what the tool's schema asks for. A call whose are not goes out all the same, for whoever made the tool can
tell the model what is wrong with it; but it is said.

Schemas are the clients': nothing is fetched for a reference, and patterns are matched in linear time.
"""

from __future__ import annotations

from typing import Any

from localrun.messages import ToolCall
from localrun.text.toolformats import tool_schemas

_LONGEST = 200


class ArgumentCheck:
    """Of one request's tools."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        """tools: in OpenAI's form."""
        self._schemas = tool_schemas(tools)
        self._made: dict[str, Any] = {}

    def problem(self, call: ToolCall) -> str:
        """One line that says where the arguments break the schema first; empty if nowhere."""
        if call.name not in self._schemas:
            return f"there is no tool {call.name!r}"
        if not isinstance(call.arguments, dict):
            return f"the arguments of {call.name} are no object"
        # here, not above: it takes a moment, and most runners see no tools
        import jsonschema_rs

        try:
            validator = self._made.get(call.name)
            if validator is None:
                validator = jsonschema_rs.validator_for(
                    self._schemas[call.name], offline=True, pattern_options=jsonschema_rs.RegexOptions()
                )
                self._made[call.name] = validator
        except (ValueError, TypeError) as error:
            return _line(f"the schema of {call.name} is not valid, its arguments were not checked: {error}")
        first = next(validator.iter_errors(call.arguments), None)
        if first is None:
            return ""
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first.instance_path)
        return _line(f"the arguments of {call.name}{place} break its schema: {first.message}")


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
