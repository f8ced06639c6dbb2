"""Between the engine's blocks and the folder of saved ones: what a request's answer computes is saved as it goes, and what is saved of its
prompt is brought back before it is scheduled, a few blocks a step so that nobody's tokens wait for the disk.

Everything here happens in the engine's thread, between two passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localrun.engine.cache import KVCache
from localrun.engine.sequence import Sequence
from localrun.engine.sessions import Chain, SessionStore
from localrun.models.model import Model


@dataclass
class _Kept:
    """A request whose conversation is kept. `shadow` holds the blocks that are being brought back, until all are and the tree has them."""

    seq: Sequence
    chain: Chain
    shadow: Sequence | None
    n_saved: int = 0
    """Blocks of it that are known to be saved."""
    keys: list[bytes] = field(default_factory=list)


class Keeper:
    """`store` is closed by whoever made it."""

    def __init__(self, store: SessionStore, cache: KVCache, model: Model, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._cache = cache
        self._model = model
        self._clock = clock
        self._kept: dict[str, _Kept] = {}

    @property
    def shadows(self) -> list[Sequence]:
        """Sequences that hold blocks besides those of the scheduler."""
        return [kept.shadow for kept in self._kept.values() if kept.shadow is not None]

    @property
    def is_restoring(self) -> bool:
        return any(kept.shadow is not None for kept in self._kept.values())

    def begin(self, seq: Sequence) -> None:
        """The sequence, just queued, is held back until what is saved of it is in the tree."""
        shadow = Sequence(seq.request_id, list(seq.tokens), seq.limit, seq.arrival)
        self._cache.adopt(shadow)
        size = self._cache.pool.block_tokens
        # A block that the tree knows in part is restored whole, and replaces it.
        self._cache.rewind(shadow, shadow.computed - shadow.computed % size)
        self._kept[seq.request_id] = _Kept(seq, self.store.chain(), shadow)
        seq.held = True

    def restore(self, budget_s: float) -> None:
        """Brings blocks back for about so long."""
        until = self._clock() + budget_s
        for kept in self._kept.values():
            while kept.shadow is not None:
                if not self._next_block(kept, kept.shadow):
                    self._ready(kept, kept.shadow)
                elif self._clock() >= until:
                    return

    def save(self, seq: Sequence) -> None:
        """Has all whole blocks of it saved that are computed and not yet saved."""
        kept = self._kept.get(seq.request_id)
        if kept is None or seq.n_dropped:  # after a shift it is no conversation that anybody would bring again
            return
        size = self._cache.pool.block_tokens
        kept.n_saved = min(kept.n_saved, seq.computed // size)  # tokens may have been taken back
        del kept.keys[kept.n_saved :]
        for index in range(kept.n_saved, min(seq.computed, len(seq.tokens)) // size):
            key = kept.chain.key(seq.tokens, index)
            tokens = seq.tokens[index * size : (index + 1) * size]
            if not self.store.has(key) and not self.store.save(key, tokens, self._model.read_block(seq.blocks[index])):
                return
            kept.keys.append(key)
            kept.n_saved = index + 1

    def end(self, seq: Sequence) -> None:
        """The request is over, or cancelled: gives back what it held here."""
        kept = self._kept.pop(seq.request_id, None)
        if kept is not None:
            if kept.shadow is not None:
                self._cache.drop(kept.shadow)
            self.store.touch(kept.keys)

    def _next_block(self, kept: _Kept, shadow: Sequence) -> bool:
        """Brings one block back. False when there is none, no room, or nothing to gain."""
        size = self._cache.pool.block_tokens
        index = shadow.computed // size
        # The last token is always computed anew, and a pool that is nearly full is better used for what runs.
        if shadow.computed + size >= len(shadow.tokens) or self._cache.pool.n_obtainable < self._cache.pool.n_blocks // 8 + 1:
            return False
        key = kept.chain.key(shadow.tokens, index)
        content = self.store.load(key, shadow.tokens[index * size : (index + 1) * size], self._model.info.kv_bytes_per_block)
        if content is None or not self._cache.grow(shadow, size):
            return False
        self._model.write_block(shadow.blocks[index], content)
        shadow.computed += size
        return True

    def _ready(self, kept: _Kept, shadow: Sequence) -> None:
        kept.shadow = None
        self._cache.drop(shadow)
        kept.seq.held = False
