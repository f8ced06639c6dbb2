"""Models without weights, so that engine, API and terminal can be tested with neither kernels nor files.

`FakeModel` keeps a real block-indexed KV store and computes logits from what it reads back through the block table: a wrong table, a wrong
start, a stale or overwritten block all give other text. `ScriptedModel` says exactly the text it is told to. `FakeTokenizer` is byte-level,
with a few longer pieces so that one token may carry several characters. `load_fake` and its relatives are what a runner can be started with
in place of the real loader: module functions, so that `functools.partial` of them can be sent to another process.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localrun.engine.parts import Parts
from localrun.messages import Load
from localrun.models.errors import ModelFileError
from localrun.models.lora import Adapter, Pair
from localrun.models.model import BLOCK_TOKENS, MAX_ADAPTERS, PEAK, ModelInfo, Progress, Span
from localrun.text.template import ChatTemplate
from localrun.text.tokenizer import Tokenizer

BYTES = 256
BOS, EOS, END, USER, ASSISTANT, SYSTEM, TOOL = range(BYTES, BYTES + 7)
SPECIALS = {BOS: "<s>", EOS: "</s>", END: "<|end|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", SYSTEM: "<|system|>", TOOL: "<|tool|>"}
WIDTH = 8
"""Of the vectors that FakeModel gives."""
PIECES = (b"the ", b"hello", b" world", b"ing", b"\n\n", b"STOP", b" and", "한".encode(), "é".encode(), b"    ")
_MASK = (1 << 64) - 1


class FakeVocab:
    """The part of a vocabulary that parsers of replies look at."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def special(self) -> list[int]:
        return sorted(SPECIALS)


class FakeTokenizer:
    """Bytes 0..255, then the special tokens, then PIECES; encodes with the longest piece first."""

    def __init__(self) -> None:
        self._pieces = [bytes([b]) for b in range(BYTES)] + [SPECIALS[i].encode() for i in sorted(SPECIALS)] + list(PIECES)
        self._special_of = {text: token for token, text in SPECIALS.items()}
        self._longest_first = sorted(((p, BYTES + len(SPECIALS) + i) for i, p in enumerate(PIECES)), key=lambda item: -len(item[0]))
        self.n_vocab = len(self._pieces)
        self.vocab = FakeVocab([piece.decode("latin-1") for piece in self._pieces])
        self.bos_id: int | None = BOS
        self.eos_id: int | None = EOS
        self.eog_ids = frozenset({EOS, END})
        self.add_bos = True
        self.add_eos = False

    def encode(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        data = text.encode("utf-8") if isinstance(text, str) else text
        ids = [BOS] if add_special else []
        at = 0
        while at < len(data):
            token, length = self._next(data, at, parse_special)
            ids.append(token)
            at += length
        return ids

    def around(self) -> tuple[list[int], list[int]]:
        return [BOS], []

    def between(self) -> list[int]:
        return [EOS]

    def _next(self, data: bytes, at: int, parse_special: bool) -> tuple[int, int]:
        if parse_special and data[at] == ord("<"):
            for text, token in self._special_of.items():
                if data.startswith(text.encode(), at):
                    return token, len(text)
        for piece, token in self._longest_first:
            if data.startswith(piece, at):
                return token, len(piece)
        return data[at], 1

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in SPECIALS and not special:
            return b""
        return self._pieces[token]

    def decode(
        self, ids: Iterable[int], *, remove_special: bool = False, unparse_special: bool = True, clean_spaces: bool | None = None
    ) -> bytes:
        return b"".join(self.piece(token, special=unparse_special and not (remove_special and token in (BOS, EOS))) for token in ids)


TEMPLATE = """{%- for m in messages -%}
{%- if m.role not in ['user', 'assistant', 'system', 'tool'] %}{{ raise_exception('there is no role ' ~ m.role) }}{% endif -%}
<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}"""
"""`<|role|>content` for each message, `<|end|>` after an assistant's, then `<|assistant|>`."""
THINKING_TEMPLATE = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
"""Of a model that thinks between <think> and </think> unless it is told not to."""
TOOLS_TEMPLATE = (
    """{%- if tools %}<|system|>{{ tools | tojson }}
{# a call: <tool_call>{"name": ..., "arguments": ...}</tool_call> #}{% endif -%}"""
    + TEMPLATE
)
"""Of a model that calls tools as Hermes and Qwen do."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit mixer of the splitmix family, elementwise; good enough to tell any two inputs apart."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BlockStore:
    """What stands for K and V: each position's entry is a hash of the entry before it, as it was then, and the token."""

    def __init__(self, n_blocks: int) -> None:
        self.entries = np.zeros((n_blocks, BLOCK_TOKENS), np.uint64)
        self.tokens = np.full((n_blocks, BLOCK_TOKENS), -1, np.int64)

    def write(self, span: Span, marks: int = 0) -> None:
        """marks: what else the entries depend on."""
        if len(span.block_table) != -(-(span.start + len(span.tokens)) // BLOCK_TOKENS):
            raise AssertionError(f"{len(span.block_table)} blocks for {span.start} + {len(span.tokens)} tokens")
        for i, token in enumerate(span.tokens):
            position = span.start + i
            before = int(self.entries[self._at(span, position - 1)]) if position else 0x9E3779B97F4A7C15
            entry = np.array([(before * 3 + int(token) * 0x100000001B3 + position + marks * 0x9E3779B1) & _MASK], np.uint64)
            self.entries[self._at(span, position)] = mix(entry)[0]
            self.tokens[self._at(span, position)] = token

    def read(self, span: Span, length: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Entries and tokens (length,) of positions 0..length-1."""
        blocks = span.block_table[: -(-length // BLOCK_TOKENS)]
        return self.entries[blocks].reshape(-1)[:length], self.tokens[blocks].reshape(-1)[:length]

    @staticmethod
    def _at(span: Span, position: int) -> tuple[int, int]:
        return int(span.block_table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS


class StateStore:
    """What stands for recurrent state: a hash over all tokens so far, in their order, and how many they were.

    A slot that is read where another sequence, or another place of the same one, was left is an error at once; one that was written by a
    sequence with other tokens gives other logits.
    """

    def __init__(self, n_slots: int) -> None:
        self.values = np.zeros(n_slots, np.uint64)
        self.lengths = np.full(n_slots, -1, np.int64)

    def advance(self, span: Span) -> list[int]:
        """Goes over the span; the hash after each of its tokens."""
        if span.start:
            assert self.lengths[span.state] == span.start, f"slot {span.state} is after {self.lengths[span.state]}, not {span.start} tokens"
        value = int(self.values[span.state]) if span.start else 0x2545F4914F6CDD1D
        wanted = dict(span.snapshots)
        assert all(0 < n <= len(span.tokens) for n in wanted)
        after = []
        for i, token in enumerate(span.tokens):
            value = int(mix(np.array([(value * 5 + int(token) * 0x1000193 + 1) & _MASK], np.uint64))[0])
            after.append(value)
            if i + 1 in wanted:
                self.write(wanted[i + 1], value, span.start + i + 1)
        self.write(span.state, value, span.start + len(span.tokens))
        return after

    def write(self, slot: int, value: int, length: int) -> None:
        self.values[slot], self.lengths[slot] = value, length


class FakePeaks:
    """Finds by sorting, in a copy that it brings up to date where it is told that the row has been changed."""

    def __init__(self, row: NDArray[np.float32]) -> None:
        self._row, self._known = row, row.copy()

    def changed(self, ids: NDArray[np.int64]) -> None:
        self._known[ids] = self._row[ids]

    def largest(self, k: int) -> NDArray[np.int64] | None:
        if not (np.isfinite(self._known) | (self._known == -np.inf)).all() or 2 * k * PEAK > len(self._known):
            return None
        ids = np.lexsort((np.arange(len(self._known)), -self._known))[:k]
        return ids[self._known[ids] > -np.inf]


class FakeModel:
    """Deterministic logits from a hash of the sequence read back through its block table. With `state_bytes`, a state in a slot has its
    say, too; `pure`: it alone.

    temperature spreads: with `spread` around 3 a sampled text varies, as a real model's does. `cost(rows, attended)` seconds are added to
    `clock` for each pass, if both are given; `delay` seconds are really slept.
    """

    def __init__(
        self,
        n_vocab: int = BYTES + len(SPECIALS) + len(PIECES),
        *,
        n_ctx_train: int = 4096,
        max_batch: int = 64,
        spread: float = 3.0,
        eog_bias: float = 0.0,
        delay: float = 0.0,
        cost: Callable[[int, int], float] | None = None,
        clock: Any = None,
        state_bytes: int = 0,
        pure: bool = False,
        pooling: str = "",
        causal: bool = True,
        decoder_start: int = -1,
    ) -> None:
        self.info = ModelInfo(
            "fake", n_vocab, n_ctx_train, max_batch, 0 if pure else 1024, 4096, False, "none", 1, WIDTH, pooling, causal,
            state_bytes=state_bytes, decoder_start=decoder_start,
        )
        self.passes = 0
        self.rows = 0
        self.closed = False
        self._spread, self._eog_bias, self._delay, self._cost, self._clock = spread, eog_bias, delay, cost, clock
        self._ids = np.arange(n_vocab, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.store: BlockStore | None = None
        self.states: StateStore | None = None
        self._state = np.uint64(0)
        self.adapters: dict[int, int] = {}
        """By number, what an adapter is."""
        self._numbers = itertools.count(1)

    def read_adapter(self, paths: Sequence[Path | str]) -> Adapter:
        """A file's bytes are the adapter. "unfit": refused."""
        read = [Path(path).read_bytes() for path in paths]
        for path, data in zip(paths, read, strict=True):
            if data == b"unfit":
                raise ModelFileError(path, "tensor x.lora_a", "the model has no tensor x")
        pair = Pair(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), np.array([sum(b"".join(read))], np.float32))
        return Adapter({"x": pair})

    def add_adapter(self, adapter: Adapter) -> int:
        if len(self.adapters) >= MAX_ADAPTERS:
            raise ValueError("too many adapters")
        number = next(self._numbers)
        self.adapters[number] = int(adapter.pairs["x"].scales[0])
        return number

    def remove_adapter(self, number: int) -> None:
        self.adapters.pop(number, None)

    def allocate_state(self, n_slots: int) -> None:
        assert self.states is None, "allocate_state called twice"
        assert self.info.state_bytes, "slots for a model without state"
        self.states = StateStore(n_slots)

    def copy_state(self, source: int, target: int) -> None:
        assert self.states is not None
        self.states.write(target, int(self.states.values[source]), int(self.states.lengths[source]))

    def allocate_kv(self, n_blocks: int) -> None:
        assert self.store is None, "allocate_kv called twice"
        self.store = BlockStore(n_blocks)

    def copy_block(self, source: int, target: int) -> None:
        assert self.store is not None
        self.store.entries[target] = self.store.entries[source]
        self.store.tokens[target] = self.store.tokens[source]

    def read_block(self, block: int) -> bytes:
        assert self.store is not None
        data: bytes = self.store.entries[block].tobytes() + self.store.tokens[block].tobytes()
        return data.ljust(self.info.kv_bytes_per_block, b"\0")

    def write_block(self, block: int, content: bytes) -> None:
        assert self.store is not None
        assert len(content) == self.info.kv_bytes_per_block
        size = 8 * BLOCK_TOKENS
        self.store.entries[block] = np.frombuffer(content[:size], np.uint64)
        self.store.tokens[block] = np.frombuffer(content[size : 2 * size], np.int64)

    def tune(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def forward(self, spans: list[Span]) -> NDArray[np.float32]:
        after = self._write(spans)
        assert self.store is not None
        out: list[NDArray[np.float32]] = []
        for s, values in zip(spans, after, strict=True):
            for i in s.outputs:
                self._state = np.uint64(values[i] if values else 0)
                out.append(self.logits(*self.store.read(s, s.start + int(i) + 1)))
        logits = np.array(out, np.float32).reshape(len(out), self.info.n_vocab)
        self._peaks = [FakePeaks(row) for row in logits]
        return logits

    def peaks(self) -> list[FakePeaks]:
        return self._peaks

    def embed(self, spans: list[Span]) -> NDArray[np.float32]:
        """A hash of the last position's entry, WIDTH numbers in -1..1; one for a model that ranks."""
        assert not (self.info.whole and any(span.start for span in spans)), "a sequence that must come whole came in parts"
        after = self._write(spans)
        assert self.store is not None
        last = [self.store.read(s, s.start + len(s.tokens))[0][-1] for s in spans]
        if self.info.state_bytes:
            last = [entry ^ np.uint64(values[-1]) for entry, values in zip(last, after, strict=True)]
        numbers = np.arange(1 if self.info.pooling == "rank" else WIDTH, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = mix(np.array(last, np.uint64)[:, None] ^ mix(numbers)[None, :])
        return ((bits >> np.uint64(11)).astype(np.float64) / float(1 << 52) - 1.0).astype(np.float32)

    def _write(self, spans: list[Span]) -> list[list[int]]:
        assert self.store is not None, "a pass before allocate_kv"
        rows = sum(len(s.tokens) for s in spans)
        if rows > self.info.max_batch:
            raise ValueError(f"{rows} rows in a pass of at most {self.info.max_batch}")
        self._no_block_written_twice(spans)
        for span in spans:
            assert (span.encoded > 0) is (self.info.decoder_start >= 0)
            if span.start < span.encoded:
                assert (span.start, len(span.tokens), len(span.outputs)) == (0, span.encoded, 0), "an encoder's input came in parts"
        for span in spans:
            self.store.write(span, round(1000 * self.adapters[span.adapter] * span.adapter_scale) if span.adapter else 0)
        after = self._advance(spans)
        self.passes += 1
        self.rows += rows
        if self._delay:
            time.sleep(self._delay)
        if self._cost is not None and self._clock is not None:
            self._clock.advance(self._cost(rows, sum(s.start + len(s.tokens) for s in spans)))
        return after

    def _advance(self, spans: list[Span]) -> list[list[int]]:
        if not self.info.state_bytes:
            assert all(s.state == -1 and not s.snapshots for s in spans), "a slot for a model without state"
            return [[]] * len(spans)
        assert self.states is not None, "forward before allocate_state"
        used = [slot for s in spans for slot in (s.state, *(slot for _, slot in s.snapshots))]
        assert len(set(used)) == len(used) and min(used) >= 0, f"slots {used}"
        return [self.states.advance(s) for s in spans]

    @staticmethod
    def _no_block_written_twice(spans: list[Span]) -> None:
        written: set[int] = set()
        for span in spans:
            own = {int(b) for b in span.block_table[span.start // BLOCK_TOKENS :]}
            assert not own & written, "two sequences write the same block in one pass"
            written |= own

    def logits(self, entries: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 (n_vocab,) of the position after the last of `entries` (n,), `tokens` (n,)."""
        weights = np.arange(1, len(entries) + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        with np.errstate(over="ignore"):
            state = np.bitwise_xor.reduce(mix(entries + weights))
            bits = mix(self._ids ^ self._state ^ (state if self.info.kv_bytes_per_block else np.uint64(0)))
        uniform = (bits >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        logits = self._spread * np.log(uniform / (1 - uniform) + 1e-12)
        logits[128:BYTES] -= 2 * self._spread  # mostly readable text, but not only
        logits[:32] -= 2 * self._spread
        logits[[EOS, END]] += self._eog_bias
        logits[[BOS, USER, ASSISTANT, SYSTEM, TOOL]] = -1e4
        return logits.astype(np.float32)


class ScriptedModel(FakeModel):
    """Says `reply` token by token, then ends the turn. `reply` is a text, or a function from the prompt's text to one.

    Where in the reply it is, it reads from the KV store: after the last `<|assistant|>`, or, in a prompt without one, from the longest
    end of the sequence that is a beginning of the reply. `behind`: what the template writes behind that mark.
    """

    def __init__(self, reply: str | Callable[[str], str], *, behind: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._reply = reply
        self._tokenizer = FakeTokenizer()
        self._behind = len(self._tokenizer.encode(behind, add_special=False))

    def logits(self, entries: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = [int(t) for t in tokens]
        if ASSISTANT in ids:
            cut = len(ids) - ids[::-1].index(ASSISTANT) + self._behind
            script = self._script(ids[:cut])
            said = len(ids) - cut
        else:
            script = self._script(ids)
            said = next(k for k in range(min(len(script), len(ids)), -1, -1) if ids[len(ids) - k :] == script[:k])
        logits = super().logits(entries, tokens) * 0.01
        logits[script[said] if said < len(script) else END] += 40.0
        return logits

    def _script(self, prompt: list[int]) -> list[int]:
        text = self._reply if isinstance(self._reply, str) else self._reply(self._tokenizer.decode(prompt).decode("utf-8", "replace"))
        return self._tokenizer.encode(text, add_special=False)


def echo(prompt: str) -> str:
    """Reply of a scripted model: the last user message, in quotes."""
    return f'You said "{prompt.rpartition("<|user|>")[2].removesuffix("<|assistant|>")}".'


def parts_of(model: FakeModel, template: str = TEMPLATE) -> Parts:
    """A fake model with the fake tokenizer and a template, as the runner takes it."""
    tokenizer = cast(Tokenizer, FakeTokenizer())
    return Parts(model=model, tokenizer=tokenizer, template=ChatTemplate(template, bos_token="<s>", eos_token="</s>"))


def load_fake(load: Load, progress: Progress, **options: Any) -> Parts:
    """Stands in for the real loader: a FakeModel that reports two stages of progress."""
    progress("inventing weights", 1, 2)
    progress("inventing weights", 2, 2)
    return parts_of(FakeModel(max_batch=load.num_batch, **options))


def load_scripted(
    load: Load, progress: Progress, *, reply: str | Callable[[str], str] = echo, template: str = TEMPLATE, **options: Any
) -> Parts:
    """A ScriptedModel; `functools.partial(load_scripted, reply="...")` says what."""
    progress("learning the script", 1, 1)
    return parts_of(ScriptedModel(reply, max_batch=load.num_batch, **options), template)


def load_failing(load: Load, progress: Progress, *, error: Exception | None = None, message: str = "no such luck") -> Parts:
    """A loader that raises: `error`, or a RuntimeError."""
    raise error or RuntimeError(message)


def load_crashing(load: Load, progress: Progress, *, after_passes: int = 1) -> Parts:
    """A model whose process dies in its nth forward pass, as a kernel crash or an out-of-memory kill would have it."""
    return parts_of(CrashingModel(after_passes))


class CrashingModel(FakeModel):
    def __init__(self, after_passes: int) -> None:
        super().__init__()
        self._after = after_passes

    def forward(self, spans: list[Span]) -> NDArray[np.float32]:
        if self.passes + 1 >= self._after:
            os._exit(139)
        return super().forward(spans)


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
