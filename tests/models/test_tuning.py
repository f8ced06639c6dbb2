"""Which tile shapes are chosen follows from the times, and from nothing that disturbs them; no choice changes a bit of any result."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localrun.kernels_cpu import shapes
from localrun.kernels_cpu.shapes import DEFAULT, MATRIX_FROM, NEVER, QUARTERS, SHARES, WIDE_FROM, Shape
from localrun.models import tuning
from localrun.models.load import RecordedModel, load_model
from localrun.models.model import LoadOptions, Span
from localrun.models.tuning import BUDGET_S, Matrices, Tuning, choose

Cost = Callable[[Shape, int], float]
"""Seconds of so many rows in a shape."""


def cost(
    *, wide: float = 1.0, matrix: float = 3.0, memory: float = 0.5, share: float = 0.0, cores: int = 8, busy_with: int = 8
) -> Cost:
    """A processor: a tile of four takes 1, one of two 0.9, one of one 0.5, one of eight 2 * wide, sixteen rows by matrix instructions
    `matrix`; reading takes `memory`; more cores than `busy_with` get in each other's way; each part more of a share adds `share`."""

    def seconds(shape: Shape, rows: int) -> float:
        fixed = memory + share * (shape.share - 1)
        if rows == 1:
            members = shape.members(cores)
            return (fixed + 0.3) / min(members, busy_with) + 0.05 * max(0, members - busy_with)
        if rows >= shape.matrix_from:
            return fixed + matrix * -(-rows // 16)
        total, left = fixed, rows
        while left > 4:
            total += 2 * wide if left >= shape.wide_from else 1
            left -= 8 if left >= shape.wide_from else 4
        return total + (0, 0.5, 0.9, 1, 1)[max(0, left)]

    return seconds


def chosen(seconds: Cost, *, matrix: bool = True, n_threads: int = 2, most_rows: int = 512) -> Shape | None:
    asking = choose(matrix=matrix, n_threads=n_threads, most_rows=most_rows)
    try:
        question = next(asking)
        while True:
            question = asking.send(seconds(*question))
    except StopIteration as stop:
        found: Shape | None = stop.value
        return found


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (cost(wide=0.9), DEFAULT.wide_from),
        (cost(wide=0.6), 5),
        (cost(wide=1.1), NEVER),
        (cost(wide=1.03), 7),
    ],
)
def test_tiles_of_eight_are_used_where_they_pay(processor: Cost, expected: int) -> None:
    shape = chosen(processor)
    assert shape is not None
    assert shape.wide_from == expected


@pytest.mark.parametrize(
    ("matrix", "expected"), [(0.5, 9), (1.6, 9), (3.0, 13), (3.4, 25), (4.0, 29), (30.0, 49)]
)
def test_matrix_tiles_are_used_from_where_they_pay(matrix: float, expected: int) -> None:
    shape = chosen(cost(matrix=matrix))
    assert shape is not None
    assert shape.matrix_from == expected
    without = chosen(cost(matrix=matrix), matrix=False)
    assert without is not None
    assert without.matrix_from == DEFAULT.matrix_from, "nobody asks"


@pytest.mark.parametrize(
    ("n_threads", "busy_with", "members"), [(8, 8, 8), (8, 3, 4), (8, 1, 2), (3, 1, 1), (4, 3, 3), (2, 1, 2)]
)
def test_one_row_takes_as_many_threads_as_are_quickest(n_threads: int, busy_with: int, members: int) -> None:
    shape = chosen(cost(cores=n_threads, busy_with=busy_with), n_threads=n_threads)
    assert shape is not None
    assert shape.members(n_threads) == members


@pytest.mark.parametrize(("gain", "expected"), [(0.0, 1), (0.01, 1), (-0.3, 4)])
def test_smaller_shares_only_where_they_pay(gain: float, expected: int) -> None:
    shape = chosen(cost(share=gain, memory=2.0))
    assert shape is not None
    assert shape.share == expected
    assert chosen(cost(share=gain, memory=2.0), n_threads=1) == replace(shape, share=1)


def test_short_passes_are_timed_as_far_as_they_go() -> None:
    asked: list[int] = []

    def seconds(shape: Shape, rows: int) -> float:
        asked.append(rows)
        return cost(matrix=4.5)(shape, rows)

    shape = chosen(seconds, most_rows=16)
    assert shape is not None
    assert max(asked) == 16
    assert chosen(seconds, most_rows=4) is not None


@pytest.mark.parametrize("seed", range(20))
def test_noise_chooses_nothing(seed: int) -> None:
    """Equal candidates whose times vary, a little or by a process that takes a core now and then: the usual shape stays."""
    chance = random.Random(seed)
    calm = chosen(lambda shape, rows: chance.gauss(1.0, 0.03))
    assert calm == DEFAULT
    disturbed = chosen(lambda shape, rows: chance.gauss(1.0, 0.01) * (3.0 if chance.random() < 0.1 else 1.0))
    assert disturbed in (DEFAULT, None)


def test_a_machine_that_is_too_busy_says_nothing() -> None:
    chance = random.Random(1)
    assert chosen(lambda shape, rows: chance.uniform(1.0, 3.0)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_clear_gain_is_found_in_noise(seed: int) -> None:
    chance, true = random.Random(seed), cost(matrix=1.0)
    shape = chosen(lambda shape, rows: true(shape, rows) * chance.gauss(1.0, 0.05) * (2.0 if chance.random() < 0.05 else 1.0))
    assert shape is not None
    assert shape.matrix_from == 9


# ---- time -----------------------------------------------------------------------------------------------------------------------


class Fake(Matrices):
    """Takes the time that a cost says of a clock that stands still otherwise."""

    def __init__(self, clock: list[float], seconds: Cost, nbytes: int = 1) -> None:
        self.matrix, self.nbytes = True, nbytes
        self._clock, self._seconds = clock, seconds

    def run(self, shape: Shape, rows: int) -> None:
        self._clock[0] += self._seconds(shape, rows)


def tuning_with(clock: list[float], **matrices: Matrices) -> Tuning:
    return Tuning(matrices, 2, 512, clock=lambda: clock[0])


def test_it_stops_after_each_slice_and_goes_on_from_there() -> None:
    clock = [0.0]
    scale = 1e-4
    one = tuning_with(clock, Q4_K=Fake(clock, lambda shape, rows: cost(matrix=0.5)(shape, rows) * scale))
    slices = 0
    while True:
        before = clock[0]
        more = one.step(0.002)
        assert clock[0] - before < 0.004
        if not more:
            break
        slices += 1
        assert not one.found
    assert slices > 3
    assert one.found == {"Q4_K": Shape(matrix_from=9)}
    assert not one.step(1.0), "there is nothing more"


def test_the_budget_is_kept_and_what_was_not_reached_stays_unknown() -> None:
    clock = [0.0]

    def slow(shape: Shape, rows: int) -> float:
        return cost(matrix=0.5)(shape, rows) * 1.2e-3

    one = tuning_with(clock, small=Fake(clock, slow, 1), large=Fake(clock, slow, 3), middle=Fake(clock, slow, 2))
    while one.step(0.05):
        pass
    assert BUDGET_S <= clock[0] < BUDGET_S + 0.05
    assert list(one.found) == ["large"], "what is read most comes first"
    assert not one.step(1.0)
    assert clock[0] < BUDGET_S + 0.05


# ---- models ---------------------------------------------------------------------------------------------------------------------


def opened(path: Path, **options: object) -> RecordedModel:
    asked = {"n_threads": 2, "max_batch": 64, "kv_type": "f32", "cache_dir": os.environ["LOCALRUN_CACHE"], **options}
    model = load_model(path, LoadOptions(**asked))  # type: ignore[arg-type]
    model.allocate_kv(16)
    return model


@pytest.fixture(scope="module")
def tiny(shared: Path) -> Path:
    return shared / "arch" / "llama" / "q4_0.gguf"


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[RecordedModel]:
    loaded = opened(tiny, n_threads=3)
    yield loaded
    loaded.close()


def logits(model: RecordedModel, chunks: tuple[int, ...]) -> NDArray[np.uint32]:
    """Bits of the logits after each of so many tokens, fed in such pieces."""
    ids = np.arange(40, dtype=np.int32) * 7 % model.info.n_vocab
    rows, start = [], 0
    for n in chunks:
        span = Span(ids[start : start + n], start, np.array([3, 9, 0], np.int32), np.arange(n, dtype=np.int32))
        rows.append(model.forward([span]).copy())
        start += n
    return np.concatenate(rows).view(np.uint32)


CHUNKS = ((40,), (13, 12, 6, 5, 1, 1, 1, 1), (24, 9, 7))


def test_no_shape_changes_a_bit_of_a_model(model: RecordedModel) -> None:
    truth = logits(model, CHUNKS[0])
    for wide, matrix, share, quarters in itertools.product(WIDE_FROM, MATRIX_FROM, SHARES, QUARTERS):
        shape = Shape(wide, matrix, share, quarters)
        model._free = True
        model._use(dict.fromkeys(model.shapes, shape))
        chunks = CHUNKS[hash((wide, matrix, share, quarters)) % len(CHUNKS)]
        assert np.array_equal(logits(model, chunks), truth), (shape, chunks)
    assert model._few == 1, "a quarter of three"


def test_thread_counts_change_no_bit(tiny: Path, model: RecordedModel) -> None:
    truth = logits(model, CHUNKS[0])
    for few, many in ((1, 4), (4, 1), (2, 0)):
        other = opened(tiny, n_threads=few, n_threads_batch=many)
        try:
            assert (other.info.n_threads, other.info.n_threads_batch) == (few, many or few)
            assert other._team.n_threads == max(few, many)
            for chunks in CHUNKS:
                assert np.array_equal(logits(other, chunks), truth)
        finally:
            other.close()


def test_sampling_leaves_the_program_as_it_was(model: RecordedModel) -> None:
    truth = logits(model, CHUNKS[1])
    before = model._program.args.copy(), model._program.table[:, :8].copy()
    matrices = Matrices(model._program, model._team, model._header, "Q4_0")
    assert matrices.nbytes > 0
    for rows in (1, 5, 16, 48):
        for shape in (DEFAULT, Shape(NEVER, 9, 4, 1)):
            matrices.run(shape, rows)
    assert np.array_equal(model._program.args, before[0])
    assert np.array_equal(model._program.table[:, :8], before[1])
    assert np.array_equal(logits(model, CHUNKS[1]), truth)


def test_what_is_timed_is_used_and_remembered(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load knows nothing, `tune` finds something, the next load has it; without tuning the usual shapes are used."""
    wanted = Shape(matrix_from=49, share=2)
    asked = []

    def at_once(**about: object) -> Generator[tuple[Shape, int], float, Shape]:
        asked.append(about)
        yield DEFAULT, 1
        return wanted

    monkeypatch.setattr(shapes, "cache_folder", lambda root, isa: tmp_path)
    monkeypatch.setattr(tuning, "choose", at_once)
    monkeypatch.setattr(tuning, "FEWEST_BYTES", 1)
    with closing(opened(tiny)) as first:
        assert set(first.shapes.values()) == {DEFAULT}
        while first.tune(0.01):
            pass
        found = first.shapes
        assert wanted in found.values()
        assert asked == [{"matrix": first.info.isa == "amx", "n_threads": 2, "most_rows": 64}]
        assert not first.tune(0.01)
    assert not first.tune(0.01), "a closed model times nothing"
    content = (tmp_path / "shapes.json").read_bytes()
    with closing(opened(tiny)) as second:
        assert second.shapes == found
        while second.tune(0.01):
            pass
        assert len(asked) == 1, "it is known"
        while second.tune(0.01, again=True):
            pass
    with closing(opened(tiny, n_threads=1)) as other:
        assert set(other.shapes.values()) == {DEFAULT}, "of another number of threads"
    with closing(opened(tiny, tune=False)) as usual:
        assert set(usual.shapes.values()) == {DEFAULT}
        assert not usual.tune(0.01)
    assert (tmp_path / "shapes.json").read_bytes() == content
