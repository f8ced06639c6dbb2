"""POST /api/evaluate, localrun's own: how likely a model finds a text, token by token. `localrun perplexity` is made of it.

The text is fed as it is (no template, no sampling), special tokens parsed, BOS in front where the vocabulary asks for it. A text that is
longer than `window` goes in overlapping windows: every token is still judged once, with at least window - stride - 1 tokens before it.
Pure functions of the body and of the runner's events; the handler is in daemon/evaluation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localrun.api.fields import Body, honoured
from localrun.errors import BadRequest
from localrun.messages import Evaluate, Evaluated, Finished

KeepAlive = int | float | str


class EvaluateBody(Body):
    """POST /api/evaluate: exactly one of text and tokens."""

    model: str = honoured(..., "Name of the model, as `localrun list` prints it.")
    text: str | None = honoured(None, "What to judge.")
    tokens: list[int] | None = honoured(None, "What to judge, as token ids, BOS included.")
    top: int = honoured(0, "How many of the likeliest tokens to report at each position.", ge=0, le=1000)
    ids: list[list[int]] | None = honoured(None, "For each position, the token ids whose log-probabilities to report besides.")
    window: int = honoured(0, "Most tokens the model sees at once; 0: the whole text.", ge=0)
    stride: int = honoured(0, "Tokens by which a window moves on; 0: half of the window.", ge=0)
    keep_alive: KeepAlive | None = honoured(None, "How long the model stays loaded afterwards: seconds or a duration; below 0: for ever.")
    num_thread: int | None = honoured(None, "Threads; another number than the model runs with loads it again.", ge=1)


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) of the text, fed together; what is said of positions [first, last) is reported."""

    start: int
    end: int
    first: int
    last: int


def check(body: EvaluateBody) -> None:
    """Raises BadRequest."""
    if (body.text is None) == (body.tokens is None):
        raise BadRequest("exactly one of text and tokens must be given", param="text")
    if body.stride and not body.window:
        raise BadRequest("stride needs a window", param="stride")


def common_prefix(tokens: Sequence[int], around: Sequence[int]) -> list[int]:
    """What the vocabulary puts in front of a text. around: the tokens of an empty text, which may hold some that come behind it."""
    front: list[int] = []
    for token, other in zip(tokens, around):
        if token != other:
            break
        front.append(token)
    return front


def windows(n: int, window: int, stride: int, n_prefix: int) -> list[Window]:
    """How `n` tokens are covered. window: most tokens fed at once, 0: all; stride: 0: half; n_prefix: tokens that are put in front of
    every window but the first, whose own first tokens they are.

    Every position is reported once, in order. Raises BadRequest for a window in which nothing moves.
    """
    if not window or n <= window:
        return [Window(0, n, 0, n)]
    stride = stride or max(1, window // 2)
    context = window - n_prefix - stride - 1
    if context < 0:
        most = window - n_prefix - 1
        if most < 1:
            raise BadRequest(f"a window of {window} tokens is too small; the least here is {n_prefix + 2}", param="window")
        raise BadRequest(f"a window of {window} tokens can move on by {most} at most, not by {stride}", param="stride")
    # The last row of a window says what comes next, which only the next window knows: it is reported from there.
    result = [Window(0, window, 0, window - 1)]
    while result[-1].end < n:
        first = result[-1].last
        start = max(n_prefix, first - context)
        end = min(n, start + window - n_prefix)
        result.append(Window(start, end, first, n if end == n else end - 1))
    return result


def requests(body: EvaluateBody, tokens: Sequence[int], prefix: Sequence[int], request_id: str) -> list[tuple[Evaluate, Window, int]]:
    """The runner's requests, in order: each with its window and the place of the window's first token in what is fed.

    prefix: what the vocabulary puts in front of every text. Raises BadRequest.
    """
    if body.ids is not None and len(body.ids) != len(tokens):
        raise BadRequest(f"ids has {len(body.ids)} rows for {len(tokens)} tokens", param="ids")
    found = []
    for number, window in enumerate(windows(len(tokens), body.window, body.stride, len(prefix))):
        front = list(prefix) if window.start else []
        fed = [*front, *tokens[window.start : window.end]]
        nothing: list[list[int]] = [[]] * len(front)
        ids = None if body.ids is None else nothing + body.ids[window.start : window.end]
        found.append((Evaluate(request_id=f"{request_id}-{number}", tokens=fed, top=body.top, ids=ids), window, len(front)))
    return found


def line(model: str, event: Evaluated, window: Window, n_front: int) -> dict[str, Any] | None:
    """What there is to report of an event, in positions of the text; None: nothing new."""
    shift = window.start - n_front
    low = max(event.first + shift, window.first)
    high = min(event.first + shift + len(event.tokens), window.last)
    if low >= high:
        return None
    part = slice(low - shift - event.first, high - shift - event.first)
    reply: dict[str, Any] = {"model": model, "first": low, "tokens": event.tokens[part], "nll": event.nll[part]}
    if any(event.top_ids):
        reply |= {"top_ids": event.top_ids[part], "top_logprobs": event.top_logprobs[part]}
    if event.logprobs:
        reply["logprobs"] = event.logprobs[part]
    return reply


def opening(model: str, tokens: Sequence[int], n_windows: int) -> dict[str, Any]:
    """The first line: what the text is to the model."""
    return {"model": model, "prompt_eval_count": len(tokens), "windows": n_windows, "done": False}


def closing(model: str, tokens: Sequence[int], ends: Sequence[Finished], total_s: float, load_s: float) -> dict[str, Any]:
    """The last line. Durations in nanoseconds, as in the dialect's other replies."""
    return {
        "model": model,
        "done": True,
        "prompt_eval_count": len(tokens),
        "prompt_eval_duration": round(sum(end.prefill_s for end in ends) * 1e9),
        "load_duration": round(load_s * 1e9),
        "total_duration": round(total_s * 1e9),
    }
