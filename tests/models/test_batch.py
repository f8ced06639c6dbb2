"""What the spans of a pass say, laid out for the kernels; and passes that are cut as the one before was."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrun.kernels_cpu import head, isa
from localrun.kernels_cpu.attention_sizes import TILE_ROWS
from localrun.kernels_cpu.library import KernelLibrary
from localrun.models.batch import KERNEL, BatchRows
from localrun.models.load import RecordedModel
from localrun.models.model import BLOCK_TOKENS, RowPeaks, Span
from tests.conformance.test_arch import load

MOST, SPARE, N_VOCAB, N_BLOCKS, MOST_POSITIONS = 128, 8, 1000, 50, 400
Ints = NDArray[np.int32]


def rows(library: KernelLibrary, header: NDArray[np.int64]) -> BatchRows:
    return BatchRows(library.address(KERNEL), header, MOST, SPARE, N_VOCAB, MOST_POSITIONS)


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary(isa.select(), Path(os.environ["LOCALRUN_CACHE"]))


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """What an engine may ask for: short and long spans, some with blocks to spare, some of a decoder that counts from its own beginning."""
    found = []
    for n in draw(st.lists(st.sampled_from((1, 1, 1, 2, TILE_ROWS, TILE_ROWS + 1, 31)), min_size=1, max_size=4)):
        start = draw(st.integers(0, MOST_POSITIONS - n))
        held = -(-(start + n) // BLOCK_TOKENS) + draw(st.integers(0, 1))
        numbers = np.random.default_rng(draw(st.integers(0, 99)))
        outputs = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3))
        found.append(
            Span(
                numbers.integers(0, N_VOCAB, n, dtype=np.int32), start, numbers.integers(0, N_BLOCKS, held, dtype=np.int32),
                np.array(outputs, np.int32), encoded=draw(st.sampled_from((0, start // 2))),
            )
        )  # fmt: skip
    return found


def at(address: int, n: int) -> list[int]:
    """n int32."""
    return list((ctypes.c_int32 * n).from_address(address))


@settings(max_examples=200)
@given(passes=st.lists(spans(), min_size=1, max_size=3))
def test_rows_are_as_the_spans_say(library: KernelLibrary, passes: list[list[Span]]) -> None:
    header = np.zeros(head.SIZE // 8, np.int64)
    batch = rows(library, header)
    for one in passes:
        firsts = batch.fill(one, [span.outputs for span in one], N_BLOCKS)
        word = {offset: int(header[offset // 8]) for offset in range(0, head.SIZE, 8)}
        own = [len(span.tokens) for span in one]
        before = [sum(own[:i]) for i in range(len(one))]
        counted = [range(p := span.start - (span.encoded if span.start else 0), p + n) for span, n in zip(one, own, strict=True)]
        tiles = [(f + i, min(n - i, TILE_ROWS)) for f, n in zip(before, own, strict=True) for i in range(0, n, TILE_ROWS)]
        outputs = [f + int(i) for f, span in zip(before, one, strict=True) for i in span.outputs]
        assert firsts == before
        assert (batch.tokens, batch.outputs, batch.tiles) == (sum(own), len(outputs), len(tiles))
        assert batch.longest == max(span.start + n for span, n in zip(one, own, strict=True))
        assert (word[head.TOKENS], word[head.OUTPUTS], word[head.N_TILES]) == (sum(own), len(outputs), len(tiles))
        assert at(word[head.TOKEN_IDS], sum(own)) == [int(token) for span in one for token in span.tokens]
        assert at(word[head.POSITIONS], sum(own)) == [position for some in counted for position in some]
        assert at(word[head.OUTPUT_ROWS], len(outputs)) == outputs
        assert at(word[head.TILES], 2 * len(tiles)) == [number for tile in tiles for number in tile]
        tables = (ctypes.c_int64 * sum(own)).from_address(word[head.TABLES])
        for first, n, span in zip(before, own, one, strict=True):
            for row in range(first, first + n):
                assert at(tables[row], len(span.block_table)) == span.block_table.tolist()


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


GOOD = Span(ints(5, 6), 3, ints(7), ints(1))
WRONG = {
    "a span of 0 tokens": GOOD._replace(tokens=ints(), outputs=ints()),
    "from -1 on": GOOD._replace(start=-1),
    "with 1 blocks": GOOD._replace(start=15),
    "a context of 401 tokens": GOOD._replace(start=399, block_table=np.zeros(26, np.int32)),
    "token -1 of": GOOD._replace(tokens=ints(5, -1)),
    f"token {N_VOCAB} of": GOOD._replace(tokens=ints(N_VOCAB, 5)),
    "block -1 of": GOOD._replace(block_table=ints(-1)),
    f"block {N_BLOCKS} of": GOOD._replace(block_table=ints(0, N_BLOCKS)),
    "output row -1 of": GOOD._replace(outputs=ints(-1)),
    "output row 2 of": GOOD._replace(outputs=ints(0, 2)),
    "3 outputs of": GOOD._replace(outputs=ints(0, 1, 0)),
    "a batch of 129 rows": GOOD._replace(tokens=np.zeros(127, np.int32), start=0, block_table=np.zeros(8, np.int32)),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_named_and_the_next_pass_is_right(library: KernelLibrary, words: str) -> None:
    header = np.zeros(head.SIZE // 8, np.int64)
    batch = rows(library, header)
    one = [GOOD, WRONG[words]]
    with pytest.raises(ValueError, match=words):
        batch.fill(one, [span.outputs for span in one], N_BLOCKS)
    assert batch.fill([GOOD, GOOD], [GOOD.outputs] * 2, N_BLOCKS) == [0, 2]
    assert at(int(header[head.OUTPUT_ROWS // 8]), 2) == [1, 3]


@pytest.fixture(scope="module")
def model() -> Iterator[RecordedModel]:
    loaded = load("llama", "f32")
    assert isinstance(loaded, RecordedModel)
    yield loaded
    loaded.close()


def found(peaks: RowPeaks, k: int) -> list[int] | None:
    ids = peaks.largest(k)
    return None if ids is None else ids.tolist()


@pytest.mark.parametrize("counts", [(3, 1, 20), (20, 0, 7)])
def test_the_largest_logits_are_those_of_the_latest_pass(model: RecordedModel, counts: tuple[int, ...]) -> None:
    for n in counts:
        tokens = np.random.default_rng(n).integers(0, model.info.n_vocab, 20, dtype=np.int32)
        logits = model.forward([Span(tokens, 0, np.array([0, 1], np.int32), np.arange(n, dtype=np.int32))])
        for row, peaks in zip(logits, model.peaks(), strict=True):
            assert found(peaks, 1) == [row.argmax()]
            row[row.argmax()] = -np.inf
            changed = np.arange(0, len(row), 37)
            row[changed] += 1
            peaks.changed(np.flatnonzero(row == -np.inf))
            peaks.changed(changed)
            assert found(peaks, 1) == [row.argmax()]
            assert found(peaks, len(row)) is None


@settings(max_examples=30, deadline=None)
@given(passes=st.lists(st.tuples(st.sampled_from((1, 2, 17)), st.integers(1, 2), st.booleans(), st.booleans()), min_size=2, max_size=6))
def test_a_pass_is_cut_as_if_it_were_the_first(model: RecordedModel, passes: list[tuple[int, int, bool, bool]]) -> None:
    for n, count, asks, pools in passes:
        outputs = np.arange(int(asks), dtype=np.int32)
        some = [Span(np.zeros(n, np.int32), 0, np.array([2 * i, 2 * i + 1], np.int32), outputs) for i in range(count)]
        run = model.embed if pools else model.forward
        run(some)
        chunks, grains = model._chunks, model._grains
        model._size = ()
        run(some)
        assert np.array_equal(model._chunks, chunks)
        assert np.array_equal(model._grains, grains)
