"""OpenAI's /v1/responses, stateless: its items to messages and its answer's items from events.

The answer is a row of items: thoughts, then text, then calls. A thought's text is sent as its summary, as Ollama does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localrun.api.answer import Answer, Outcome, new_id, remarks
from localrun.api.ollama import dropped, logprob_items
from localrun.api.openai import DEFAULTS, error_body, think_level, thinking_budget_of
from localrun.api.options import ModelDefaults, adapters, checked_options, merged, sampling
from localrun.api.responses_schema import ContentPart, Item, ResponsesBody, ResponseTool
from localrun.api.tool_choice import choose
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.messages import Generate, Logprob, Message, Overflow, Piece, Started, ToolCall

LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""The second asks for something that only thoughts a provider hides have: there are none."""

SAMPLING = ("temperature", "top_p", "seed", "top_k", "min_p", "num_ctx")


# ---- requests -----------------------------------------------------------------------------------------------------------------


def options_of(body: ResponsesBody) -> dict[str, Any]:
    """The body's sampling fields as Ollama options. Raises BadRequest."""
    return checked_options({**body.options, **{name: value for name in SAMPLING if (value := getattr(body, name)) is not None}})


def response_request(body: ResponsesBody, model: ModelDefaults, request_id: str) -> Generate:
    """Raises BadRequest or Unsupported for values out of range and for what the model cannot do."""
    if "completion" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support chat', param="model")
    for wanted in body.include:
        if wanted not in INCLUDES:
            raise Unsupported(f'"include" of {wanted} is not supported', param="include")
    options = merged(options_of(body), model, DEFAULTS)
    conversation = [*model.messages, *read_items(body.input)]
    if not conversation:
        raise BadRequest("[] is too short - 'input'", param="input")
    system = body.instructions or (model.system if conversation[0].role != "system" else None)
    if system:
        conversation.insert(0, Message(role="system", content=system))
    tools, must_call = choose(body.tool_choice, [_tool(tool) for tool in body.tools], model.name, model.capabilities)
    return Generate(
        request_id=request_id,
        messages=conversation,
        tools=tools or None,
        must_call=must_call,
        parallel_tool_calls=body.parallel_tool_calls,
        think=think_level(body.reasoning.effort if body.reasoning else None, model, "reasoning"),
        thinking_budget=thinking_budget_of(body.reasoning.max_tokens if body.reasoning else None, model, "reasoning"),
        deadline_s=body.timeout or 0.0,
        format=_format(body),
        template=model.template,
        sampling=sampling(options),
        stop=options["stop"],
        max_tokens=max(options.get("num_predict", -1), -1) if body.max_output_tokens is None else body.max_output_tokens,
        draft_num_predict=options.get("draft_num_predict", -1),
        draft_rule=options.get("draft_rule", "exact"),
        session=options.get("session", False),
        num_beams=options.get("num_beams", 1),
        length_penalty=options.get("length_penalty", 1.0),
        **adapters(options, model),
        num_ctx=options["num_ctx"],
        overflow=_overflow(body),
        logprobs=(body.top_logprobs or 0) if LOGPROBS in body.include or body.top_logprobs else None,
    )


def read_items(given: str | list[Item]) -> list[Message]:
    """Items as the runner's messages: calls and thoughts join the assistant's message that they belong to."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    names: dict[str, str] = {}
    result: list[Message] = []
    for item in given:
        if item.type == "message":
            role = "system" if item.role.lower() == "developer" else item.role.lower()
            if role == "assistant" and result and result[-1].role == "assistant" and not result[-1].content and not result[-1].tool_calls:
                result[-1].content = text_of(item.content)  # what it thought came before
            else:
                result.append(Message(role=role, content=text_of(item.content)))
        elif item.type == "reasoning":
            result.append(Message(role="assistant", thinking=text_of(item.content) or text_of(item.summary)))
        elif item.type == "function_call":
            if not result or result[-1].role != "assistant":
                result.append(Message(role="assistant"))
            names[item.call_id] = item.name
            result[-1].tool_calls = [*(result[-1].tool_calls or []), _call(item)]
        else:
            result.append(
                Message(role="tool", content=text_of(item.output), tool_name=names.get(item.call_id), tool_call_id=item.call_id or None)
            )
    return result


def text_of(content: str | list[ContentPart]) -> str:
    """The text of some content. Raises Unsupported for what is none."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type in ("input_image", "input_file", "input_audio"):
            raise Unsupported(f'"{part.type}" content is not supported', param="input")
    return "".join(part.text or part.refusal for part in content)


def _call(item: Item) -> ToolCall:
    try:
        parsed = json.loads(item.arguments or "{}")
    except ValueError:
        parsed = None
    return ToolCall(id=item.call_id, name=item.name, arguments=parsed if isinstance(parsed, dict) else item.arguments)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    if tool.type != "function":
        raise Unsupported(f'tools of type "{tool.type}" are not supported', param="tools")
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}


def _format(body: ResponsesBody) -> str | dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "json"
    if not wanted.schema_:
        raise BadRequest("text.format: schema is required", param="text")
    return wanted.schema_


def _overflow(body: ResponsesBody) -> Overflow:
    return body.overflow or ("truncate_oldest" if body.truncation == "auto" else "error")


# ---- replies ------------------------------------------------------------------------------------------------------------------


@dataclass
class ResponseReply:
    """Replies of /v1/responses. A stream is a row of items, each opened, filled and closed before the next."""

    body: ResponsesBody
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))
    sequence: int = 0
    items: list[dict[str, Any]] = field(default_factory=list)
    """Items that are complete."""
    open: dict[str, Any] | None = None
    """The item that is being filled."""
    text: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def opening(self, started: Started) -> list[dict[str, Any]]:
        response = self._response("in_progress", [], None)
        return [self._event("response.created", response=response), self._event("response.in_progress", response=response)]

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if piece.thinking:
            events += self._begin("reasoning")
            self.text.append(piece.thinking)
            events.append(self._part("response.reasoning_summary_text.delta", summary_index=0, delta=piece.thinking))
        if piece.text or (piece.logprobs and not piece.thinking):
            events += self._begin("message")
            self.text.append(piece.text)
            self.logprobs += piece.logprobs
            logprobs = logprob_items(piece.logprobs)
            events.append(self._part("response.output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs))
        for call in piece.tool_calls:
            events += self._call(call)
        return events

    def closing(self, choice: int, outcome: Outcome) -> list[dict[str, Any]]:
        return self._end()

    def ending(self, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        response = self._finished(outcomes[0])
        return [self._event(f"response.{response['status']}", response=response)]

    def failing(self, error: LocalrunError) -> list[dict[str, Any]]:
        said = error_body(error)["error"]
        response = self._response("failed", self.items, None) | {"error": {"code": said["code"], "message": said["message"]}}
        return [self._event("response.failed", response=response)]

    def whole(self, answers: list[Answer], outcomes: list[Outcome]) -> dict[str, Any]:
        answer = answers[0]
        if answer.thinking:
            self.items.append(_reasoning(new_id("rs_"), "".join(answer.thinking)))
        if answer.text or answer.logprobs or not answer.tool_calls:
            self.items.append(_message(new_id("msg_"), "".join(answer.text), answer.logprobs))
        self.items += [_function_call(new_id("fc_"), call) for call in answer.tool_calls]
        return self._finished(outcomes[0])

    # ---- items of a stream ----

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        if self.open is not None and self.open["type"] == kind:
            return []
        events = self._end()
        if kind == "message":
            self.open = {"id": new_id("msg_"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._item("response.output_item.added", self.open))
            events.append(self._part("response.content_part.added", content_index=0, part=part))
        else:
            self.open = {"id": new_id("rs_"), "type": "reasoning", "summary": []}
            events.append(self._item("response.output_item.added", self.open))
            events.append(self._part("response.reasoning_summary_part.added", summary_index=0, part={"type": "summary_text", "text": ""}))
        return events

    def _end(self) -> list[dict[str, Any]]:
        if self.open is None:
            return []
        text, logprobs = "".join(self.text), self.logprobs
        if self.open["type"] == "message":
            item = _message(self.open["id"], text, logprobs)
            events = [
                self._part("response.output_text.done", content_index=0, text=text, logprobs=logprob_items(logprobs)),
                self._part("response.content_part.done", content_index=0, part=item["content"][0]),
            ]
        else:
            item = _reasoning(self.open["id"], text)
            events = [
                self._part("response.reasoning_summary_text.done", summary_index=0, text=text),
                self._part("response.reasoning_summary_part.done", summary_index=0, part=item["summary"][0]),
            ]
        events.append(self._item("response.output_item.done", item))
        self.items.append(item)
        self.open, self.text, self.logprobs = None, [], []
        return events

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        events = self._end()
        item = _function_call(new_id("fc_"), call)
        self.open = {**item, "status": "in_progress", "arguments": ""}
        events += [
            self._item("response.output_item.added", self.open),
            self._part("response.function_call_arguments.delta", delta=item["arguments"]),
            self._part("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]),
            self._item("response.output_item.done", item),
        ]
        self.open = None
        self.items.append(item)
        return events

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event

    def _item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(kind, output_index=len(self.items), item=item)

    def _part(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self.open is not None
        return self._event(kind, item_id=self.open["id"], output_index=len(self.items), **fields)

    # ---- the response itself ----

    def _finished(self, outcome: Outcome) -> dict[str, Any]:
        finished = outcome.finished
        usage = {
            "input_tokens": finished.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.cached_tokens},
            "output_tokens": finished.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": finished.thinking_tokens},
            "total_tokens": finished.prompt_tokens + finished.completion_tokens,
            **dropped(outcome),
        }
        cut = finished.reason == "length"
        response = self._response("incomplete" if cut else "completed", self.items, usage)
        return response | remarks(outcome) | {"seed": finished.seed, "incomplete_details": {"reason": "max_output_tokens"} if cut else None}

    def _response(self, status: str, items: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": list(items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": self._text_format()},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown(tool) for tool in body.tools],
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": usage,
            "user": body.user,
            "metadata": body.metadata,
        }

    def _text_format(self) -> dict[str, Any]:
        wanted = self.body.text.format if self.body.text else None
        return wanted.model_dump(by_alias=True, exclude_unset=True) if wanted else {"type": "text"}


def _shown(tool: ResponseTool) -> dict[str, Any]:
    shown = {"type": tool.type, "name": tool.name, "description": tool.description}
    return {**shown, "parameters": tool.parameters, "strict": tool.strict}


def _message(item_id: str, text: str, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_items(logprobs)}
    return {"id": item_id, "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    return {"id": item_id, "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def _function_call(item_id: str, call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return {"id": item_id, "type": "function_call", "status": "completed", "call_id": call.id, "name": call.name, "arguments": text}
