"""OpenAI's dialect: bodies of /v1/chat/completions and /v1/completions to `messages.Generate`, events to its objects, errors to its shape.

Departures from OpenAI are extras only (see openai_schema.py); from Ollama's copy of the dialect: ids are unique, `tool_choice`, `n`,
`logit_bias`, `max_completion_tokens` and several prompts work, errors in a stream are sent as such.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localrun.api.answer import Answer, Echo, Outcome, new_id, remarks
from localrun.api.ollama import dropped, logprob_items
from localrun.api.openai_schema import Call, ChatCompletionBody, Common, CompletionBody, Part, TurnMessage
from localrun.api.options import ModelDefaults, adapters, checked_options, merged, sampling
from localrun.api.pictures import check_seen, from_url
from localrun.api.tool_choice import choose
from localrun.errors import BadRequest, LocalrunError, Unsupported
from localrun.messages import Generate, Image, Logprob, Message, Piece, Started, ToolCall

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
"""The dialect's own, below the Modelfile's."""

EXTRAS = ("top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "num_ctx", "num_thread")
SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")

FINGERPRINT = "fp_localrun"


# ---- requests -----------------------------------------------------------------------------------------------------------------


def options_of(body: Common) -> dict[str, Any]:
    """The body's sampling fields as Ollama options. Raises BadRequest for extras out of range."""
    given = {name: value for name in (*SAMPLING, *EXTRAS) if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    return checked_options({**body.options, **given})


def chat_requests(body: ChatCompletionBody, model: ModelDefaults, request_id: str) -> list[Generate]:
    """One `Generate` for each of the `n` answers; request ids are `request_id` and a number.

    Raises BadRequest or Unsupported for values out of range and for what the model cannot do.
    """
    if not body.messages:
        raise BadRequest("[] is too short - 'messages'", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    _require_completion(model, "chat")
    tools, must_call = choose(body.tool_choice, body.tools, model.name, model.capabilities)
    think = think_of(body, model)
    budget = body.thinking_budget if body.thinking_budget is not None else body.reasoning.max_tokens if body.reasoning else None
    conversation = [*model.messages, *read_messages(body.messages)]
    check_seen(conversation, model)
    if model.system and conversation[0].role != "system":
        conversation.insert(0, Message(role="system", content=model.system))
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _numbered(
        body,
        model,
        [{"messages": conversation}],
        request_id,
        max_tokens=most_tokens(most, body, model),
        tools=tools or None,
        must_call=must_call,
        parallel_tool_calls=body.parallel_tool_calls,
        template=model.template,
        think=think,
        thinking_budget=thinking_budget_of(budget, model, "thinking_budget"),
        template_kwargs=body.chat_template_kwargs,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def completion_requests(body: CompletionBody, model: ModelDefaults, request_id: str) -> list[Generate]:
    """One `Generate` for each answer to each prompt, prompts first. Raises as `chat_requests`."""
    _require_completion(model, "completion")
    if body.suffix and model.fill is None:
        raise Unsupported(f"{model.name} does not support insert", param="suffix")
    prompts = [_completion_prompt(prompt, body.suffix or "", model) for prompt in prompts_of(body)]
    return _numbered(
        body, model, prompts, request_id, max_tokens=most_tokens(body.max_tokens, body, model), raw=True, logprobs=body.logprobs
    )


def _completion_prompt(prompt: str | list[int], suffix: str, model: ModelDefaults) -> dict[str, Any]:
    if isinstance(prompt, list):
        if suffix:
            raise Unsupported('"suffix" with token ids is not supported; send the prompt as text', param="suffix")
        return {"prompt_tokens": prompt}
    return {"prompt": model.fill(prompt, suffix) if suffix and model.fill else prompt}


def most_tokens(asked: int | None, body: Common, model: ModelDefaults) -> int:
    """The limit of an answer: the body's field, or num_predict of its options, or the model's; below 0: none."""
    if asked is not None:
        return asked
    limit: int = merged(checked_options(body.options), model).get("num_predict", -1)
    return max(limit, -1)


def best_of(body: Common) -> int:
    """How many answers are made for each prompt, of which `n` are sent. Raises BadRequest where that cannot be."""
    if not isinstance(body, CompletionBody) or body.best_of is None:
        return body.n
    if body.best_of < body.n:
        raise BadRequest(f"best_of must be at least n, {body.best_of} is less than {body.n}", param="best_of")
    if body.stream and body.best_of > body.n:
        raise BadRequest("best_of cannot be streamed: which answers are the best is known at the end", param="best_of")
    return body.best_of


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, however many were sent. Raises BadRequest when there is none."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("[] is too short - 'prompt'", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


def thinking_budget_of(budget: int | None, model: ModelDefaults, param: str) -> int:
    """Below 0: none. Raises Unsupported for a model that does not think."""
    if budget is not None and "thinking" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support thinking', param=param)
    return -1 if budget is None else budget


def think_of(body: ChatCompletionBody, model: ModelDefaults) -> bool | str | None:
    """reasoning_effort, or reasoning.effort, in Ollama's words. Raises Unsupported when the model does not think and is asked to."""
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    return think_level(effort, model, "reasoning_effort")


def think_level(effort: str | None, model: ModelDefaults, param: str) -> bool | str | None:
    """An effort in Ollama's words; a model that cannot think is as good as told `none`. Raises Unsupported, naming `param`."""
    if effort is None:
        return None
    if effort == "none":
        return False if "thinking" in model.capabilities else None
    if "thinking" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support thinking', param=param)
    return {"minimal": "low", "xhigh": "max", "ultra": "max"}.get(effort, effort)


def read_messages(given: Sequence[TurnMessage]) -> list[Message]:
    """Messages as the runner takes them: parts joined, `developer` as `system`, tool results with the name of the tool they come from."""
    names: dict[str, str] = {}
    result = []
    for message in given:
        calls = [_call(call) for call in message.tool_calls or []]
        names.update({call.id: call.name for call in calls})
        role = message.role.lower()
        result.append(
            Message(
                role="system" if role == "developer" else role,
                content=text_of(message.content) or message.refusal or "",
                images=images_of(message.content),
                thinking=message.reasoning or message.reasoning_content,
                tool_calls=calls or None,
                tool_name=(message.name or names.get(message.tool_call_id or "") or None) if role == "tool" else None,
                tool_call_id=message.tool_call_id,
            )
        )
    return result


def text_of(content: str | list[Part]) -> str:
    """The text of a message. Raises Unsupported for parts that are neither text nor images."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "refusal", "image_url"):
            raise Unsupported(f'"{part.type}" content is not supported', param="messages")
    return "".join(part.text or part.refusal for part in content)


def images_of(content: str | list[Part]) -> list[Image]:
    """The images of a message, each before the text that follows it. Raises BadRequest, Unsupported."""
    if isinstance(content, str):
        return []
    images, at = [], 0
    for part in content:
        if part.type == "image_url":
            if part.image_url is None:
                raise BadRequest("image_url is required in a part of that type", param="messages")
            images.append(from_url(part.image_url if isinstance(part.image_url, str) else part.image_url.url, at))
        at += len(part.text or part.refusal)
    return images


def _call(call: Call) -> ToolCall:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        # What a model wrote wrongly goes back to it as it was.
        arguments = parsed if isinstance(parsed, dict) else arguments
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def _require_completion(model: ModelDefaults, what: str) -> None:
    if "completion" not in model.capabilities:
        raise Unsupported(f'"{model.name}" does not support {what}', param="model")


def _format(body: Common) -> str | dict[str, Any] | None:
    wanted = body.response_format
    asked = [name for name in ("response_format", "grammar", "regex") if getattr(body, name) is not None]
    if len(asked) > 1:
        raise BadRequest(f"{' and '.join(asked)} exclude each other", param=asked[1])
    if body.grammar is not None:
        return {"grammar": body.grammar}
    if body.regex is not None:
        return {"regex": body.regex}
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "json"
    if wanted.json_schema is None:
        raise BadRequest("response_format: json_schema is required", param="response_format")
    return wanted.json_schema.schema_ or "json"


def _numbered(body: Common, model: ModelDefaults, prompts: list[dict[str, Any]], request_id: str, **shared: Any) -> list[Generate]:
    options = merged(options_of(body), model, DEFAULTS)
    bias = _bias(body.logit_bias)
    result: list[Generate] = []
    made = max(body.n, best_of(body))
    if made > 1 and options.get("num_beams", 1) > 1:
        raise Unsupported("num_beams with several answers (n, best_of) is not supported: they would all be the same", param="options")
    for prompt in prompts:
        for answer in range(made):
            drawn = dict(options)
            if drawn.get("seed") is not None and drawn["seed"] >= 0:
                drawn["seed"] += answer
            result.append(
                Generate(
                    request_id=f"{request_id}-{len(result)}",
                    draft_num_predict=options.get("draft_num_predict", -1),
                    draft_rule=options.get("draft_rule", "exact"),
                    session=options.get("session", False),
                    num_beams=options.get("num_beams", 1),
                    length_penalty=options.get("length_penalty", 1.0),
                    format=_format(body),
                    sampling=sampling(drawn, bias),
                    stop=options["stop"],
                    num_ctx=options["num_ctx"],
                    overflow=body.overflow,
                    priority=body.priority,
                    **adapters(options, model),
                    deadline_s=body.timeout or 0.0,
                    score=made > body.n,
                    **prompt,
                    **shared,
                )
            )
    return result


def _bias(given: dict[str, float]) -> dict[int, float]:
    result = {}
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise BadRequest(f'logit_bias: "{token}" is no token id', param="logit_bias")
        if not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias: {bias:g} is not from -100 to 100", param="logit_bias")
        result[int(token)] = bias
    return result


# ---- replies ------------------------------------------------------------------------------------------------------------------


def error_body(error: LocalrunError) -> dict[str, Any]:
    """The dialect's error object."""
    kind = "not_found_error" if error.status == 404 else "invalid_request_error" if error.status < 500 else "api_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def usage_of(outcomes: Sequence[Outcome], n: int = 1) -> dict[str, Any]:
    """Token counts of all answers; a prompt that `n` answers share counts once."""
    prompt = sum(outcome.finished.prompt_tokens for outcome in outcomes[::n])
    completion = sum(outcome.finished.completion_tokens for outcome in outcomes)
    cached = sum(outcome.finished.cached_tokens for outcome in outcomes[::n])
    result: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(outcome.finished.thinking_tokens for outcome in outcomes)},
    }
    for outcome in outcomes[::n]:
        for name, count in dropped(outcome).items():
            result[name] = result.get(name, 0) + count
    return result


def tool_call_items(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls with arguments as JSON text."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.arguments
                if isinstance(call.arguments, str)
                else json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":")),
            },
        }
        for call in calls
    ]


@dataclass
class _Reply:
    """What the two endpoints' replies share."""

    model: str
    n: int = 1
    include_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    object_whole = ""
    object_chunk = ""

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def ending(self, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        if not self.include_usage:
            return []
        return [self._envelope(self.object_chunk, []) | {"usage": usage_of(outcomes, self.n), **self._seed(outcomes)}]

    def failing(self, error: LocalrunError) -> list[dict[str, Any]]:
        return [error_body(error)]

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        result = self._envelope(self.object_chunk, [choice])
        if self.include_usage:
            result["usage"] = None
        return result

    @staticmethod
    def _seed(outcomes: list[Outcome]) -> dict[str, Any]:
        return {"seed": outcomes[0].finished.seed} if outcomes else {}


@dataclass
class ChatReply(_Reply):
    """Replies of /v1/chat/completions."""

    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    calls_sent: dict[int, int] = field(default_factory=dict)

    def opening(self, started: Started) -> list[dict[str, Any]]:
        deltas = [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None} for index in range(self.n)]
        return [self._chunk(delta) for delta in deltas]

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {}
        if piece.thinking:
            delta["reasoning"] = piece.thinking
        if piece.text or (piece.logprobs and not piece.thinking):
            delta["content"] = piece.text
        if piece.tool_calls:
            first = self.calls_sent.get(choice, 0)
            self.calls_sent[choice] = first + len(piece.tool_calls)
            delta["tool_calls"] = [{"index": first + i} | item for i, item in enumerate(tool_call_items(piece.tool_calls))]
        if not delta:
            return []
        result: dict[str, Any] = {"index": choice, "delta": delta, "finish_reason": None}
        if piece.logprobs:
            result["logprobs"] = _chat_logprobs(piece.logprobs)
        return [self._chunk(result)]

    def closing(self, choice: int, outcome: Outcome) -> list[dict[str, Any]]:
        return [self._chunk({"index": choice, "delta": {}, "finish_reason": finish_reason(outcome), **said_of(outcome)})]

    def whole(self, answers: list[Answer], outcomes: list[Outcome]) -> dict[str, Any]:
        choices = []
        for index, (answer, outcome) in enumerate(zip(answers, outcomes, strict=True)):
            text = "".join(answer.text)
            message: dict[str, Any] = {"role": "assistant", "content": text if text or not answer.tool_calls else None}
            if answer.thinking:
                message["reasoning"] = "".join(answer.thinking)
            if answer.tool_calls:
                message["tool_calls"] = tool_call_items(answer.tool_calls)
            choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": finish_reason(outcome), **said_of(outcome)}
            if answer.logprobs:
                choice["logprobs"] = _chat_logprobs(answer.logprobs)
            choices.append(choice)
        return self._envelope(self.object_whole, choices) | {"usage": usage_of(outcomes, self.n), **self._seed(outcomes)}


@dataclass
class CompletionReply(_Reply):
    """Replies of /v1/completions."""

    id: str = field(default_factory=lambda: new_id("cmpl-"))
    object_whole = "text_completion"
    object_chunk = "text_completion"
    made: int = 0
    """How many answers each prompt has, where only the `n` likeliest are sent; 0: n."""
    echoes: Sequence[Echo] = ()
    """Of each prompt, where they are repeated."""
    sent: dict[int, int] = field(default_factory=dict)
    """Characters sent so far, by choice: log-probabilities carry offsets."""

    def opening(self, started: Started) -> list[dict[str, Any]]:
        chunks = []
        for index in range(len(self.echoes) * self.n):
            echo = self.echoes[index // self.n]
            self.sent[index] = len(echo.text)
            chunks.append(self._chunk(self._choice(index, echo.text, None, _echo_logprobs(echo))))
        return chunks

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        if not piece.text and not piece.logprobs:
            return []
        offset = self.sent.get(choice, 0)
        self.sent[choice] = offset + len(piece.text)
        return [self._chunk(self._choice(choice, piece.text, None, _completion_logprobs(piece.logprobs, offset)))]

    def closing(self, choice: int, outcome: Outcome) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(choice, "", finish_reason(outcome), None) | said_of(outcome))]

    def whole(self, answers: list[Answer], outcomes: list[Outcome]) -> dict[str, Any]:
        usage = usage_of(outcomes, self.made or self.n)
        if self.made > self.n:
            best = self._best(outcomes)
            answers, outcomes = [answers[i] for i in best], [outcomes[i] for i in best]
        choices = []
        for index, (answer, outcome) in enumerate(zip(answers, outcomes, strict=True)):
            text, logprobs = "".join(answer.text), None
            if self.echoes:
                echo = self.echoes[index // self.n]
                logprobs = _joined(_echo_logprobs(echo), _completion_logprobs(answer.logprobs, len(echo.text)))
                text = echo.text + text
            else:
                logprobs = _completion_logprobs(answer.logprobs, 0)
            choices.append(self._choice(index, text, finish_reason(outcome), logprobs) | said_of(outcome))
        return self._envelope(self.object_whole, choices) | {"usage": usage, **self._seed(outcomes)}

    def _best(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Of each prompt, the `n` answers whose tokens are the likeliest on average, the best first."""

        def likelihood(i: int) -> float:
            return outcomes[i].finished.logprob / max(1, outcomes[i].finished.completion_tokens)

        groups = [range(first, first + self.made) for first in range(0, len(outcomes), self.made)]
        return [i for group in groups for i in sorted(group, key=likelihood, reverse=True)[: self.n]]

    @staticmethod
    def _choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def finish_reason(outcome: Outcome) -> str:
    """stop, length or tool_calls."""
    if outcome.called_tools and outcome.finished.reason == "stop":
        return "tool_calls"
    return "stop" if outcome.finished.reason == "cancelled" else outcome.finished.reason


def said_of(outcome: Outcome) -> dict[str, Any]:
    """What an ended choice carries beside OpenAI's fields."""
    return {"seed": outcome.finished.seed, **remarks(outcome)}


def _chat_logprobs(logprobs: Sequence[Logprob]) -> dict[str, Any]:
    return {"content": logprob_items(logprobs), "refusal": None}


def _completion_logprobs(logprobs: Sequence[Logprob], offset: int) -> dict[str, Any] | None:
    if not logprobs:
        return None
    tokens = [item.token for item in logprobs]
    top = [{top.token: top.logprob for top in item.top} for item in logprobs]
    return _listed(tokens, [item.logprob for item in logprobs], top, offset)


def _echo_logprobs(echo: Echo) -> dict[str, Any] | None:
    return _listed(echo.tokens, echo.logprobs, echo.top, 0) if echo.tokens else None


def _listed(tokens: Sequence[str], logprobs: Sequence[Any], top: Sequence[Any], offset: int) -> dict[str, Any]:
    offsets = [offset + before for before in itertools.accumulate((len(token) for token in tokens), initial=0)][:-1]
    return {"tokens": list(tokens), "token_logprobs": list(logprobs), "top_logprobs": list(top), "text_offset": offsets}


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}
