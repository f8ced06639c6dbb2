"""The prompt's part of a completion that repeats it: its tokens, how likely each was, and what would have been likelier.

Evaluation harnesses live on this (`echo` with `logprobs`, often with no token of an answer). Asks a runner to tokenize, to judge, and for
the text of tokens; knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from localrun.api.answer import Echo
from localrun.daemon.exchange import Exchange
from localrun.daemon.loader import Resident
from localrun.errors import LocalrunError, RequestCancelled
from localrun.messages import Detokenize, Detokenized, Evaluate, Evaluated, Finished, Generate, Started, Tokenize, Tokenized


async def echo_of(x: Exchange, resident: Resident, name: str, prompt: str | list[int], top: int | None, request: Generate) -> Echo:
    """The prompt as it is repeated. name: tells this one from the exchange's others. top: None: its text alone; k: log-probabilities, and
    the k likeliest tokens at each place. request: the one whose prompt it is.

    Raises what the runner reports: BadRequest for ids that are none, ContextOverflow.
    """
    if isinstance(prompt, str):
        if top is None:
            return Echo(text=prompt)
        answer = await resident.runner.ask(name, Tokenize(request_id=name, text=prompt))
        assert isinstance(answer, Tokenized)
        tokens = answer.tokens
    else:
        tokens = prompt
    if top is None:
        whole = await resident.runner.ask(name, Detokenize(request_id=name, tokens=tokens))
        assert isinstance(whole, Detokenized)
        return Echo(text=whole.text, ids=tokens)
    chunks = await _judged(x, resident, name, tokens, top, request)
    names = await _names(resident, name, {*tokens, *(token for chunk in chunks for row in chunk.top_ids for token in row)})
    echo = Echo(text=prompt if isinstance(prompt, str) else "".join(names[token] for token in tokens), ids=tokens)
    echo.tokens = [names[token] for token in tokens]
    # What is said at a place is said of the token that follows it; of the first one nobody says anything.
    echo.logprobs = [None, *(-nll for chunk in chunks for nll in chunk.nll)]
    rows = [
        {names[token]: logprob for token, logprob in zip(ids, logprobs, strict=True)}
        for chunk in chunks
        for ids, logprobs in zip(chunk.top_ids, chunk.top_logprobs, strict=True)
    ]
    echo.top = [None, *rows[: len(tokens) - 1]]
    return echo


async def _judged(x: Exchange, resident: Resident, name: str, tokens: list[int], top: int, like: Generate) -> list[Evaluated]:
    """How likely the model finds the tokens, chunk by chunk in order."""
    question = Evaluate(request_id=name, tokens=tokens, top=top, adapters=like.adapters, adapter_scale=like.adapter_scale)
    events = resident.runner.open([question])
    x.stack.callback(events.close)
    chunks: list[Evaluated] = []
    while True:
        _, event = await events.next()
        if isinstance(event, Evaluated):
            chunks.append(event)
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise RequestCancelled()
            return chunks
        elif not isinstance(event, Started):
            raise LocalrunError(f"the runner answered an evaluation with {type(event).__name__}")


async def _names(resident: Resident, name: str, ids: Iterable[int]) -> dict[int, str]:
    """The texts of tokens, each by itself; those asked for before are remembered as long as the model is loaded."""
    unknown = [token for token in ids if token not in resident.token_texts]
    asked = (Detokenize(request_id=f"{name}-{token}", tokens=[token]) for token in unknown)
    answers = await asyncio.gather(*(resident.runner.ask(one.request_id, one) for one in asked))
    for token, answer in zip(unknown, answers, strict=True):
        assert isinstance(answer, Detokenized)
        resident.token_texts[token] = answer.text
    return resident.token_texts
