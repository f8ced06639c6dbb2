"""Models with recurrent state through the engine. The fake's state is a hash over all tokens in their order: a snapshot taken too early,
too late, of another sequence, or overwritten, changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.memory import blocks_without_kv, state_slots
from localrun.engine.pool import BlockPool
from localrun.engine.prefix import PrefixTree
from localrun.engine.runner import _allocate
from localrun.engine.states import StateSlots
from localrun.errors import BadRequest, LoadFailed
from localrun.messages import Evaluate, Generate, Load, Sampling
from tests.engine import oracle
from tests.engine.harness import Harness
from tests.engine.test_engine import PREFIXES, SAMPLINGS, Asked, asked
from tests.fakes import BOS, FakeClock, FakeModel, parts_of

STATE: dict[str, Any] = {"state_bytes": 64}
KINDS = [STATE, {**STATE, "pure": True}]


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(asked, min_size=1, max_size=9),
    n_blocks=st.integers(6, 40),
    n_slots=st.integers(1, 12),
    max_batch=st.integers(4, 64),
    max_running=st.integers(1, 12),
    per_row=st.sampled_from([0.0, 0.001, 0.02, 0.5]),
    kind=st.sampled_from(KINDS),
)
def test_nothing_changes_an_answer(
    requests: list[Asked], n_blocks: int, n_slots: int, max_batch: int, max_running: int, per_row: float, kind: dict[str, Any]
) -> None:
    """Alone, among others, cold or warm, chunked, preempted and resumed, with many slots or one: the answer the model gives by itself."""
    clock = FakeClock()
    model = FakeModel(max_batch=max_batch, clock=clock, cost=lambda rows, attended: 0.01 + per_row * rows, **kind)
    harness = Harness(model, n_blocks, n_slots=n_slots, clock=clock, max_running=max_running)
    outcomes = {}

    def act(step: int) -> None:
        for i, request in enumerate(requests):
            if request.until == step:
                harness.engine.cancel(f"request {i}")
            if request.at == step and len(request.prompt) < n_blocks * 16:
                fields = {name: getattr(SAMPLINGS[request.sampling], name) for name in Sampling.__struct_fields__}
                fields |= {"request_id": f"request {i}", "max_tokens": request.max_tokens, "priority": request.priority}
                outcomes[i] = harness.ask(list(request.prompt), **fields)

    for step in range(31):
        act(step)
        harness.step()
    harness.run(between=lambda step: act(step + 31))
    for i, outcome in outcomes.items():
        request = requests[i]
        assert outcome.finished is not None, outcome.failed
        limit = min(4096, n_blocks * 16)
        expected = oracle.answer(list(request.prompt), SAMPLINGS[request.sampling], request.max_tokens, limit=limit, **kind)
        assert outcome.answer == (expected if outcome.finished.reason != "cancelled" else expected[: len(outcome.answer)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_batch", [8, 64])
def test_the_same_prompt_again_goes_on_from_its_last_boundary(kind: dict[str, Any], max_batch: int) -> None:
    harness = Harness(FakeModel(eog_bias=-100, max_batch=max_batch, **kind), n_blocks=64)
    prompt = [BOS, *([97, 98, 99] * 30)]
    first = harness.ask(prompt, max_tokens=8)
    harness.run()
    second = harness.ask(prompt, max_tokens=8)
    harness.run()
    assert first.finished is not None and second.finished is not None
    assert (first.finished.cached_tokens, second.finished.cached_tokens) == (0, 80)
    assert second.answer == first.answer == oracle.answer(prompt, Sampling(seed=1), 8, eog_bias=-100, **kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_goes_on_from_the_end_of_the_answer(kind: dict[str, Any]) -> None:
    harness = Harness(FakeModel(eog_bias=-100, **kind), n_blocks=64)
    tokens = [BOS, *range(97, 117)]
    for turn in range(3):
        outcome = harness.ask(tokens, max_tokens=9)
        harness.run()
        assert outcome.finished is not None
        # Of the answer's last token only the logits were never asked for.
        assert outcome.finished.cached_tokens == (0 if not turn else len(tokens) - 3 - 1)
        assert outcome.answer == oracle.answer(tokens, Sampling(seed=1), 9, eog_bias=-100, **kind)
        tokens = [*outcome.tokens, 50, 51, 52]


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_beginning_is_kept_once_two_have_parted_from_it(kind: dict[str, Any]) -> None:
    harness = Harness(FakeModel(eog_bias=-100, **kind), n_blocks=64)
    common = [BOS, *range(40, 90)]
    cached = []
    for i in range(3):
        outcome = harness.ask([*common, *[97 + i] * 40], max_tokens=4)
        harness.run()
        assert outcome.finished is not None
        cached.append(outcome.finished.cached_tokens)
        assert outcome.answer == oracle.answer([*common, *[97 + i] * 40], Sampling(seed=1), 4, eog_bias=-100, **kind)
    assert cached == [0, 0, 48]


@pytest.mark.parametrize("kind", KINDS)
def test_many_answers_to_one_prompt_read_it_once(kind: dict[str, Any]) -> None:
    harness = Harness(FakeModel(eog_bias=-100, **kind), n_blocks=64, n_slots=16)
    prompt = [BOS, *([97, 98, 99] * 15)]
    outcomes = [harness.ask(prompt, max_tokens=6, seed=i) for i in range(5)]
    harness.run()
    assert [o.finished.cached_tokens for o in outcomes if o.finished] == [0, 32, 32, 32, 32]
    assert [o.answer for o in outcomes] == [oracle.answer(prompt, Sampling(seed=i), 6, eog_bias=-100, **kind) for i in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_is_invisible(kind: dict[str, Any]) -> None:
    harness = Harness(FakeModel(eog_bias=-100, **kind), n_blocks=10)
    outcomes = []
    for i in range(4):
        outcomes.append(harness.ask(PREFIXES[0] + [97 + i], max_tokens=60))
        harness.clock.advance(1)
    harness.run()
    assert harness.engine.inspected("i").preemptions > 0
    assert [o.answer for o in outcomes] == [
        oracle.answer(PREFIXES[0] + [97 + i], Sampling(seed=1), 60, eog_bias=-100, **kind) for i in range(4)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [1, 8])
def test_banned_strings_are_computed_anew_from_a_snapshot(kind: dict[str, Any], n_slots: int) -> None:
    bias = {97: 40.0, 98: 40.0, 99: 40.0}
    prompt = [BOS, *([97, 98] * 20)]
    expected = oracle.answer_without(["ab", "cca"], prompt, Sampling(seed=5, logit_bias=bias), 40, **kind)
    harness = Harness(FakeModel(**kind), n_blocks=64, n_slots=n_slots)
    outcome = harness.ask(prompt, seed=5, logit_bias=bias, banned_strings=["ab", "cca"], max_tokens=40)
    harness.run()
    assert outcome.answer == expected
    assert outcome.finished is not None and outcome.finished.cached_tokens == 0
    assert "ab" not in outcome.text


def test_an_answer_taken_back_again_and_again_is_not_read_again_from_its_beginning() -> None:
    """Whole blocks of an answer get snapshots once some of it has been taken back."""
    bias = {97: 40.0, 98: 40.0, 99: 40.0}
    harness = Harness(FakeModel(**STATE), n_blocks=64)
    outcome = harness.ask([BOS, 97], seed=5, logit_bias=bias, banned_strings=["ab", "cca"], max_tokens=300)
    seq = harness.engine.scheduler.waiting[0]
    harness.run()
    assert outcome.finished is not None
    assert seq.n_rewound > 20
    assert harness.model.rows < 300 + seq.n_rewound * (16 + len("cca") + 1) + 32


def test_nothing_is_drafted() -> None:
    harness = Harness(FakeModel(eog_bias=-100, **STATE), n_blocks=64)
    outcome = harness.ask([BOS, *([97, 98, 99] * 20)], max_tokens=40, logit_bias={97: 40.0}, draft_num_predict=8)
    harness.run()
    assert outcome.finished is not None
    assert outcome.finished.drafted_tokens == 0
    assert outcome.finished.passes == 40


def test_a_full_context_is_shifted_by_computing_what_is_left_anew() -> None:
    """The same answer as from a pool in which nothing of the shifted context can be found again."""

    def shifted(reuse: bool, overflow: str = "shift") -> tuple[list[int], int]:
        harness = Harness(FakeModel(eog_bias=-100, **STATE), n_blocks=64)
        outcome = harness.ask([BOS, *range(97, 117)], max_tokens=60, overflow=overflow, num_ctx=48)
        harness.run(between=lambda step: None if reuse else harness.engine.cache.tree.clear())
        assert outcome.finished is not None
        return outcome.answer, outcome.finished.dropped_tokens

    answer, dropped = shifted(reuse=True)
    assert dropped > 0
    assert (answer, dropped) == shifted(reuse=False)
    assert (answer, dropped) == shifted(reuse=True, overflow="sinks"), "read ahead while the answer goes on"


def test_an_answer_that_ends_before_what_was_computed_leaves_no_snapshot_there() -> None:
    """Tokens are held back while they may begin a banned string; when a stop string is found among them, those behind it go."""
    bias = {97: 40.0, 98: 40.0, 99: 40.0}
    taken_back = 0
    for seed in range(12):
        harness = Harness(FakeModel(**STATE), n_blocks=64)
        asked = {"seed": seed, "logit_bias": bias, "banned_strings": ["abcabcabc", "aaaaaaaa", "bcbcbcbc"], "stop": ["bc", "aa"]}
        first = harness.ask([BOS, *range(40, 60)], max_tokens=60, **asked)
        harness.run()
        assert first.finished is not None and first.finished.reason == "stop"
        taken_back += first.finished.passes - first.finished.completion_tokens > 1
        second = harness.ask([*first.tokens, 65], max_tokens=10)
        harness.run()
        assert second.answer == oracle.answer([*first.tokens, 65], Sampling(seed=1), 10, **STATE)
    assert taken_back > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eog_bias", [-100.0, 0.0])
def test_beams_take_their_states_with_them(kind: dict[str, Any], eog_bias: float) -> None:
    """Beginnings split with a copy of their state; where no slot is free, they are read again: the same search either way."""

    def found(*, copied: bool) -> tuple[list[int], int]:
        harness = Harness(FakeModel(eog_bias=eog_bias, **kind), n_blocks=64, n_slots=16)
        if not copied:
            harness.engine.cache.fork = lambda seq, copy: False  # type: ignore[method-assign]
        outcome = harness.add_search(harness.intake.search(beams(harness, 3)))
        harness.run()
        return outcome.answer, harness.model.rows

    answer, rows = found(copied=True)
    again, rows_read_again = found(copied=False)
    assert answer == again
    assert rows <= 36 + 8 * 3
    assert rows < rows_read_again


def beams(harness: Harness, n: int) -> Generate:
    number = len(harness.outcomes)
    prompt = [BOS, *range(40, 75)]
    return Generate(request_id=f"b{number}", prompt_tokens=prompt, num_beams=n, max_tokens=8, sampling=Sampling(seed=1))


def test_beams_that_cannot_all_run_at_a_time_are_refused() -> None:
    """Beams wait for each other in their places: too many would wait for ever."""
    harness = Harness(FakeModel(eog_bias=-100, **STATE), n_blocks=64, n_slots=8)
    with pytest.raises(BadRequest, match="5 beams cannot run at a time, this model has room for 4"):
        harness.engine.submit_search(harness.intake.search(beams(harness, 5)))
    assert not harness.engine.has_work


def test_searches_take_turns_where_not_all_of_their_beams_can_run() -> None:
    harness = Harness(FakeModel(eog_bias=-100, **STATE), n_blocks=64, n_slots=8)
    searches = [harness.add_search(harness.intake.search(beams(harness, n))) for n in (3, 2, 4, 1, 3)]
    other = harness.ask([BOS, 97], max_tokens=3)
    harness.run(between=lambda step: None if step > 8 else harness.clock.advance(0.1))
    assert all(o.finished is not None and o.finished.reason == "length" for o in [*searches, other])
    alone = Harness(FakeModel(eog_bias=-100, **STATE), n_blocks=64, n_slots=8)
    expected = alone.add_search(alone.intake.search(beams(alone, 3)))
    alone.run()
    assert searches[0].answer == searches[4].answer == expected.answer


def test_an_evaluation_beside_answers() -> None:
    def evaluated(beside: bool) -> list[float]:
        harness = Harness(FakeModel(max_batch=16, **STATE), n_blocks=64)
        if beside:
            harness.ask([BOS, *range(97, 120)], max_tokens=20)
        tokens = [BOS, *range(40, 100)]
        outcome = harness.add_job(harness.intake.evaluation(Evaluate(request_id="e", tokens=tokens)))
        harness.run()
        return [value for part in outcome.evaluated for value in part.nll]

    assert evaluated(True) == evaluated(False)


def test_slots_bound_who_runs() -> None:
    harness = Harness(FakeModel(eog_bias=-100, **STATE), n_blocks=64, n_slots=6)
    outcomes = [harness.ask([BOS, 97 + i], max_tokens=5) for i in range(8)]
    most = 0

    def look(step: int) -> None:
        nonlocal most
        most = max(most, len(harness.engine.scheduler.running))

    harness.run(between=look)
    assert most == 3
    assert all(o.finished is not None for o in outcomes)


def test_a_failed_pass_gives_slots_back_and_leaves_no_snapshot() -> None:
    class Failing(FakeModel):
        def forward(self, spans: Any) -> Any:
            super().forward(spans)
            raise RuntimeError("a kernel that fails")

    harness = Harness(Failing(**STATE), n_blocks=64)
    outcome = harness.ask([BOS, *range(40, 90)], max_tokens=5)
    harness.run()
    assert outcome.failed is not None
    states = harness.engine.cache.states
    assert states is not None and states.n_free == states.n_slots


# ---- memory --------------------------------------------------------------------------------------------------------------------

GIB = 1 << 30


def test_how_many_slots_there_are() -> None:
    assert state_slots(64 * GIB, 0, 0, pure=True) == 0
    assert state_slots(64 * GIB, 0, 20 << 20, pure=False) == 4 * GIB // (20 << 20)
    assert state_slots(64 * GIB, 0, 1 << 10, pure=False) == 256
    assert state_slots(GIB, 0, 200 << 20, pure=False) == 4, "never fewer than two sequences with a snapshot each need"
    assert state_slots(64 * GIB, GIB, 16 << 20, pure=False) == 32
    assert state_slots(64 * GIB, GIB, 16 << 20, pure=True) == 64
    assert blocks_without_kv(16, 32768) == 8 * 2048


@pytest.mark.parametrize("kind", KINDS)
def test_a_runner_reserves_both_memories(kind: dict[str, Any]) -> None:
    parts = parts_of(FakeModel(**kind))
    n_blocks, n_slots = _allocate(parts, Load(path="", cache_dir="", kv_budget=1 << 16))
    model = parts.model
    assert isinstance(model, FakeModel) and model.states is not None and model.store is not None
    assert len(model.states.values) == n_slots == 256
    pure = bool(kind.get("pure"))
    assert len(model.store.entries) == n_blocks == (8 * 256 if pure else (65536 - 256 * 64) // 1024)


def test_a_budget_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(LoadFailed, match="at least 1280 bytes"):
        _allocate(parts_of(FakeModel(**STATE)), Load(path="", cache_dir="", kv_budget=600))


# ---- the tree's snapshots alone -------------------------------------------------------------------------------------------------

SIZE = 4
texts = st.lists(st.integers(0, 2), min_size=1, max_size=16)


@given(st.lists(st.tuples(texts, st.sets(st.integers(1, 16))), max_size=10), texts, st.integers(0, 16), st.integers(0, 6))
def test_a_match_ends_at_the_deepest_snapshot(
    inserted: list[tuple[list[int], set[int]]], wanted: list[int], limit: int, n_evicted: int
) -> None:
    """Against the plain truth: every beginning that was given a snapshot, whatever came after it."""
    pool = BlockPool(200, SIZE)
    states = StateSlots(200, lambda source, target: None)
    tree = PrefixTree(pool, states)
    known: dict[tuple[int, ...], int] = {}
    for tokens, positions in inserted:
        table = [pool.allocate() for _ in range(pool.blocks_for(len(tokens)))]
        tree.insert(None, tokens, table, 0, len(tokens), tail=True)
        for block in table:
            pool.release(block)
        for position in sorted(p for p in positions if p <= len(tokens)):
            where = tree.locate(tokens, position)
            assert where is not None
            slot = states.take()
            assert slot is not None
            states.attach(*where, slot)
            known.setdefault(tuple(tokens[:position]), slot)
        states.check([], tree.nodes())
    match = tree.match_state(wanted, min(limit, len(wanted)))
    best = max((n for n in range(min(limit, len(wanted)) + 1) if tuple(wanted[:n]) in known), default=0)
    assert match.n_tokens == best
    assert match.slot == known.get(tuple(wanted[:best]), -1)
    assert len(match.blocks) == pool.blocks_for(best)
    for _ in range(n_evicted):
        tree.evict()
        tree.check()
        states.check([], tree.nodes())
    tree.clear()
    assert states.n_free == 200


def test_the_snapshot_used_least_recently_is_given_up() -> None:
    copied: list[tuple[int, int]] = []
    copy: Callable[[int, int], None] = lambda source, target: copied.append((source, target))  # noqa: E731
    states = StateSlots(3, copy)

    class Node:
        def __init__(self) -> None:
            self.states: dict[int, int] = {}

    a, b = Node(), Node()
    slots = [states.take() for _ in range(3)]
    assert states.take() is None
    states.attach(a, 4, slots[0] or 0)
    states.attach(b, 4, 1)
    states.use(a.states[4], 2)
    assert copied == [(a.states[4], 2)]
    assert states.take(may_evict=False) is None
    assert states.take() == 1
    assert not b.states and a.states
