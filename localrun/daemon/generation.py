"""The handlers that have a model answer. Each checks its body, holds the model in memory, sends requests to its runner and passes the
events on in its dialect. Knows neither what a chunk looks like (localrun.api) nor how one is framed (exchange.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from localrun.api import anthropic, ollama, openai, responses
from localrun.api.answer import Answer, Outcome, Reply
from localrun.api.anthropic_schema import CountTokensBody, MessagesBody
from localrun.api.openai_schema import ChatCompletionBody, CompletionBody
from localrun.api.options import checked_options, keep_alive_seconds, model_options
from localrun.api.responses_schema import ResponsesBody
from localrun.api.schema import ChatBody, DetokenizeBody, GenerateBody, TokenizeBody
from localrun.daemon.echo import echo_of
from localrun.daemon.exchange import Exchange, Framing
from localrun.daemon.loader import Resident
from localrun.daemon.runners import Progress, Stream
from localrun.daemon.services import wanted
from localrun.errors import LocalrunError, RequestCancelled
from localrun.messages import (
    Detokenize,
    Detokenized,
    Finished,
    Generate,
    LoadProgress,
    Piece,
    Render,
    Rendered,
    Started,
    Tokenize,
    Tokenized,
)
from localrun.store import StoredModel


async def generate(x: Exchange, body: GenerateBody) -> None:
    """POST /api/generate."""
    name = ollama.require_model(body)
    ollama.check_generate(body)
    stored = await x.services.stored(name)
    request = None if ollama.loads_only(body) else ollama.generate_request(body, await x.services.defaults(stored, name), x.id)
    resident = await _hold_for_ollama(x, body, stored)
    if request is None or resident is None:
        return
    await _answer_ollama(x, body, resident, request, ollama.OllamaReply(body.model, chat=False, with_context=not body.raw))


async def chat(x: Exchange, body: ChatBody) -> None:
    """POST /api/chat."""
    name = ollama.require_model(body)
    ollama.check_chat(body)
    stored = await x.services.stored(name)
    request = None if ollama.loads_only(body) else ollama.chat_request(body, await x.services.defaults(stored, name), x.id)
    resident = await _hold_for_ollama(x, body, stored)
    if request is None or resident is None:
        return
    await _answer_ollama(x, body, resident, request, ollama.OllamaReply(body.model, chat=True))


async def v1_chat(x: Exchange, body: ChatCompletionBody) -> None:
    """POST /v1/chat/completions."""
    stored = await x.services.stored(body.model)
    requests = openai.chat_requests(body, await x.services.defaults(stored, body.model), x.id)
    resident = await hold(x, stored, body.num_thread, keep_alive_seconds(body.keep_alive), options=openai.options_of(body))
    usage = body.stream_options is not None and body.stream_options.include_usage
    reply = openai.ChatReply(body.model, n=body.n, include_usage=usage)
    await _answer(x, resident, requests, reply, "sse" if body.stream else None, one_call=not body.parallel_tool_calls)


async def v1_completions(x: Exchange, body: CompletionBody) -> None:
    """POST /v1/completions."""
    stored = await x.services.stored(body.model)
    requests = openai.completion_requests(body, await x.services.defaults(stored, body.model), x.id)
    resident = await hold(x, stored, body.num_thread, keep_alive_seconds(body.keep_alive), options=openai.options_of(body))
    echoes = []
    if body.echo:
        for number, prompt in enumerate(openai.prompts_of(body)):
            echoes.append(await echo_of(x, resident, f"{x.id}-echo{number}", prompt, body.logprobs, requests[0]))
    usage = body.stream_options is not None and body.stream_options.include_usage
    await _answer(
        x,
        resident,
        requests,
        openai.CompletionReply(body.model, n=body.n, include_usage=usage, echoes=echoes, made=openai.best_of(body)),
        "sse" if body.stream else None,
    )


async def v1_responses(x: Exchange, body: ResponsesBody) -> None:
    """POST /v1/responses."""
    stored = await x.services.stored(body.model)
    request = responses.response_request(body, await x.services.defaults(stored, body.model), x.id)
    resident = await hold(x, stored, None, keep_alive_seconds(body.keep_alive), options=responses.options_of(body))
    reply = responses.ResponseReply(body)
    await _answer(x, resident, [request], reply, "events" if body.stream else None, one_call=not body.parallel_tool_calls)


async def v1_messages(x: Exchange, body: MessagesBody) -> None:
    """POST /v1/messages."""
    anthropic.check(body)
    stored = await x.services.stored(body.model)
    request = anthropic.messages_request(body, await x.services.defaults(stored, body.model), x.id)
    resident = await hold(x, stored, None, keep_alive_seconds(body.keep_alive), options=anthropic.options_of(body))
    one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    await _answer(x, resident, [request], anthropic.MessageReply(body.model, x.id), "events" if body.stream else None, one_call=one_call)


async def count_tokens(x: Exchange, body: CountTokensBody) -> None:
    """POST /v1/messages/count_tokens."""
    anthropic.check(body)
    stored = await x.services.stored(body.model)
    request = anthropic.count_request(body, await x.services.defaults(stored, body.model), x.id)
    resident = await hold(x, stored, None, keep_alive_seconds(body.keep_alive))
    rendered = await resident.runner.ask(x.id, Render(request=request))
    assert isinstance(rendered, Rendered)
    await x.json({"input_tokens": rendered.tokens})


async def tokenize(x: Exchange, body: TokenizeBody) -> None:
    """POST /api/tokenize."""
    resident = await hold(x, await x.services.stored(body.model), None, keep_alive_seconds(body.keep_alive))
    question = Tokenize(request_id=x.id, text=body.content, add_special=body.add_special, parse_special=body.parse_special)
    answer = await resident.runner.ask(x.id, question)
    assert isinstance(answer, Tokenized)
    await x.json({"model": body.model, "tokens": answer.tokens, "count": len(answer.tokens)})


async def detokenize(x: Exchange, body: DetokenizeBody) -> None:
    """POST /api/detokenize."""
    resident = await hold(x, await x.services.stored(body.model), None, keep_alive_seconds(body.keep_alive))
    answer = await resident.runner.ask(x.id, Detokenize(request_id=x.id, tokens=body.tokens))
    assert isinstance(answer, Detokenized)
    await x.json({"model": body.model, "content": answer.text})


# ---- holding a model ----------------------------------------------------------------------------------------------------------


async def hold(
    x: Exchange,
    stored: StoredModel,
    num_thread: int | None,
    keep_alive: float | None,
    heard: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> Resident:
    """Has the model in memory until the exchange ends. Notes how long that took. options: the request's, which may say how it is loaded."""
    began = time.monotonic()
    x.noted["model"] = stored.name
    facts = await x.services.facts(stored)
    asked = checked_options(options or {})
    draft = await x.services.draft(stored, asked.get("draft"))
    described = wanted(stored, facts, num_thread, draft, asked)
    resident = await x.stack.enter_async_context(x.services.loader.use(described, keep_alive, heard))
    x.load_s = time.monotonic() - began
    return resident


async def _hold_for_ollama(x: Exchange, body: GenerateBody | ChatBody, stored: StoredModel) -> Resident | None:
    """The model in memory, or None where the request asked for no more than that and has been answered."""
    keep_alive = keep_alive_seconds(body.keep_alive)
    if ollama.loads_only(body) and keep_alive == 0:
        await x.services.loader.unload(stored.model_path, stored.name)
        await x.json(ollama.load_reply(body, "unload"))
        return None
    num_thread = model_options(body.options).get("num_thread")
    if body.load_progress and body.stream:
        resident = await _hold_aloud(x, body, stored, num_thread, keep_alive)
    else:
        resident = await hold(x, stored, num_thread, keep_alive, options=body.options)
    if not ollama.loads_only(body):
        return resident
    if x.has_begun:
        await x.chunks([ollama.load_reply(body, "load")])
        await x.end()
    else:
        await x.json(ollama.load_reply(body, "load"))
    return None


async def _hold_aloud(
    x: Exchange, body: GenerateBody | ChatBody, stored: StoredModel, num_thread: int | None, keep_alive: float | None
) -> Resident:
    """As `hold`, with a line for each step of loading while it goes on."""
    steps: asyncio.Queue[LoadProgress | None] = asyncio.Queue()

    async def say() -> None:
        while (step := await steps.get()) is not None:
            while steps.qsize() and (later := steps.get_nowait()) is not None:
                step = later
            if not x.has_begun:
                await x.begin("ndjson")
            await x.chunks([ollama.load_progress(body, step.stage, step.done, step.total)])

    saying = asyncio.create_task(say())
    try:
        return await hold(x, stored, num_thread, keep_alive, steps.put_nowait, body.options)
    finally:
        steps.put_nowait(None)
        await saying


# ---- answering ----------------------------------------------------------------------------------------------------------------


async def _answer_ollama(x: Exchange, body: GenerateBody | ChatBody, resident: Resident, request: Generate, reply: Reply) -> None:
    if body.debug_render_only:
        rendered = await resident.runner.ask(x.id, Render(request=request))
        assert isinstance(rendered, Rendered)
        await x.json(ollama.rendered_reply(body, rendered.text, rendered.tokens))
        return
    await _answer(x, resident, [request], reply, "ndjson" if body.stream else None)


async def _answer(
    x: Exchange, resident: Resident, requests: list[Generate], reply: Reply, framing: Framing | None, *, one_call: bool = False
) -> None:
    """Sends the requests and passes on what comes back: as it comes where `framing` says how, else at the end.

    one_call: an answer ends with its first tool call.
    """
    if resident.slots is not None:
        await x.stack.enter_async_context(resident.slots)
    events = resident.runner.open(requests)
    x.stack.callback(events.close)
    x.failing = reply.failing
    gathered = _Gathered(x, len(requests), one_call)
    for watch in gathered.watches:
        x.stack.callback(watch.close)
    while not gathered.complete:
        # What has come in the meantime goes out together, also what came before an error: of how much comes at a time no reply depends.
        lines = await _next(gathered, events, reply if framing else None)
        failure: LocalrunError | None = None
        while failure is None and events.ready() and not gathered.complete:
            try:
                lines += await _next(gathered, events, reply if framing else None)
            except LocalrunError as error:
                failure = error
        if framing is not None:
            if not x.has_begun:
                await x.begin(framing, dropped_headers(gathered))
            await x.chunks(lines)
        if failure is not None:
            raise failure
    gathered.note()
    if framing is None:
        await x.json(reply.whole(gathered.answers, gathered.done))
    else:
        await x.chunks(reply.ending(gathered.done))
        await x.end()


class _Gathered:
    """What has come of the requests so far."""

    def __init__(self, x: Exchange, n: int, one_call: bool = False) -> None:
        self._x = x
        self._one_call = one_call
        self.answers = [Answer() for _ in range(n)]
        self.started: list[Started | None] = [None] * n
        self.called_tools = [False] * n
        self.outcomes: list[Outcome | None] = [None] * n
        self.watches = [x.services.metrics.request(x.noted["model"]) for _ in range(n)]
        self.left = n

    @property
    def complete(self) -> bool:
        return self.left == 0

    @property
    def done(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome is not None]

    def take(self, number: int, piece: Piece, events: Stream) -> Piece | None:
        """What of a piece belongs to the answer; None: nothing of it, for the answer has ended with the call before."""
        self.watches[number].piece()
        if self._one_call and self.called_tools[number]:
            return None
        if piece.tool_calls:
            self.called_tools[number] = True
            if self._one_call:
                events.cancel(number)
                return msgspec.structs.replace(piece, tool_calls=piece.tool_calls[:1])
        return piece

    def end(self, number: int, finished: Finished) -> Outcome:
        """A request has ended. Raises RequestCancelled when it was not we who ended it."""
        if finished.reason == "cancelled":
            if not (self._one_call and self.called_tools[number]):
                raise RequestCancelled()
            finished = msgspec.structs.replace(finished, reason="stop")
        started = self.started[number] or Started(
            request_id=finished.request_id, prompt_tokens=finished.prompt_tokens, cached_tokens=finished.cached_tokens, seed=finished.seed
        )
        total = time.monotonic() - self._x.began
        outcome = Outcome(started, finished, total, self._x.load_s, self.called_tools[number])
        self.outcomes[number] = outcome
        self.watches[number].finished(finished)
        self.left -= 1
        return outcome

    def note(self) -> None:
        """Puts the counts into the request's line in the log."""
        ended = [outcome.finished for outcome in self.done]
        completion = sum(one.completion_tokens for one in ended)
        decode_s = sum(one.decode_s for one in ended)
        self._x.noted |= {
            "prompt_tokens": sum(one.prompt_tokens for one in ended),
            "cached_tokens": sum(one.cached_tokens for one in ended),
            "completion_tokens": completion,
            "load_s": round(self._x.load_s, 4),
            "queue_s": round(max(one.queue_s for one in ended), 4),
            "ttft_s": round(max(one.first_token_s for one in ended), 4),
            "tpot_s": round(decode_s / max(completion - len(ended), 1), 5),
            "reason": ",".join(sorted({one.reason for one in ended})),
        }


async def _next(gathered: _Gathered, events: Stream, reply: Reply | None) -> list[dict[str, Any]]:
    """Takes one event in; what there is to send of it, where a reply is streamed. Raises the error a request ended with."""
    number, event = await events.next()
    if isinstance(event, Piece):
        piece = gathered.take(number, event, events)
        if piece is None:
            return []
        if reply is not None:
            return reply.chunks(number, piece)
        gathered.answers[number].add(piece)
    elif isinstance(event, Started):
        first = not any(gathered.started)
        gathered.started[number] = event
        gathered.watches[number].started(event)
        return reply.opening(event) if reply is not None and first else []
    elif isinstance(event, Finished):
        outcome = gathered.end(number, event)
        return reply.closing(number, outcome) if reply is not None else []
    else:
        raise LocalrunError(f"the runner answered a request with {type(event).__name__}")
    return []


def dropped_headers(gathered: _Gathered) -> dict[str, str]:
    """Headers that say, before any text, that a prompt did not fit whole."""
    dropped = [one for one in gathered.started if one is not None and (one.dropped_messages or one.dropped_tokens)]
    if not dropped:
        return {}
    return {
        "x-localrun-messages-dropped": str(sum(one.dropped_messages for one in dropped)),
        "x-localrun-prompt-tokens-dropped": str(sum(one.dropped_tokens for one in dropped)),
    }
