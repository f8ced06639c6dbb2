"""Ollama's native dialect: bodies of /api/generate and /api/chat to `messages.Generate`, events to its objects, errors to its shape.

Departures from Ollama, all on purpose: option errors are 400; stop strings add to the model's; nothing is dropped unreported
(`prompt_tokens_dropped`, `messages_dropped`); `seed` and `cached_prompt_eval_count` are reported; unknown fields and options are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from localrun.api.answer import Answer, Outcome, remarks
from localrun.api.options import ModelDefaults, adapters, checked_options, merged, sampling
from localrun.api.pictures import check_seen, from_base64, require_vision
from localrun.api.schema import ChatBody, ChatMessage, GenerateBody, Inference
from localrun.errors import BadRequest, LocalrunError, ModelNotFound, Unsupported
from localrun.messages import Generate, Logprob, Message, Overflow, Piece, Started, ToolCall

THINK_LEVELS = ("low", "medium", "high", "max")


# ---- requests -----------------------------------------------------------------------------------------------------------------


def require_model(body: GenerateBody | ChatBody) -> str:
    """The model's name. Raises with Ollama's texts when there is none."""
    if body.model:
        return body.model
    if isinstance(body, ChatBody):
        raise BadRequest("model is required", param="model")
    raise ModelNotFound("model '' not found", param="model")


def check_generate(body: GenerateBody) -> None:
    """Raises BadRequest for fields that exclude each other. Done before the model is touched."""
    if body.raw and (body.template or body.system or body.context):
        raise BadRequest("raw mode does not support template, system, or context", param="raw")
    _check_inference(body)


def check_chat(body: ChatBody) -> None:
    """Raises BadRequest for values out of their range. Done before the model is touched."""
    _check_inference(body)


def loads_only(body: GenerateBody | ChatBody) -> bool:
    """Whether the request asks for nothing but the model in memory (or, with keep_alive 0, out of it)."""
    if isinstance(body, ChatBody):
        return not body.messages
    return not body.prompt and not body.suffix and not body.images and not body.debug_render_only


def generate_request(body: GenerateBody, model: ModelDefaults, request_id: str) -> Generate:
    """One prompt. With MESSAGEs in the Modelfile it becomes a conversation that starts with them, unless `context` goes on from an
    earlier answer. Raises BadRequest or Unsupported for options and for what the model cannot do."""
    _check_capabilities(body, model)
    prompt, raw = body.prompt, body.raw
    images = from_base64(body.images)
    if images:
        require_vision(model)
    if body.suffix:
        if images:
            raise Unsupported("images together with suffix are not supported", param="images")
        if model.fill is None:
            raise Unsupported(f"{model.name} does not support insert", param="suffix")
        prompt, raw = model.fill(body.prompt, body.suffix), True
    system = body.system if body.system is not None else model.system
    conversation = None
    if model.messages and not raw and not body.context:
        conversation = [*_system(system), *model.messages, Message(role="user", content=body.prompt, images=images)]
    return Generate(
        request_id=request_id,
        prompt=prompt if conversation is None else None,
        images=images if conversation is None else [],
        messages=conversation,
        system=system if conversation is None and not raw else None,
        template=body.template or model.template,
        raw=raw,
        context=body.context,
        **_shared(body, model),
    )


def chat_request(body: ChatBody, model: ModelDefaults, request_id: str) -> Generate:
    """A conversation: the model's MESSAGEs, then the request's, behind the model's SYSTEM unless the first message is one.
    Raises BadRequest or Unsupported for options and for what the model cannot do."""
    _check_capabilities(body, model)
    if body.tools and "tools" not in model.capabilities:
        raise Unsupported(f"{model.name} does not support tools", param="tools")
    conversation = [*model.messages, *read_messages(body.messages)]
    check_seen(conversation, model)
    if conversation[0].role != "system":
        conversation = [*_system(model.system), *conversation]
    return Generate(
        request_id=request_id,
        messages=conversation,
        tools=body.tools or None,
        template=model.template,
        **_shared(body, model),
    )


def read_messages(given: Sequence[ChatMessage]) -> list[Message]:
    """Messages as the runner takes them; roles in lower case."""
    return [
        Message(
            role=message.role.lower(),
            content=message.content,
            thinking=message.thinking,
            tool_calls=[ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in message.tool_calls]
            if message.tool_calls
            else None,
            tool_name=message.tool_name,
            tool_call_id=message.tool_call_id,
            images=from_base64(message.images),
        )
        for message in given
    ]


def overflow_of(body: Inference) -> Overflow:
    """What happens to a prompt that does not fit: Ollama's two switches as one word."""
    if body.overflow is not None:
        return body.overflow
    if body.truncate is False:
        return "error"
    return "shift" if body.shift else "truncate_oldest"


def _system(text: str | None) -> list[Message]:
    return [Message(role="system", content=text)] if text else []


def _shared(body: Inference, model: ModelDefaults) -> dict[str, Any]:
    options = merged(checked_options(body.options), model)
    return {
        "format": body.format or None,
        "think": body.think,
        "sampling": sampling(options),
        "stop": options["stop"],
        "max_tokens": max(options.get("num_predict", -1), -1),
        "num_ctx": options["num_ctx"],
        "draft_num_predict": options.get("draft_num_predict", -1),
        "draft_rule": options.get("draft_rule", "exact"),
        "session": options.get("session", False),
        "num_beams": options.get("num_beams", 1),
        "length_penalty": options.get("length_penalty", 1.0),
        **adapters(options, model),
        "overflow": overflow_of(body),
        "thinking_budget": -1 if body.thinking_budget is None else body.thinking_budget,
        "deadline_s": body.timeout or 0.0,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "priority": body.priority,
    }


def _check_inference(body: Inference) -> None:
    checked_options(body.options)
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise BadRequest("top_logprobs must be between 0 and 20", param="top_logprobs")
    if isinstance(body.think, str) and body.think not in THINK_LEVELS:
        raise BadRequest(f'invalid think value: "{body.think}" (must be "high", "medium", "low", "max", true, or false)', param="think")
    if isinstance(body.format, str) and body.format not in ("", "json"):
        raise BadRequest(f'invalid format: "{body.format}"; expected "json" or a valid JSON Schema object', param="format")


def _check_capabilities(body: Inference, model: ModelDefaults) -> None:
    if "completion" not in model.capabilities:
        verb = "chat" if isinstance(body, ChatBody) else "generate"
        raise Unsupported(f'"{model.name}" does not support {verb}', param="model")
    if body.think and "thinking" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support thinking', param="think")
    if body.thinking_budget is not None and "thinking" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support thinking', param="thinking_budget")


# ---- replies ------------------------------------------------------------------------------------------------------------------


def now() -> str:
    """The time as Ollama writes it: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def error_body(error: LocalrunError) -> dict[str, Any]:
    """The dialect's error object."""
    return {"error": str(error)}


def load_reply(body: GenerateBody | ChatBody, reason: str) -> dict[str, Any]:
    """Answer to a request that only loads or unloads; `reason` is "load" or "unload"."""
    if isinstance(body, ChatBody):
        content: dict[str, Any] = {"message": {"role": "assistant", "content": ""}}
    else:
        content = {"response": ""}
    return {"model": body.model, "created_at": now(), **content, "done": True, "done_reason": reason}


def load_progress(body: GenerateBody | ChatBody, stage: str, done: int, total: int) -> dict[str, Any]:
    """A line about a model that is being loaded; only sent to clients that asked for it."""
    content: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if isinstance(body, ChatBody) else {"response": ""}
    return {"model": body.model, "created_at": now(), **content, "done": False, "status": stage, "completed": done, "total": total}


def rendered_reply(body: GenerateBody | ChatBody, text: str, tokens: int) -> dict[str, Any]:
    """Answer to `_debug_render_only`."""
    return {
        "model": body.model,
        "created_at": now(),
        "_debug_info": {"rendered_template": text, "image_count": 0, "prompt_tokens": tokens},
    }


def logprob_items(logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """Log-probabilities in the shape that Ollama shares with OpenAI's chat."""
    return [
        {
            "token": item.token,
            "logprob": item.logprob,
            "bytes": item.bytes,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob, "bytes": top.bytes} for top in item.top],
        }
        for item in logprobs
    ]


def tool_call_items(calls: Sequence[ToolCall], first: int = 0) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects; `first` is the index of the first one in its message."""
    return [
        {"id": call.id, "function": {"index": first + index, "name": call.name, "arguments": call.arguments}}
        for index, call in enumerate(calls)
    ]


@dataclass
class OllamaReply:
    """Replies of /api/generate and /api/chat, which differ in where the text stands."""

    model: str
    chat: bool
    with_context: bool = False
    """Whether the final object carries the tokens (generate without raw)."""
    calls_sent: int = 0

    def opening(self, started: Started) -> list[dict[str, Any]]:
        return []

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        """Text, thinking and log-probabilities in one object; tool calls in one of their own."""
        result = []
        if piece.text or piece.thinking or piece.logprobs:
            result.append(self._object(piece.text, piece.thinking, (), piece.logprobs) | {"done": False})
        if piece.tool_calls:
            result.append(self._object("", "", piece.tool_calls, ()) | {"done": False})
        return result

    def closing(self, choice: int, outcome: Outcome) -> list[dict[str, Any]]:
        return [self._object("", "", (), ()) | self._final(outcome)]

    def ending(self, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        return []

    def failing(self, error: LocalrunError) -> list[dict[str, Any]]:
        return [error_body(error)]

    def whole(self, answers: list[Answer], outcomes: list[Outcome]) -> dict[str, Any]:
        answer = answers[0]
        text, thinking = "".join(answer.text), "".join(answer.thinking)
        return self._object(text, thinking, answer.tool_calls, answer.logprobs) | self._final(outcomes[0])

    def _object(self, text: str, thinking: str, calls: Sequence[ToolCall], logprobs: Sequence[Logprob]) -> dict[str, Any]:
        inner: dict[str, Any] = {"role": "assistant", "content": text} if self.chat else {"response": text}
        if thinking:
            inner["thinking"] = thinking
        if calls:
            inner["tool_calls"] = tool_call_items(calls, self.calls_sent)
            self.calls_sent += len(calls)
        result: dict[str, Any] = {"model": self.model, "created_at": now()}
        result.update({"message": inner} if self.chat else inner)
        if logprobs:
            result["logprobs"] = logprob_items(logprobs)
        return result

    def _final(self, outcome: Outcome) -> dict[str, Any]:
        finished = outcome.finished
        result: dict[str, Any] = {"done": True, "done_reason": finished.reason}
        if self.with_context:
            result["context"] = finished.context
        result |= {
            "total_duration": _ns(outcome.total_s),
            "load_duration": _ns(outcome.load_s),
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": _ns(finished.prefill_s),
            "eval_count": finished.completion_tokens,
            "eval_duration": _ns(finished.decode_s),
            "cached_prompt_eval_count": finished.cached_tokens,
            "queue_duration": _ns(finished.queue_s),
            "first_token_duration": _ns(finished.first_token_s),
            "seed": finished.seed,
        }
        if finished.thinking_tokens:
            result["thinking_eval_count"] = finished.thinking_tokens
        if finished.drafted_tokens:
            result |= {"drafted_tokens": finished.drafted_tokens, "accepted_tokens": finished.accepted_tokens}
        return {**result, **dropped(outcome), **remarks(outcome)}


def dropped(outcome: Outcome) -> Mapping[str, int]:
    """What was left out to make it fit, of the prompt and, where the window moves, of what followed; empty when nothing was."""
    started, finished = outcome.started, outcome.finished
    result: dict[str, int] = {}
    if started.dropped_messages or started.dropped_tokens:
        result |= {"messages_dropped": started.dropped_messages, "prompt_tokens_dropped": started.dropped_tokens}
    if finished.dropped_tokens:
        result["window_tokens_dropped"] = finished.dropped_tokens
    return result


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
