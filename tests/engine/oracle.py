"""What an answer must be: the model run over the sequence alone, from the start, for every token, with blocks in a row and no engine."""

from __future__ import annotations

import numpy as np

from localrun.engine.sampler import Sampler
from localrun.messages import Sampling
from localrun.models.model import BLOCK_TOKENS, Span
from tests.fakes import END, EOS, FakeModel


def answer(prompt: list[int], sampling: Sampling, max_tokens: int, *, limit: int = 4096, **model_options: float) -> list[int]:
    """Token ids that follow `prompt`, an end-of-turn token included."""
    model = FakeModel(max_batch=limit, **model_options)  # type: ignore[arg-type]
    model.allocate_kv(-(-limit // BLOCK_TOKENS))
    slot = -1
    if model.info.state_bytes:
        model.allocate_state(1)
        slot = 0
    sampler = Sampler(sampling, sampling.seed or 0)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < limit:
        blocks = np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int32)
        span = Span(np.array(tokens, np.int32), 0, blocks, np.array([len(tokens) - 1], np.int32), state=slot)
        tokens.append(sampler.choose(model.forward([span])[0], tokens, len(tokens)))
        if tokens[-1] in (EOS, END):
            break
    return tokens[len(prompt) :]


def answer_without(banned: list[str], prompt: list[int], sampling: Sampling, max_tokens: int, **model_options: float) -> list[int]:
    """As answer, of one-byte tokens, where a banned string is taken back, but for what is shown, and not begun there again."""
    model = FakeModel(max_batch=4096, **model_options)  # type: ignore[arg-type]
    model.allocate_kv(256)
    slot = -1
    if model.info.state_bytes:
        model.allocate_state(1)
        slot = 0
    sampler = Sampler(sampling, sampling.seed or 0)
    tokens = list(prompt)
    forbidden: dict[int, list[int]] = {}
    shown = 0
    while len(tokens) - len(prompt) < max_tokens:
        blocks = np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int32)
        span = Span(np.array(tokens, np.int32), 0, blocks, np.array([len(tokens) - 1], np.int32), state=slot)
        tokens.append(sampler.choose(model.forward([span])[0], tokens, len(tokens), banned=forbidden.get(len(tokens), ())))
        text = bytes(tokens[len(prompt) :])
        found = [len(string) for string in banned if text.endswith(string.encode())]
        beginnings = [n for string in banned for n in range(len(string)) if text.endswith(string[:n].encode())]
        if not found:
            shown = max(shown, len(text) - max(beginnings))
        else:
            first = len(prompt) + max(shown, len(text) - max(found))
            forbidden = {position: ids for position, ids in forbidden.items() if position <= first}
            forbidden.setdefault(first, []).append(tokens[first])
            del tokens[first:]
    return tokens[len(prompt) :]
