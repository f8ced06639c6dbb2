"""Anthropic's dialect: bodies of /v1/messages to `messages.Generate`, events to its objects, errors to its shape.

Departures from Ollama's copy of the dialect: token counts are counts and not guesses, `stop_sequence` is reported, a mistake in a stream is
an error event, and a model that does not think says so when it is told to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localrun.api.answer import Answer, Outcome, new_id, remarks
from localrun.api.anthropic_schema import Block, CountTokensBody, MessagesBody, ResultPart, ToolChoice, ToolIn
from localrun.api.options import ModelDefaults, adapters, checked_options, merged, sampling
from localrun.api.tool_choice import choose
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.messages import Generate, Message, Piece, Started, ToolCall

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


# ---- requests -----------------------------------------------------------------------------------------------------------------


def check(body: CountTokensBody) -> None:
    """Raises BadRequest for what must be there and is not. Done before the model is touched."""
    if not body.model:
        raise BadRequest("model is required", param="model")
    if isinstance(body, MessagesBody) and body.max_tokens <= 0:
        raise BadRequest("max_tokens is required and must be positive", param="max_tokens")
    if not body.messages:
        raise BadRequest("messages is required", param="messages")
    if isinstance(body, MessagesBody):
        options_of(body)


def options_of(body: MessagesBody) -> dict[str, Any]:
    """The body's sampling fields as Ollama options. Raises BadRequest."""
    names = ("temperature", "top_p", "top_k", "seed", "num_ctx")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return checked_options({**body.options, **given, **({"stop": body.stop_sequences} if body.stop_sequences else {})})


def count_request(body: CountTokensBody, model: ModelDefaults, request_id: str) -> Generate:
    """The prompt alone. Raises BadRequest or Unsupported for what the model cannot do."""
    return Generate(request_id=request_id, **_prompt(body, model))


def messages_request(body: MessagesBody, model: ModelDefaults, request_id: str) -> Generate:
    """Raises BadRequest or Unsupported for what the model cannot do."""
    options = merged(options_of(body), model, DEFAULTS)
    return Generate(
        request_id=request_id,
        sampling=sampling(options),
        stop=options["stop"],
        max_tokens=body.max_tokens,
        draft_num_predict=options.get("draft_num_predict", -1),
        draft_rule=options.get("draft_rule", "exact"),
        session=options.get("session", False),
        num_beams=options.get("num_beams", 1),
        length_penalty=options.get("length_penalty", 1.0),
        num_ctx=options["num_ctx"],
        overflow=body.overflow,
        **adapters(options, model),
        deadline_s=body.timeout or 0.0,
        **_prompt(body, model),
    )


def _prompt(body: CountTokensBody, model: ModelDefaults) -> dict[str, Any]:
    if "completion" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support chat', param="model")
    system = body.system if isinstance(body.system, str) else "\n\n".join(block.text for block in body.system)
    conversation = [*model.messages, *read_messages(body)]
    system = system or model.system or ""
    if system:
        conversation.insert(0, Message(role="system", content=system))
    tools, must_call = choose(_choice(body.tool_choice), [_tool(tool) for tool in body.tools], model.name, model.capabilities)
    return {
        "messages": conversation,
        "tools": tools or None,
        "must_call": must_call,
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "think": _think(body, model),
        "thinking_budget": _budget(body, model),
        "format": _format(body),
        "template": model.template,
    }


def read_messages(body: CountTokensBody) -> list[Message]:
    """Turns as the runner takes them: tool results become messages of their own, in their place."""
    names: dict[str, str] = {}
    result: list[Message] = []
    for turn in body.messages:
        if isinstance(turn.content, str):
            result.append(Message(role=turn.role, content=turn.content))
            continue
        said = Message(role=turn.role)
        for block in turn.content:
            if block.type == "tool_result":
                if said.content:
                    result.append(said)
                    said = Message(role=turn.role)
                result.append(
                    Message(role="tool", content=_result(block), tool_name=names.get(block.tool_use_id), tool_call_id=block.tool_use_id)
                )
            else:
                _add(said, block, names)
        if said.content or said.tool_calls or said.thinking:
            result.append(said)
    return result


def _add(said: Message, block: Block, names: dict[str, str]) -> None:
    if block.type == "text":
        said.content += block.text
    elif block.type == "thinking":
        said.thinking = (said.thinking or "") + block.thinking
    elif block.type == "tool_use":
        names[block.id] = block.name
        said.tool_calls = [*(said.tool_calls or []), ToolCall(id=block.id, name=block.name, arguments=block.input)]
    elif block.type != "redacted_thinking":
        raise Unsupported(f'"{block.type}" content is not supported', param="messages")


def _result(block: Block) -> str:
    text = block.content if isinstance(block.content, str) else "\n".join(_result_text(part) for part in block.content)
    return f"Error: {text}" if block.is_error else text


def _result_text(part: ResultPart) -> str:
    if part.type != "text":
        raise Unsupported(f'"{part.type}" content is not supported', param="messages")
    return part.text


def _choice(choice: ToolChoice | None) -> str | dict[str, str] | None:
    """In OpenAI's words."""
    if choice is None or choice.type in ("auto", "none"):
        return choice.type if choice is not None else None
    return "required" if choice.type == "any" else {"type": "function", "name": choice.name}


def _tool(tool: ToolIn) -> dict[str, Any]:
    if tool.type != "custom":
        raise Unsupported(f'tools of type "{tool.type}" are not supported', param="tools")
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}


def _think(body: CountTokensBody, model: ModelDefaults) -> bool | str | None:
    thinks = "thinking" in model.capabilities
    effort = body.output_config.effort if body.output_config else None
    wanted = body.thinking.type if body.thinking else None
    if wanted == "disabled":
        return False if thinks else None
    if wanted == "enabled" and not thinks:
        raise Unsupported(f'"{model.name}" does not support thinking', param="thinking")
    if not thinks:
        return None  # effort and adaptive leave it to the model
    if effort is not None:
        return {"xhigh": "max"}.get(effort, effort)
    return True if wanted == "enabled" else None


def _budget(body: CountTokensBody, model: ModelDefaults) -> int:
    """Below 0: none."""
    budget = body.thinking.budget_tokens if body.thinking else None
    return budget if budget is not None and "thinking" in model.capabilities else -1


def _format(body: CountTokensBody) -> dict[str, Any] | None:
    wanted = (body.output_config.format if body.output_config else None) or body.output_format
    if wanted is None:
        return None
    schema = wanted.get("schema")
    if wanted.get("type") != "json_schema" or not isinstance(schema, dict):
        raise BadRequest("output_config.format must be {type: json_schema, schema: {...}}", param="output_config")
    return schema


# ---- replies ------------------------------------------------------------------------------------------------------------------

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(error: LocalrunError, request_id: str = "") -> dict[str, Any]:
    """The dialect's error object."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id or None}


def stop_reason(outcome: Outcome) -> str:
    """end_turn, max_tokens, stop_sequence or tool_use."""
    if outcome.finished.reason == "length":
        return "max_tokens"
    if outcome.called_tools:
        return "tool_use"
    return "stop_sequence" if outcome.finished.stop is not None else "end_turn"


def usage_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """In this dialect, tokens read from the cache do not count as input."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


@dataclass
class MessageReply:
    """Replies of /v1/messages. A stream is a row of blocks, each opened, filled and closed before the next."""

    model: str
    request_id: str = ""
    id: str = field(default_factory=lambda: new_id("msg_"))
    index: int = -1
    """Of the block that is open, or was last."""
    kind: str | None = None
    """Of the block that is open."""

    def opening(self, started: Started) -> list[dict[str, Any]]:
        message = self._message([], None, None, usage_of(started.prompt_tokens, started.cached_tokens, 0))
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = []
        if piece.thinking:
            result += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            result.append(self._delta({"type": "thinking_delta", "thinking": piece.thinking}))
        if piece.text:
            result += self._open("text", {"type": "text", "text": ""})
            result.append(self._delta({"type": "text_delta", "text": piece.text}))
        for call in piece.tool_calls:
            result += self._close()
            result += self._open("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            result.append(self._delta({"type": "input_json_delta", "partial_json": json.dumps(_input(call), ensure_ascii=False)}))
            result += self._close()
        return result

    def closing(self, choice: int, outcome: Outcome) -> list[dict[str, Any]]:
        finished = outcome.finished
        usage = usage_of(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens)
        delta = {"stop_reason": stop_reason(outcome), "stop_sequence": finished.stop}
        return [*self._close(), {"type": "message_delta", "delta": delta, "usage": usage, "seed": finished.seed, **remarks(outcome)}]

    def ending(self, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        return [{"type": "message_stop"}]

    def failing(self, error: LocalrunError) -> list[dict[str, Any]]:
        return [error_body(error, self.request_id)]

    def whole(self, answers: list[Answer], outcomes: list[Outcome]) -> dict[str, Any]:
        answer, finished = answers[0], outcomes[0].finished
        content: list[dict[str, Any]] = []
        if answer.thinking:
            content.append({"type": "thinking", "thinking": "".join(answer.thinking), "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": "".join(answer.text)})
        content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in answer.tool_calls]
        usage = usage_of(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens)
        return self._message(content, stop_reason(outcomes[0]), finished.stop, usage) | {"seed": finished.seed, **remarks(outcomes[0])}

    def _message(self, content: Sequence[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(content),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self.kind == kind:
            return []
        closed = self._close()
        self.kind = kind
        self.index += 1
        return [*closed, {"type": "content_block_start", "index": self.index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if self.kind is None:
            return []
        self.kind = None
        return [{"type": "content_block_stop", "index": self.index}]


def _input(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object; a call whose arguments are no object carries them as they are, under one name."""
    return call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
