"""What the scheduler decides, against simulated costs and a clock that is told."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine import scheduler as scheduler_module
from localrun.engine.cost import CostModel
from localrun.engine.scheduler import LEVEL_S, MIN_CHUNK, Plan
from localrun.errors import Busy
from tests.engine.simulation import Simulation


def tiles(plan: Plan) -> float:
    """A 1.5B model on two cores with matrix instructions, as measured: nearly free up to 8 rows, dear from 9, groups of 16 from 16 on."""
    rows = plan.rows
    arithmetic = 0.003 * rows if rows <= 8 else 0.01 * rows if rows < 16 else 0.0025 * 16 * -(-rows // 16)
    return 0.048 + arithmetic + plan.attended * 5e-8


def fifty_ms(plan: Plan) -> float:
    return 0.05


def laptop(plan: Plan) -> float:
    """A 1.5B model on two cores: 30 ms to read the weights, 5 ms a row of arithmetic, and attention."""
    return max(0.03, 0.005 * plan.rows) + plan.attended * 5e-8


# ---- worked examples -----------------------------------------------------------------------------------------------------------


def five_requests(static: bool) -> Simulation:
    """Four places, requests A..D of 100, 20, 50 and 200 steps at 50 ms, and E of 30 behind them."""
    simulation = Simulation(fifty_ms, max_running=4, static=static)
    for n in (100, 20, 50, 200, 30):
        simulation.add(n)
    simulation.run()
    return simulation


def test_static_batching_of_five() -> None:
    simulation = five_requests(static=True)
    assert simulation.clock() == pytest.approx(11.5)
    assert simulation.mean_response_s == pytest.approx(6.0)


def test_continuous_batching_of_five() -> None:
    simulation = five_requests(static=False)
    assert simulation.clock() == pytest.approx(10.0)
    assert simulation.mean_response_s == pytest.approx(4.2)


def a_hundred_requests(static: bool) -> Simulation:
    """50 of 20 tokens and 50 of 200, two and two per batch of four."""
    simulation = Simulation(fifty_ms, n_blocks=64, max_running=4, static=static)
    for _ in range(25):
        for n in (20, 20, 200, 200):
            simulation.add(n)
    simulation.run()
    return simulation


def test_static_batching_of_a_hundred() -> None:
    assert a_hundred_requests(static=True).tokens_per_s == pytest.approx(44.0)


def test_continuous_batching_of_a_hundred() -> None:
    """80 tokens/s for as long as somebody waits: no place is ever empty. Only the last few requests cannot fill all four."""
    simulation = a_hundred_requests(static=False)
    full = [plan for plan in simulation.plans if len(plan.slices) == 4]
    queue_empty = next(i for i, plan in enumerate(simulation.plans) if len(plan.slices) < 4)
    made = sum(len(plan.slices) for plan in simulation.plans[:queue_empty])
    assert made / (queue_empty * 0.05) == pytest.approx(80.0)
    assert len(full) >= len(simulation.plans) - 200
    assert 76 < simulation.tokens_per_s <= 80


# ---- nobody stalls --------------------------------------------------------------------------------------------------------------


def streams_and_a_long_prompt(target_s: float) -> Simulation:
    simulation = Simulation(laptop, target_s=target_s)
    for _ in range(3):
        simulation.add(400, 20)
    for _ in range(20):
        simulation.step()
    simulation.add(5, 2000)
    simulation.run()
    return simulation


@pytest.mark.parametrize("target_s", [0.1, 0.2, 0.4])
def test_a_long_prompt_does_not_stop_the_streams(target_s: float) -> None:
    simulation = streams_and_a_long_prompt(target_s)
    streams = simulation.requests[:3]
    gaps = sorted(gap for r in streams for gap in r.gaps)
    assert gaps[-1] <= target_s * 1.5, "trying a larger pass goes no further than that"
    assert sum(gap > target_s * 1.1 for gap in gaps) <= 3 * 4, "and is over soon"
    assert simulation.requests[3].done


def test_a_long_prompt_uses_the_time_there_is() -> None:
    """Chunks are cut by time, not made as small as can be."""
    simulation = streams_and_a_long_prompt(0.2)
    chunks = [s.count for plan in simulation.plans for s in plan.slices if s.count > 1 and s.seq is simulation.requests[3].seq]
    assert sum(chunks) == 2000
    assert min(chunks[4:-1]) > 24


@pytest.mark.parametrize("apart_s", [0.0, 0.01, 0.3])
def test_eight_at_once(apart_s: float) -> None:
    """Chunks below the size from which the matrix instructions are used are soon left behind: eight prompts of 128 tokens and answers of 64
    take little longer than their arithmetic in the best order, and the last first token comes soon after all prompts could be read."""
    simulation = Simulation(tiles)
    for i in range(8):
        simulation.add(64, 128)
        simulation.step()
        while simulation.clock() < (i + 1) * apart_s:
            simulation.step()
    simulation.run()
    reading, writing = 8 * (0.048 + 0.0025 * 128), 64 * (0.048 + 8 * 0.003)
    assert simulation.clock() < 1.15 * (reading + writing) + 8 * apart_s / 2
    assert max(r.token_times[0] for r in simulation.requests) < 1.45 * reading + 8 * apart_s
    assert max(max(r.gaps) for r in simulation.requests) < 0.3


def test_small_chunks_beside_streams_are_left_behind() -> None:
    """The model has seen nothing but small passes, dear by the row, when a long prompt comes."""
    simulation = Simulation(tiles)
    for _ in range(6):
        simulation.add(300, 4)
    for _ in range(30):
        simulation.step()
    simulation.add(5, 2000)
    simulation.run()
    long = simulation.requests[6]
    chunks = [s.count for plan in simulation.plans for s in plan.slices if s.seq is long.seq and s.count > 1]
    assert max(chunks[:4]) >= 48, "after a few tries"
    assert min(chunks[4:-1]) >= 32
    assert max(max(r.gaps) for r in simulation.requests) < 0.4


def test_chunks_beside_streams_fill_whole_tiles() -> None:
    """One row more than a full tile costs as much as sixteen more: no pass is cut there, nor much above the target."""
    simulation = Simulation(tiles)
    for _ in range(3):
        simulation.add(400, 20)
    for _ in range(20):
        simulation.step()
    long = simulation.add(5, 2000)
    while not long.token_times:
        simulation.step()
    passes = [plan.rows for plan in simulation.plans if any(s.seq is long.seq for s in plan.slices)]
    assert all(rows % 16 == 0 for rows in passes[4:-1])
    assert max(max(r.gaps) for r in simulation.requests[:3]) < 0.22
    in_tiles_of_their_own = 2000 / (3 * 16 - 3) * (0.048 + 3 * 0.04)
    assert long.response_s < 1.05 * in_tiles_of_their_own


def test_a_prompt_alone_takes_larger_chunks() -> None:
    simulation = Simulation(laptop)
    simulation.add(2, 2000)
    simulation.run()
    chunks = [plan.rows for plan in simulation.plans]
    assert max(chunks) > 100
    seconds = [laptop(plan) for plan in simulation.plans]
    assert max(seconds) < 1.6
    assert max(seconds[3:]) < 1.1
    ends = [s.start + s.count for plan in simulation.plans for s in plan.slices if s.count > 128]
    assert all(end % 16 == 0 for end in ends[:-1]), "large chunks end where blocks end"


def test_streams_alone_slower_than_the_target_still_let_prompts_in() -> None:
    simulation = Simulation(lambda plan: 0.5 + 0.001 * plan.rows)
    simulation.add(100, 4)
    simulation.step()
    simulation.step()
    late = simulation.add(2, 160)
    simulation.run()
    chunks = [s.count for plan in simulation.plans for s in plan.slices if s.seq is late.seq and s.count > 1]
    assert chunks[0] >= MIN_CHUNK
    assert late.response_s < 3, "prompts get as much time as the streams"
    assert max(simulation.requests[0].gaps) < 1.1


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    simulation = Simulation(laptop)
    book = simulation.add(2, 8000)
    for _ in range(3):
        simulation.step()
    question = simulation.add(2, 40)
    simulation.run()
    assert question.response_s < 3
    assert book.response_s < 1.2 * (8000 * 0.005 + 8000 * 8000 / 2 * 5e-8)


# ---- order ----------------------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    simulation = Simulation(fifty_ms, max_running=1)
    requests = [simulation.add(5) for _ in range(4)]
    simulation.run()
    starts = [r.token_times[0] for r in requests]
    assert starts == sorted(starts)


def test_lower_numbers_first() -> None:
    simulation = Simulation(fifty_ms, max_running=1)
    simulation.add(5)
    simulation.step()
    batch = simulation.add(5, priority=1)
    usual = simulation.add(5)
    urgent = simulation.add(5, priority=-1)
    simulation.run()
    assert urgent.token_times[0] < usual.token_times[0] < batch.token_times[0]


def test_the_urgent_takes_a_place_from_batch_work() -> None:
    simulation = Simulation(fifty_ms, max_running=1)
    batch = simulation.add(200, priority=1)
    for _ in range(10):
        simulation.step()
    urgent = simulation.add(5)
    simulation.run()
    assert urgent.response_s < 0.5
    assert batch.seq.n_preempted == 1
    assert batch.done


def test_equal_priorities_are_not_preempted_for_a_place() -> None:
    simulation = Simulation(fifty_ms, max_running=1)
    first = simulation.add(50)
    simulation.step()
    simulation.add(5)
    simulation.run()
    assert first.seq.n_preempted == 0


def test_batch_work_does_not_starve() -> None:
    """Interactive requests keep coming faster than they can be served; a batch request still gets its turn, after LEVEL_S."""
    simulation = Simulation(fifty_ms, max_running=1)
    batch = simulation.add(3, priority=1)
    simulation.add(3)
    while not batch.done:
        if len(simulation.scheduler.waiting) < 3:
            simulation.add(3)
        simulation.step()
        assert simulation.clock() < LEVEL_S + 5
    assert batch.token_times[0] > LEVEL_S - 5


def test_nobody_overtakes_one_who_waits_for_room() -> None:
    simulation = Simulation(fifty_ms, n_blocks=10)
    simulation.add(40, 100)
    simulation.step()
    simulation.step()
    large = simulation.add(2, 80)
    small = simulation.add(2, 5)
    simulation.run()
    assert large.token_times[0] <= small.token_times[0]


# ---- memory ---------------------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way() -> None:
    simulation = Simulation(fifty_ms, n_blocks=8)
    requests = []
    for _ in range(3):
        requests.append(simulation.add(60, 20))
        simulation.step()
    simulation.run()
    preempted = [r.seq.n_preempted for r in requests]
    assert preempted[0] == 0
    assert preempted[2] > 0
    assert all(r.done for r in requests)


def test_a_preempted_one_starts_from_the_tree() -> None:
    """What it had computed is in the tree, and only what was needed meanwhile is computed again."""
    simulation = Simulation(fifty_ms, n_blocks=8)
    requests = [simulation.add(50, 20) for _ in range(2)]
    simulation.run()
    rows = sum(plan.rows for plan in simulation.plans)
    assert sum(r.seq.n_preempted for r in requests) == 1
    assert 2 * 69 < rows < 2 * 69 + 70


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 80), st.integers(0, 20), st.integers(-1, 1)), min_size=1, max_size=12),
    n_blocks=st.integers(8, 30),
    max_rows=st.integers(2, 64),
    max_running=st.integers(1, 8),
)
def test_everyone_is_served(requests: list[tuple[int, int, int, int]], n_blocks: int, max_rows: int, max_running: int) -> None:
    """Whatever comes whenever: all are answered, no pass is too large, no row is computed for nothing, blocks are given back."""
    simulation = Simulation(laptop, n_blocks=n_blocks, max_rows=max_rows, max_running=max_running)
    for step in range(21):
        for n_tokens, n_prompt, at, priority in requests:
            if at == step:
                simulation.add(n_tokens, n_prompt, priority=priority)
        simulation.step()
    for _ in range(5000):
        if all(r.done for r in simulation.requests):
            break
        simulation.step()
        assert simulation.plans[-1].slices or simulation.plans[-1].preempted
    assert all(r.done for r in simulation.requests)
    assert max(plan.rows for plan in simulation.plans) <= max_rows
    assert all(len({id(s.seq) for s in plan.slices}) == len(plan.slices) for plan in simulation.plans)
    assert simulation.cache.pool.n_held == 0
    if not any(r.seq.n_preempted for r in simulation.requests):
        assert sum(plan.rows for plan in simulation.plans) == sum(len(r.seq.tokens) - 1 for r in simulation.requests)


def test_queue_is_bounded() -> None:
    simulation = Simulation(fifty_ms, max_running=2, max_waiting=3)
    for _ in range(6):
        simulation.add(5)
    with pytest.raises(Busy):
        simulation.step()


def test_it_only_decides() -> None:
    """No numerics, no clock, no threads: what it imports."""
    tree = ast.parse(Path(scheduler_module.__file__).read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert imported <= {
        "__future__",
        "dataclasses",
        "localrun.engine.cache",
        "localrun.engine.cost",
        "localrun.engine.sequence",
        "localrun.errors",
    }


# ---- the cost model -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 8, 40, 100, 200])
def test_cost_model_learns_what_it_sees(rows: int) -> None:
    model = CostModel(512)

    def truth(n: int, attended: int, outputs: int) -> float:
        return max(0.03, 0.004 * n) + 4e-8 * attended + 0.001 * outputs

    for i in range(300):
        for n in (1, 2, 4, 8, 16, 64, 128, 256):
            attended = n * (100 + 37 * (i % 50))
            outputs = n if n <= 8 else i % 3
            model.observe(n, attended, outputs, truth(n, attended, outputs))
    outputs = rows if rows <= 8 else 1
    assert model.predict(rows, rows * 1000, outputs) == pytest.approx(truth(rows, rows * 1000, outputs), rel=0.15)


def test_cost_model_follows_a_machine_that_slows_down() -> None:
    model = CostModel(64)
    for _ in range(50):
        model.observe(8, 1000, 8, 0.05)
    for _ in range(30):
        model.observe(8, 1000, 8, 0.15)
    assert model.predict(8, 1000, 8) == pytest.approx(0.15, rel=0.05)


def test_cost_model_is_not_thrown_by_one_long_pause() -> None:
    model = CostModel(64)
    for _ in range(50):
        model.observe(8, 1000, 8, 0.05)
    model.observe(8, 1000, 8, 60.0)
    assert model.predict(8, 1000, 8) < 0.2


def test_rows_within_is_the_most_that_fit() -> None:
    model = CostModel(512)
    for _ in range(20):
        for n in (1, 16, 64, 256):
            model.observe(n, 0, 0, 0.005 * n)
    n = model.rows_within(0.2, 4, 0, 0, 0, 500)
    assert model.predict(4 + n) <= 0.2 < model.predict(4 + n + 1)
    assert model.rows_within(0.001, 4, 0, 0, 0, 500) == 0
    assert model.rows_within(0.2, 4, 0, 0, 0, 7) == 7


def test_an_unknown_machine_is_tried_with_care() -> None:
    model = CostModel(512, first_chunk=64)
    assert model.rows_within(0.2, 0, 0, 0, 0, 500) == 64
    model.observe(64, 0, 0, 0.3)
    assert model.rows_within(0.2, 0, 0, 0, 0, 500) < 64
