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
    sampler = Sampler(sampling, sampling.seed or 0)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < limit:
        blocks = np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int32)
        span = Span(np.array(tokens, np.int32), 0, blocks, np.array([len(tokens) - 1], np.int32))
        tokens.append(sampler.choose(model.forward([span])[0], tokens, len(tokens)))
        if tokens[-1] in (EOS, END):
            break
    return tokens[len(prompt) :]
