"""The handler of POST /api/evaluate. Knows how a runner is asked; what is asked and how it is said is in api/evaluate.py."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from localrun.api import evaluate as dialect
from localrun.api.evaluate import EvaluateBody
from localrun.api.options import adapters, keep_alive_seconds, model_options
from localrun.daemon.exchange import Exchange
from localrun.daemon.generation import hold
from localrun.daemon.loader import Resident
from localrun.errors import LocalrunError, RequestCancelled
from localrun.messages import Evaluated, Finished, Started, Tokenize, Tokenized


async def evaluate(x: Exchange, body: EvaluateBody) -> None:
    """POST /api/evaluate: NDJSON lines, the first when the tokens are known."""
    dialect.check(body)
    stored = await x.services.stored(body.model)
    resident = await hold(x, stored, body.num_thread, keep_alive_seconds(body.keep_alive))
    model = await x.services.defaults(stored, body.model)
    beside = adapters(model_options(model.params), model)
    around = await _tokens(resident, f"{x.id}-around", "")
    tokens = body.tokens if body.tokens is not None else await _tokens(resident, f"{x.id}-text", body.text or "")
    asked = dialect.requests(body, tokens, dialect.common_prefix(tokens, around), x.id)
    ends: list[Finished] = []
    for request, window, n_front in asked:
        events = resident.runner.open([msgspec.structs.replace(request, **beside)])
        x.stack.callback(events.close)
        while True:
            _, event = await events.next()
            if not x.has_begun:
                # Only now: a text that is refused is answered with a status.
                await x.begin("ndjson")
                await x.chunks([dialect.opening(body.model, tokens, len(asked))])
            if isinstance(event, Evaluated):
                line = dialect.line(body.model, event, window, n_front)
                await x.chunks([line] if line is not None else [])
            elif isinstance(event, Finished):
                if event.reason == "cancelled":
                    raise RequestCancelled()
                ends.append(event)
                break
            elif not isinstance(event, Started):
                raise LocalrunError(f"the runner answered an evaluation with {type(event).__name__}")
    x.noted["prompt_tokens"] = len(tokens)
    await x.chunks([dialect.closing(body.model, tokens, ends, time.monotonic() - x.began, x.load_s)])
    await x.end()


async def _tokens(resident: Resident, request_id: str, text: str) -> Sequence[int]:
    answer = await resident.runner.ask(request_id, Tokenize(request_id=request_id, text=text))
    if not isinstance(answer, Tokenized):
        raise LocalrunError(f"the runner answered with {type(answer).__name__}")
    return answer.tokens
