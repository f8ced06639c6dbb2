"""Conversations kept on disk: nothing is read twice, nothing damaged is believed, nothing changes an answer."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from localrun.engine import runner
from localrun.engine.sessions import Chain, SessionStore, root_key
from localrun.errors import Unsupported
from localrun.messages import Finished, FromRunner, Generate, Load, Piece, Sampling, Shutdown, decode_from_runner, encode
from tests.engine import oracle
from tests.engine.harness import Harness
from tests.fakes import BOS, FakeClock, FakeModel

ROOT = root_key("sha256:ab", "f16", 1024, 4096)


def store_in(folder: Path, root: bytes = ROOT, most_bytes: int = 1 << 30) -> SessionStore:
    """Its end waits for all that is still to be written, however busy the machine is."""
    store = SessionStore(folder / "sessions", root, 16, most_bytes)
    store.close = functools.partial(store.close, 120.0)  # type: ignore[method-assign]
    return store


def engine_with(store: SessionStore, n_blocks: int = 400, **options: Any) -> Harness:
    clock = FakeClock()
    model = FakeModel(max_batch=256, eog_bias=-100, clock=clock, cost=lambda rows, attended: 0.01 + 0.003 * rows)
    return Harness(model, n_blocks, clock=clock, sessions=store, **options)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "sessions").glob("*.kv"))


def test_a_long_chat_goes_on_after_a_restart(tmp_path: Path) -> None:
    """4,000 tokens are brought back, all but what follows the last whole block; the answer is the same to the token."""
    prompt = [BOS, *(97 + i % 23 for i in range(3999))]
    first = store_in(tmp_path)
    harness = engine_with(first)
    before = harness.ask(prompt, max_tokens=20, session=True)
    harness.run()
    first.close()
    turn = [*before.tokens, 65, 66, 67]

    second = store_in(tmp_path)
    harness = engine_with(second)
    after = harness.ask(turn, max_tokens=10, session=True)
    harness.run()
    assert after.finished is not None
    assert after.finished.cached_tokens == 4000 + 20 - 1 - (4000 + 20 - 1) % 16
    assert harness.model.rows < 60
    cold = Harness(FakeModel(max_batch=256, eog_bias=-100), 400)
    plain = cold.ask(turn, max_tokens=10)
    cold.run()
    assert after.answer == plain.answer
    second.close()


def answered(asked: Generate, **load: Any) -> tuple[Finished, list[float]]:
    """By a runner of its own, which ends behind it; and the log-probabilities."""
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=runner.main, args=(theirs,))
    thread.start()
    frame = Load(cache_dir=os.environ["LOCALRUN_CACHE"], kv_budget=4 << 20, num_thread=2, gpu_layers=0, **load)
    for message in (frame, asked):
        ours.send_bytes(encode(message))
    event: FromRunner | None = None
    logprobs: list[float] = []
    while not isinstance(event, Finished):
        assert ours.poll(120), "the runner says nothing"
        event = decode_from_runner(ours.recv_bytes())
        logprobs += [one.logprob for one in event.logprobs] if isinstance(event, Piece) else []
    ours.send_bytes(encode(Shutdown()))
    thread.join(120)
    assert not thread.is_alive()
    ours.close()
    return event, logprobs


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kernels_go_on_where_another_process_stopped(tmp_path: Path, shared: Path, kv_type: str, temperature: float) -> None:
    """A real model, with windows: what a runner has left on disk gives the next one the tokens, and log-probabilities, of a cold run."""
    file = shared / "arch" / "gemma3" / "q4_0.gguf"
    prompt = [int(token) for token in np.random.default_rng(3).integers(3, 250, 120)]

    def turn(tokens: list[int], folder: str) -> tuple[Finished, list[float]]:
        sampling = Sampling(seed=5, temperature=temperature, top_k=0, top_p=1.0, ignore_eos=True)
        asked = Generate(request_id="a", prompt_tokens=tokens, sampling=sampling, max_tokens=24, session=bool(folder), logprobs=0)
        kept = {"session_dir": folder, "session_bytes": 1 << 30} if folder else {}
        return answered(asked, path=str(file), digest="sha256:ab", kv_cache_type=kv_type, **kept)

    before, _ = turn(prompt, str(tmp_path / "sessions"))
    longer = [*before.context, 65, 66, 67]
    (resumed, known), (cold, anew) = turn(longer, str(tmp_path / "sessions")), turn(longer, "")
    assert (resumed.cached_tokens, cold.cached_tokens) == (128, 0)
    assert resumed.context == cold.context
    assert known == anew and len(known) == 24


def test_only_who_asks_is_kept_and_served(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    harness = engine_with(store)
    harness.ask([BOS, *range(97, 120)] * 3, max_tokens=4)
    harness.run()
    assert store.n_saved == 0
    harness.ask([BOS, *range(97, 120)] * 3, max_tokens=4, session=True)
    harness.run()
    store.close()
    assert store.n_saved == 4
    fresh = engine_with(store_in(tmp_path))
    plain = fresh.ask([BOS, *range(97, 120)] * 3, max_tokens=4)
    fresh.run()
    assert plain.finished is not None
    assert plain.finished.cached_tokens == 0


def test_conversations_that_begin_alike_share_files(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    harness = engine_with(store)
    common = [BOS, *(97 + i % 19 for i in range(159))]
    for i in range(5):
        harness.ask([*common, 65 + i, *range(97, 113)], max_tokens=2, session=True)
        harness.run()
    store.close()
    assert len(files(tmp_path)) == 10 + 5
    assert stat.S_IMODE((tmp_path / "sessions").stat().st_mode) == 0o700
    assert stat.S_IMODE(files(tmp_path)[0].stat().st_mode) == 0o600


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "swap"])
def test_what_is_damaged_is_noticed(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    """Anything wrong with the third block's file: two blocks are brought back, the rest is read, the file goes."""
    prompt = [BOS, *(97 + i % 19 for i in range(99))]
    store = store_in(tmp_path)
    harness = engine_with(store)
    before = harness.ask(prompt, max_tokens=2, session=True)
    harness.run()
    store.close()
    chain = Chain(ROOT, 16)
    victim, other = (tmp_path / "sessions" / f"{chain.key(prompt, i).hex()}.kv" for i in (2, 3))
    data = victim.read_bytes()
    spoilt = {
        "cut": data[:-7], "flip": data[:200] + bytes([data[200] ^ 1]) + data[201:], "empty": b"", "swap": other.read_bytes(),
    }  # fmt: skip
    victim.write_bytes(spoilt[harm])
    again = store_in(tmp_path)
    harness = engine_with(again)
    after = harness.ask(prompt, max_tokens=2, session=True)
    harness.run()
    again.close()
    assert after.finished is not None
    assert after.finished.cached_tokens == 32
    assert after.answer == before.answer
    assert "damaged" in caplog.text
    assert victim.read_bytes() == data, "it was computed again and saved again"


@pytest.mark.parametrize("root", [root_key("sha256:cd", "f16", 1024, 4096), root_key("sha256:ab", "q8_0", 1024, 4096)])
def test_another_model_or_kv_type_shares_nothing(tmp_path: Path, root: bytes) -> None:
    prompt = [BOS, *(97 + i % 19 for i in range(99))]
    for key in (ROOT, root):
        store = store_in(tmp_path, key)
        harness = engine_with(store)
        outcome = harness.ask(prompt, max_tokens=2, session=True)
        harness.run()
        store.close()
        assert outcome.finished is not None
        assert outcome.finished.cached_tokens == 0
    assert len(files(tmp_path)) == 12


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    """What was used least lately goes; of one conversation its end."""
    size = 8 + 32 + 64 + 1024 + 32
    kept = [BOS, *range(97, 120)] * 4
    store = store_in(tmp_path, most_bytes=30 * size)
    harness = engine_with(store)
    for i in range(12):
        harness.ask([BOS, 65 + i, *(97 + i for _ in range(60))], max_tokens=2, session=True)
        harness.run()
        harness.ask(kept, max_tokens=2, session=True)
        harness.run()
        store.close()  # so that the order of files on disk is known
        store._writer = None
    assert len(files(tmp_path)) <= 30
    fresh = store_in(tmp_path)
    harness = engine_with(fresh)
    outcome = harness.ask(kept, max_tokens=2, session=True)
    harness.run()
    assert outcome.finished is not None
    assert outcome.finished.cached_tokens == 80


def test_streams_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    """Blocks come back in parts of a quarter of the target."""
    prompt = [BOS, *(97 + i % 19 for i in range(1599))]
    store = store_in(tmp_path)
    harness = engine_with(store)
    harness.ask(prompt, max_tokens=2, session=True)
    harness.run()
    store.close()

    slow = store_in(tmp_path)
    harness = engine_with(slow)
    load = slow.load

    def load_slowly(key: bytes, tokens: list[int], n_bytes: int) -> bytes | None:
        harness.clock.advance(0.01)
        return load(key, tokens, n_bytes)

    slow.load = load_slowly  # type: ignore
    harness.ask([BOS, 65], max_tokens=200, draft_num_predict=0)
    for _ in range(3):
        harness.step()
    harness.ask(prompt, max_tokens=2, session=True)
    gaps = []
    while harness.engine.has_work:
        began = harness.clock()
        harness.step()
        gaps.append(harness.clock() - began)
    assert max(gaps) < 0.11
    assert slow.n_restored == 99
    harness.run()


def test_cancelled_while_it_is_brought_back(tmp_path: Path) -> None:
    prompt = [BOS, *(97 + i % 19 for i in range(1599))]
    store = store_in(tmp_path)
    harness = engine_with(store)
    harness.ask(prompt, max_tokens=2, session=True)
    harness.run()
    store.close()
    slow = store_in(tmp_path)
    harness = engine_with(slow)
    load = slow.load
    slow.load = lambda *given: (harness.clock.advance(0.05), load(*given))[1]  # type: ignore
    outcome = harness.ask(prompt, max_tokens=2, session=True)
    harness.step()
    assert harness.engine.keeper is not None
    assert harness.engine.keeper.is_restoring
    harness.engine.cancel("request 1")
    harness.engine.check()
    assert outcome.finished is not None
    assert harness.engine.cache.pool.n_held == 0
    assert not harness.engine.has_work


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answers are as ever."""
    (tmp_path / "sessions").write_text("a file where the folder should be", encoding="utf-8")
    store = store_in(tmp_path)
    harness = engine_with(store)
    prompt = [BOS, *(97 + i % 19 for i in range(159))]
    outcome = harness.ask(prompt, max_tokens=5, session=True)
    harness.run()
    store.close()
    assert outcome.answer == oracle.answer(prompt, Sampling(seed=1), 5, eog_bias=-100)
    assert caplog.text.count("sessions are not saved") == 1
    assert store.n_skipped == 10


def test_where_nothing_is_kept_it_is_refused() -> None:
    with pytest.raises(Unsupported, match="LOCALRUN_SESSION_SIZE"):
        Harness().ask("x", session=True)


@example(seed=111, n_blocks=8, max_batch=40, most_blocks=60)  # the pool just holds it, its last block goes on in the tree
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), n_blocks=st.integers(8, 40), max_batch=st.integers(4, 64), most_blocks=st.integers(2, 60))
def test_never_another_answer(tmp_path: Path, seed: int, n_blocks: int, max_batch: int, most_blocks: int) -> None:
    """Random conversations over several lives, with a pool and a folder that are too small, cancelled now and then, with drafts."""
    rng = random.Random(seed)
    folder = tmp_path / str(rng.random())
    known = [[BOS, *(rng.randint(97, 99) for _ in range(rng.randint(1, 60)))] for _ in range(3)]
    for _ in range(3):
        store = SessionStore(folder, ROOT, 16, most_blocks * 1160)
        harness = Harness(FakeModel(max_batch=max_batch), n_blocks, sessions=store)
        asked = {}
        for i in range(6):
            prompt = rng.choice(known)[: n_blocks * 16 - 20] + [rng.randint(97, 99) for _ in range(rng.randint(0, 5))]
            options: dict[str, Any] = {"seed": i, "logit_bias": {97: 30.0, 98: 30.0, 99: 30.0}}
            asked[f"request {i + 1}"] = (prompt, options)
            harness.ask(prompt, max_tokens=25, session=rng.random() < 0.8, **options)
            for _ in range(rng.randint(0, 30)):
                harness.step()
            if rng.random() < 0.2:
                harness.engine.cancel(f"request {i + 1}")
        harness.run()
        store.close(120.0)
        for name, (prompt, options) in asked.items():
            outcome = harness.outcomes[name]
            expected = oracle.answer(prompt, Sampling(**options), 25, limit=n_blocks * 16)
            assert outcome.answer == expected[: len(outcome.answer)]
            assert outcome.finished is not None
            assert outcome.finished.reason == "cancelled" or len(outcome.answer) == len(expected)
            known.append(outcome.tokens)
