"""From a request to the tokens the model reads: which messages, in which template, which tokens around them, and what if they do not fit.

    prompt = build_prompt(request, tokenizer, template, n_ctx)

Pure functions. Knows requests, templates and tokenizers; nothing of engines, and nothing of HTTP dialects beyond what a request says.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from localrun.errors import BadRequest, ContextOverflow, TemplateError, Unsupported
from localrun.messages import Generate, Image, Message
from localrun.text.pictures import PictureForm, Pictures
from localrun.text.template import ChatTemplate
from localrun.text.tokenizer import Tokenizer

_NINE_CHARACTERS = "alphanumeric strings with length 9"
"""What Mistral's templates say when they refuse an id."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads."""

    tokens: list[int]
    text: str
    dropped_messages: int = 0
    """Messages left out because they did not fit."""
    dropped_tokens: int = 0
    """How many tokens that saved."""
    images: list[tuple[int, Image]] = field(default_factory=list)
    """Those in it, in their order, and where the tokens begin that stand for each."""


def build_prompt(
    request: Generate, tokenizer: Tokenizer, template: ChatTemplate, n_ctx: int, form: PictureForm | None = None
) -> Prompt:
    """The prompt of `request`. form: how the model reads images; None: it sees none.

    n_ctx: most tokens that prompt and answer may hold together; the answer needs room for at least one, unless max_tokens is 0.
    Raises ContextOverflow: it does not fit, and the request does not let messages be dropped or none is left that may be.
    TemplateError: the template does not accept the messages. BadRequest: the request holds no prompt or several.
    Unsupported: it holds images, and the model sees none.
    """
    if sum(part is not None for part in (request.messages, request.prompt, request.prompt_tokens)) != 1:
        raise BadRequest("exactly one of messages, prompt and prompt_tokens must be given")
    if form is None and (request.images or any(message.images for message in request.messages or [])):
        raise Unsupported("images: this model does not see images", param="images")
    pictures = Pictures(form)
    room = n_ctx if request.max_tokens == 0 else n_ctx - 1
    if request.prompt_tokens is not None:
        tokens = _checked(request.context + request.prompt_tokens, tokenizer)
        return _fitting(Prompt(tokens, _text_of(tokens, tokenizer)), room)
    if request.raw and request.prompt is not None:
        return _fitting(_assembled(pictures.marked(request.prompt, request.images), request, tokenizer, pictures), room)
    if request.template is not None:
        template = template.with_source(request.template)
    messages = request.messages if request.messages is not None else _as_messages(request)
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    if template.fallback and request.messages is None and not request.system:
        # A base model continues the prompt; no template has a say in how it begins or ends.
        return _fitting(_assembled(pictures.marked(request.prompt or "", request.images), request, tokenizer, pictures), room)
    messages = pictures.marked_messages(messages)

    def assemble(kept: list[Message]) -> Prompt:
        return _assembled(render(kept, request, template), request, tokenizer, pictures)

    whole = assemble(messages)
    if len(whole.tokens) <= room:
        return whole
    if request.overflow == "error":
        raise ContextOverflow(len(whole.tokens), room)
    return _without_oldest(messages, whole, assemble, room)


# ---- tokens ----


def _assembled(text: str, request: Generate, tokenizer: Tokenizer, pictures: Pictures) -> Prompt:
    """`text` with an earlier turn's tokens in front, or with the tokens the vocabulary puts in front; never with two BOS."""
    context = _checked(request.context, tokenizer)
    tokens, places = pictures.encode(text, tokenizer)
    text = pictures.shown(text)
    bos = tokenizer.bos_id
    moved = 0
    if context:
        if tokens and tokens[0] == bos:
            del tokens[0]
            moved = -1
        tokens, text, moved = context + tokens, _text_of(context, tokenizer) + text, moved + len(context)
    elif tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
        tokens.insert(0, bos)
        moved = 1
    return Prompt(tokens, text, images=[(start + moved, pictures.images[number]) for start, number in places])


def _checked(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    for token in tokens:
        if not 0 <= token < tokenizer.n_vocab:
            raise BadRequest(f"token {token} is outside the model's vocabulary of {tokenizer.n_vocab} tokens")
    return tokens


def _text_of(tokens: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens, clean_spaces=False).decode("utf-8", "replace")


def _fitting(prompt: Prompt, room: int) -> Prompt:
    if len(prompt.tokens) > room:
        raise ContextOverflow(len(prompt.tokens), room)
    return prompt


def _without_oldest(messages: list[Message], whole: Prompt, assemble: Callable[[list[Message]], Prompt], room: int) -> Prompt:
    """The prompt of as many of the latest messages as fit. System messages and the last message always stay."""
    cuts = list(_cuts(messages))

    def kept(cut: int) -> list[Message]:
        return [message for i, message in enumerate(messages) if i >= cut or message.role == "system"]

    def fits(cut: int) -> bool:
        return len(assemble(kept(cut)).tokens) <= room

    found = bisect_left(cuts, True, key=fits)
    if found == len(cuts):
        shortest = assemble(kept(cuts[-1])) if cuts else whole
        raise ContextOverflow(len(shortest.tokens), room)
    prompt = assemble(kept(cuts[found]))
    dropped = len(messages) - len(kept(cuts[found]))
    return Prompt(prompt.tokens, prompt.text, dropped, len(whole.tokens) - len(prompt.tokens), prompt.images)


def _cuts(messages: list[Message]) -> Iterator[int]:
    """Where the conversation may begin: at each user message, so that an answer or a tool's result never stands without what led to it.

    The last message is the last resort.
    """
    last = len(messages) - 1
    for i, message in enumerate(messages):
        if (i and message.role == "user") or (i == last and i):
            yield i


# ---- messages ----


def render(messages: list[Message], request: Generate, template: ChatTemplate) -> str:
    """The conversation in the model's template, ready for the assistant's turn, or to go on with it if the last message is an assistant's.

    Templates differ in what they accept. One that raises is tried again in these forms, each closer to what older templates know:
    tool-call arguments as JSON text instead of objects; `tools` undefined instead of None; neighbouring messages of one role joined by a
    blank line; the system message put in front of the first user message. Raises TemplateError, that of the first form, if none works.
    """
    first_error: TemplateError | None = None
    for form in _forms(messages, request):
        try:
            return _render_form(form, request, template)
        except TemplateError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


@dataclass(frozen=True, slots=True)
class _Form:
    messages: list[Message]
    json_arguments: bool = False
    define_absent: bool = True


def _forms(messages: list[Message], request: Generate) -> Iterator[_Form]:
    yield _Form(messages)
    has_calls = any(message.tool_calls for message in messages)
    if has_calls:
        yield _Form(messages, json_arguments=True)
    if not request.tools:
        yield _Form(messages, define_absent=False)
        if has_calls:
            yield _Form(messages, json_arguments=True, define_absent=False)
    joined = _join_neighbours(messages)
    if len(joined) != len(messages):
        yield _Form(joined)
    without_system = _join_neighbours(_system_into_user(messages))
    if len(without_system) != len(joined):
        yield _Form(without_system)


def _render_form(form: _Form, request: Generate, template: ChatTemplate) -> str:
    short_ids = _NINE_CHARACTERS in template.source
    messages = [as_template_message(message, json_arguments=form.json_arguments, short_ids=short_ids) for message in form.messages]
    variables = {**_thinking_variables(request.think), **request.template_kwargs}
    last = form.messages[-1]
    continues = last.role == "assistant" and not last.tool_calls and bool(last.content)
    add_generation_prompt = bool(variables.pop("add_generation_prompt", not continues))
    text = template.render(
        messages,
        tools=request.tools or None,
        add_generation_prompt=add_generation_prompt,
        define_absent=form.define_absent,
        **variables,
    )
    if continues and not add_generation_prompt:
        # Whatever the template puts behind an answer would end the turn that is to go on.
        at = text.rfind(last.content.strip())
        if at >= 0:
            text = text[: at + len(last.content.strip())]
    return text


def as_template_message(message: Message, *, json_arguments: bool = False, short_ids: bool = False) -> dict[str, Any]:
    """A message as templates read it.

    json_arguments: tool-call arguments as JSON text; otherwise as objects where they parse. short_ids: ids of calls are made nine letters
    or digits.
    """

    def id_of(call_id: str) -> str:
        return short_id(call_id) if short_ids else call_id

    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        # The field has three names in templates; each knows one of them.
        out["reasoning_content"] = out["reasoning"] = out["thinking"] = message.thinking
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": id_of(call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments, json_arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_name is not None:
        out["name"] = message.tool_name
    if message.tool_call_id is not None:
        out["tool_call_id"] = id_of(message.tool_call_id)
    return out


def _arguments(arguments: dict[str, Any] | str, as_json: bool) -> dict[str, Any] | str:
    if as_json:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def short_id(call_id: str) -> str:
    """`call_id` if it is nine letters or digits, as Mistral's templates insist on; else nine that follow from it."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _thinking_variables(think: bool | str | None) -> dict[str, Any]:
    """What templates look at to switch thinking on, off, or to a level; nothing when the request does not say."""
    if think is None:
        return {}
    on = think not in (False, "none")
    variables: dict[str, Any] = {"enable_thinking": on, "thinking": on}
    if isinstance(think, str) and on:
        variables["reasoning_effort"] = think
    return variables


def _as_messages(request: Generate) -> list[Message]:
    """The turn of a completion request. An empty prompt behind an earlier turn's tokens adds nothing."""
    system = [Message(role="system", content=request.system)] if request.system else []
    return [*system, Message(role="user", content=request.prompt or "", images=request.images)]


def _join_neighbours(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else None
        plain = message.role in ("system", "user", "assistant") and not message.tool_calls
        if before is not None and plain and before.role == message.role and not before.tool_calls:
            contents = [content for content in (before.content, message.content) if content]
            joined[-1] = Message(role=message.role, content="\n\n".join(contents), thinking=message.thinking or before.thinking)
        else:
            joined.append(message)
    return joined


def _system_into_user(messages: list[Message]) -> list[Message]:
    """Without system messages; what they say stands in front of the first user message."""
    said = [message.content for message in messages if message.role == "system" and message.content]
    rest = [message for message in messages if message.role != "system"]
    if not said:
        return rest
    first = next((i for i, message in enumerate(rest) if message.role == "user"), None)
    if first is None:
        return [Message(role="user", content="\n\n".join(said)), *rest]
    rest[first] = Message(role="user", content="\n\n".join([*said, rest[first].content]))
    return rest
