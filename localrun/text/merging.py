"""Pairwise merging of neighbours, best pair first: the loop that byte-pair encoding and SentencePiece's 'llama' model share.

Both begin with single characters and repeatedly join the best neighbouring pair, the leftmost of equals. They differ in what "best" means,
which is passed in. (BPE: Sennrich et al. 2016, arXiv:1508.07909; SentencePiece: Kudo and Richardson 2018, arXiv:1808.06226.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise

_SHORT = 24
"""Up to this many symbols, looking through all pairs each time is faster than keeping a heap."""

_CACHED_WORD = 64
"""Longest word, in characters, whose tokens are remembered."""
_CACHED_WORDS = 50_000

Cost = Callable[[str, str], float | None]
"""Of two neighbouring symbols: how late they are joined (smaller is sooner), or None if never."""


def merge(symbols: list[str], cost: Cost) -> list[str]:
    """`symbols` after all merges. Takes O(n log n) steps for n symbols."""
    return _merge_short(symbols, cost) if len(symbols) <= _SHORT else _merge_long(symbols, cost)


def _merge_short(symbols: list[str], cost: Cost) -> list[str]:
    symbols = list(symbols)
    never = float("inf")
    costs = [never if (c := cost(a, b)) is None else c for a, b in pairwise(symbols)]
    while costs:
        best = min(costs)
        if best == never:
            break
        i = costs.index(best)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        del costs[i]
        if i:
            left = cost(symbols[i - 1], symbols[i])
            costs[i - 1] = never if left is None else left
        if i < len(costs):
            right = cost(symbols[i], symbols[i + 1])
            costs[i] = never if right is None else right
    return symbols


def _merge_long(symbols: list[str], cost: Cost) -> list[str]:
    symbols = list(symbols)
    n = len(symbols)
    before = list(range(-1, n - 1))
    after = list(range(1, n + 1))
    # A pair is (cost, index of its left symbol, its two lengths); it is stale when the lengths no longer hold.
    heap: list[tuple[float, int, int, int]] = []
    for i in range(n - 1):
        c = cost(symbols[i], symbols[i + 1])
        if c is not None:
            heap.append((c, i, len(symbols[i]), len(symbols[i + 1])))
    heapq.heapify(heap)
    while heap:
        _, i, left_length, right_length = heapq.heappop(heap)
        j = after[i]
        if j >= n or len(symbols[i]) != left_length or len(symbols[j]) != right_length:
            continue
        symbols[i] += symbols[j]
        symbols[j] = ""
        after[i] = k = after[j]
        if k < n:
            before[k] = i
            c = cost(symbols[i], symbols[k])
            if c is not None:
                heapq.heappush(heap, (c, i, len(symbols[i]), len(symbols[k])))
        h = before[i]
        if h >= 0:
            c = cost(symbols[h], symbols[i])
            if c is not None:
                heapq.heappush(heap, (c, h, len(symbols[h]), len(symbols[i])))
    return [symbol for symbol in symbols if symbol]


class WordCache:
    """Tokens of words, remembered: texts repeat their words, and merging is what costs."""

    def __init__(self, encode_word: Callable[[str], list[int]]) -> None:
        self._encode_word = encode_word
        self._known: dict[str, list[int]] = {}

    def encode(self, words: list[str]) -> list[int]:
        """The tokens of all words, one after another."""
        known = self._known
        out: list[int] = []
        for word in words:
            ids = known.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) <= _CACHED_WORD:
                    if len(known) >= _CACHED_WORDS:
                        known.clear()
                    known[word] = ids
            out += ids
        return out
