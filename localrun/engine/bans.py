"""Strings that must not come. A token is passed on only when its text can no longer begin one; where one has come, the token that begins
it, or the first that has not been passed on, is taken back. Knows tokens and their bytes; the one who chooses tokens does the taking back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from localrun.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Chosen:
    """A token and, if they are wanted, its log-probabilities."""

    token: int
    logprobs: TokenLogprobs | None = None


class BannedStrings:
    """`piece(token)`: its bytes. With no strings every token is passed on at once."""

    def __init__(self, strings: Iterable[str], piece: Callable[[int], bytes]) -> None:
        self._strings = [string.encode("utf-8") for string in strings if string]
        self._piece = piece
        self._held: list[Chosen] = []
        self._text = b""
        """Of the held tokens."""
        self._before = b""
        """The end of the text passed on, as far as a string could begin in it: what follows may change after tokens were taken back."""
        self._reach = max((len(string) for string in self._strings), default=1) - 1

    @property
    def n_held(self) -> int:
        return len(self._held)

    def push(self, chosen: Chosen) -> tuple[list[Chosen], int]:
        """What can be passed on, and how many of the latest tokens, this one included, must be taken back (0 mostly)."""
        if not self._strings:
            return [chosen], 0
        self._held.append(chosen)
        self._text += self._piece(chosen.token)
        text = self._before + self._text
        starts = [at for at in (text.find(string) for string in self._strings) if at >= 0]
        if starts:
            first = self._token_at(max(0, min(starts) - len(self._before)))
            n = len(self._held) - first
            del self._held[first:]
            self._text = b"".join(self._piece(c.token) for c in self._held)
            return [], n
        open_end = max(_overlap(text, string) for string in self._strings)
        return self._release(len(self._text) - open_end), 0

    def flush(self) -> list[Chosen]:
        """What is still held: no more tokens will come."""
        held, self._held, self._text = self._held, [], b""
        return held

    def _release(self, upto: int) -> list[Chosen]:
        """The held tokens that end before byte `upto`."""
        end = n = 0
        for chosen in self._held:
            length = len(self._piece(chosen.token))
            if end + length > upto:
                break
            end += length
            n += 1
        passed = self._before + self._text[:end]
        self._before = passed[max(0, len(passed) - self._reach) :]
        released, self._held, self._text = self._held[:n], self._held[n:], self._text[end:]
        return released

    def _token_at(self, offset: int) -> int:
        """Index of the held token whose text holds that byte."""
        end = 0
        for i, chosen in enumerate(self._held):
            end += len(self._piece(chosen.token))
            if end > offset:
                return i
        raise AssertionError("the text is that of the held tokens")


def _overlap(text: bytes, string: bytes) -> int:
    """Length of the longest end of `text` that begins `string`."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
