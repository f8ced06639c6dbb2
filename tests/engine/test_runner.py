"""A runner's life over a real pipe: in a thread where that is enough, in a process of its own where it dies or is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from localrun.engine import runner
from localrun.engine.intake import Intake
from localrun.engine.memory import MEBI, available_memory, kv_budget
from localrun.engine.parts import Loader, Parts
from localrun.errors import from_wire
from localrun.messages import (
    Cancel,
    Detokenize,
    Detokenized,
    Embed,
    Embedded,
    Evaluate,
    Evaluated,
    Failed,
    Finished,
    FromRunner,
    Generate,
    Inspect,
    Inspected,
    Load,
    Loaded,
    LoadProgress,
    Message,
    Piece,
    Rank,
    Ranked,
    Render,
    Rendered,
    Sampling,
    Shutdown,
    Started,
    Tokenize,
    Tokenized,
    ToRunner,
    decode_from_runner,
    encode,
)
from localrun.models.errors import ModelFileError
from localrun.models.model import Progress, Span
from tests import fakes

PATIENCE_S = 120.0


class Talk:
    """The daemon's end of the pipe."""

    def __init__(self, connection: Connection, waits_for_end: Any) -> None:
        self.connection = connection
        self.ended = waits_for_end

    def send(self, *frames: ToRunner) -> None:
        for frame in frames:
            self.connection.send_bytes(encode(frame))

    def receive(self) -> FromRunner:
        assert self.connection.poll(PATIENCE_S), "the runner says nothing"
        return decode_from_runner(self.connection.recv_bytes())

    def until(self, request_id: str) -> list[FromRunner]:
        """Events up to the last one of that request."""
        events = []
        while True:
            events.append(self.receive())
            last = events[-1]
            if getattr(last, "request_id", None) == request_id and not isinstance(last, Started | Piece | Evaluated):
                return events

    def load(self, **fields: Any) -> Loaded:
        self.send(Load(path="nowhere.gguf", cache_dir="", **fields))
        while not isinstance(event := self.receive(), Loaded):
            assert isinstance(event, LoadProgress), event
        return event

    def close(self) -> None:
        self.connection.close()
        self.ended()


def in_thread(loader: Loader | str) -> Talk:
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=runner.main, args=(theirs, loader))
    thread.start()

    def ended() -> None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the runner goes on"

    return Talk(ours, ended)


def gated(loader: Loader, gate: threading.Event) -> Loader:
    """The loader, whose model's first pass begins when the gate is open."""

    def load(load: Load, progress: Progress) -> Parts:
        parts = loader(load, progress)
        forward = parts.model.forward

        def when_open(spans: list[Span]) -> Any:
            assert gate.wait(PATIENCE_S)
            return forward(spans)

        parts.model.forward = when_open  # type: ignore[method-assign]
        return parts

    return load


@pytest.fixture
def talk() -> Iterator[Talk]:
    """A loaded runner that answers as fakes.echo says."""
    talk = in_thread(fakes.load_scripted)
    talk.load()
    yield talk
    talk.close()


def text_of(events: list[FromRunner], request_id: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Piece) and e.request_id == request_id)


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


# ---- loading --------------------------------------------------------------------------------------------------------------------


def test_loading_reports_progress_and_what_was_loaded() -> None:
    talk = in_thread("tests.fakes:load_fake")
    talk.send(Load(path="x", cache_dir="", num_batch=48, kv_budget=40 * 1024))
    events = [talk.receive() for _ in range(3)]
    assert [type(e) for e in events] == [LoadProgress, LoadProgress, Loaded]
    loaded = events[2]
    assert isinstance(loaded, Loaded)
    assert (loaded.kv_tokens, loaded.kv_bytes, loaded.architecture, loaded.has_template) == (640, 40 * 1024, "fake", True)
    talk.send(Shutdown())
    talk.close()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ModelFileError("x.gguf", "some.key", "is wrong"), "model_file_rejected", "x.gguf: some.key: is wrong"),
        (MemoryError(), "load_failed", "not enough memory"),
        (RuntimeError("no such luck"), "internal_error", "RuntimeError: no such luck"),
    ],
)
def test_loading_that_fails_says_why(error: Exception, code: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    talk = in_thread(partial(fakes.load_failing, error=error))
    talk.send(Load(path="x", cache_dir=""))
    event = talk.receive()
    assert isinstance(event, Failed)
    assert (event.request_id, event.code) == ("", code)
    assert text in event.message
    assert "\n" not in event.message
    talk.close()
    assert ("Traceback" in caplog.text) == (code == "internal_error"), "only a defect is worth a traceback in the log"


@pytest.mark.parametrize("waiting", [0, 2])
def test_loading_that_fails_leaves_no_reader_behind(waiting: int) -> None:
    """Neither one in a read, which could take the first bytes of whichever pipe gets the closed one's number, nor one whose message waits
    for the runner that never came."""
    before = set(threading.enumerate())
    talk = in_thread(partial(fakes.load_failing, error=MemoryError()))
    talk.send(Load(path="x", cache_dir=""), *[Tokenize(request_id=f"{i}", text="x") for i in range(waiting)])
    assert isinstance(talk.receive(), Failed)
    talk.ended()
    for thread in set(threading.enumerate()) - before:  # on a machine that stands still the runner does not wait for it for ever
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name
    talk.close()


def test_a_missing_file_is_told_by_name() -> None:
    talk = in_thread(partial(fakes.load_failing, error=FileNotFoundError(2, "No such file or directory", "gone.gguf")))
    talk.send(Load(path="x", cache_dir=""))
    event = talk.receive()
    assert isinstance(event, Failed)
    assert event.code == "load_failed"
    assert "gone.gguf" in event.message
    talk.close()


def test_a_budget_too_small_for_one_block() -> None:
    talk = in_thread(fakes.load_fake)
    talk.send(Load(path="x", cache_dir="", kv_budget=100))
    events = [talk.receive() for _ in range(3)]
    assert isinstance(events[2], Failed)
    assert "at least 1024 bytes" in events[2].message
    talk.close()


def test_first_message_must_be_load() -> None:
    talk = in_thread(fakes.load_fake)
    talk.send(Tokenize(request_id="t", text="x"))
    event = talk.receive()
    assert isinstance(event, Failed)
    assert "load" in event.message
    talk.close()


# ---- requests -------------------------------------------------------------------------------------------------------------------


def test_many_requests_interleaved() -> None:
    gate = threading.Event()
    talk = in_thread(gated(fakes.load_scripted, gate))
    talk.load()
    talk.send(*[Generate(request_id=f"{i}", messages=user(f"number {i}")) for i in range(20)], Tokenize(request_id="t", text=""))
    talk.until("t")  # the reader has taken all of them
    gate.set()
    pending = {f"{i}" for i in range(20)}
    texts = dict.fromkeys(pending, "")
    order = []
    while pending:
        event = talk.receive()
        order.append(getattr(event, "request_id", ""))
        if isinstance(event, Piece):
            texts[event.request_id] += event.text
        elif not isinstance(event, Started):
            assert isinstance(event, Finished), event
            pending.remove(event.request_id)
    assert texts == {f"{i}": f'You said "number {i}".' for i in range(20)}
    assert len(set(order[-100:])) > 10, "they run together, not one after another"
    talk.close()


def test_what_needs_no_model_is_answered_beside_it(talk: Talk) -> None:
    talk.send(Tokenize(request_id="t", text="hello world"))
    assert talk.receive() == Tokenized(request_id="t", tokens=[fakes.BOS, 264, 265])
    talk.send(Tokenize(request_id="t", text="<|user|>", add_special=False, parse_special=False))
    assert talk.receive() == Tokenized(request_id="t", tokens=list(b"<|user|>"))
    talk.send(Detokenize(request_id="d", tokens=[264, 265, 270]))
    assert talk.receive() == Detokenized(request_id="d", text="hello world한")
    talk.send(Render(request=Generate(request_id="r", prompt="hi", system="be kind")))
    assert talk.receive() == Rendered(request_id="r", text="<|system|>be kind<|user|>hi<|assistant|>", tokens=13)


def test_inspection_over_the_pipe(talk: Talk) -> None:
    talk.send(Generate(request_id="a", prompt="hello"))
    talk.until("a")
    talk.send(Inspect(request_id="i"))
    found = talk.receive()
    assert isinstance(found, Inspected)
    assert (found.running, found.waiting, found.kv_blocks_held) == (0, 0, 0)
    assert found.rows > found.passes > 0


def test_render_says_what_generate_reads(talk: Talk) -> None:
    request = Generate(request_id="r", messages=user("hello 한글"), max_tokens=0)
    talk.send(Render(request=request))
    rendered = talk.receive()
    assert isinstance(rendered, Rendered)
    talk.send(request)
    finished = talk.until("r")[-1]
    assert isinstance(finished, Finished)
    assert finished.prompt_tokens == rendered.tokens
    assert fakes.FakeTokenizer().decode(finished.context[1:]).decode() == rendered.text


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": "x", "think": True}, "unsupported", "think"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "unsupported", "tools"),
        ({"prompt": "x", "prompt_tokens": [1]}, "invalid_request", None),
        ({}, "invalid_request", None),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [Message(role="wizard", content="x")]}, "template_error", None),
        ({"prompt_tokens": [5, 999]}, "invalid_request", None),
        ({"prompt_tokens": []}, "invalid_request", "prompt"),
        ({"prompt": "x", "deadline_s": -1.0}, "invalid_request", "deadline_s"),
        ({"prompt": "x", "format": {"not": {}}}, "unsupported", "format"),
        ({"prompt": "x", "sampling": Sampling(mirostat=3)}, "invalid_request", "mirostat"),
        ({"prompt": "x", "sampling": Sampling(dry_base=0.5)}, "invalid_request", "dry_base"),
        ({"prompt": "x", "sampling": Sampling(xtc_probability=2)}, "invalid_request", "xtc_probability"),
        ({"prompt": "x", "sampling": Sampling(banned_strings=["a"] * 65)}, "invalid_request", "banned_strings"),
        ({"prompt": "x", "num_ctx": -1}, "invalid_request", "num_ctx"),
        ({"prompt": "x", "logprobs": -1}, "invalid_request", "logprobs"),
        ({"prompt": "x", "stop": ["a"] * 65}, "invalid_request", "stop"),
        ({"prompt": "x", "sampling": Sampling(temperature=-1)}, "invalid_request", "temperature"),
        ({"prompt": "x", "sampling": Sampling(temperature=float("nan"))}, "invalid_request", "temperature"),
        ({"prompt": "x", "sampling": Sampling(top_p=1.5)}, "invalid_request", "top_p"),
        ({"prompt": "x", "sampling": Sampling(min_p=-0.1)}, "invalid_request", "min_p"),
        ({"prompt": "x", "sampling": Sampling(typical_p=2)}, "invalid_request", "typical_p"),
        ({"prompt": "x", "sampling": Sampling(repeat_penalty=0)}, "invalid_request", "repeat_penalty"),
        ({"prompt": "x", "sampling": Sampling(repeat_last_n=-2)}, "invalid_request", "repeat_last_n"),
        ({"prompt": "x", "sampling": Sampling(presence_penalty=float("inf"))}, "invalid_request", "presence_penalty"),
        ({"prompt": "x", "sampling": Sampling(logit_bias={999: 1.0})}, "invalid_request", "logit_bias"),
        ({"prompt": "x", "sampling": Sampling(logit_bias={9: float("nan")})}, "invalid_request", "logit_bias"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(talk: Talk, fields: dict[str, Any], code: str, param: str | None) -> None:
    talk.send(Generate(request_id="bad", **fields), Generate(request_id="good", messages=user("hi")))
    event = talk.receive()
    assert isinstance(event, Failed), event
    assert (event.request_id, event.code, event.param) == ("bad", code, param)
    assert "\n" not in event.message
    assert from_wire(event.code, event.message, event.param).status == 400
    assert text_of(talk.until("good"), "good") == 'You said "hi".'


def test_a_prompt_that_does_not_fit(talk: Talk) -> None:
    talk.send(Generate(request_id="long", prompt="x" * 50, raw=True, num_ctx=40))
    event = talk.receive()
    assert isinstance(event, Failed)
    assert event.code == "context_length_exceeded"
    assert "51 tokens" in event.message
    assert "39 fit" in event.message
    talk.send(Generate(request_id="exact", prompt="x" * 38, raw=True, num_ctx=40))
    finished = talk.until("exact")[-1]
    assert isinstance(finished, Finished)
    assert (finished.completion_tokens, finished.reason) == (1, "length")


def test_overflow_by_whole_messages(talk: Talk) -> None:
    conversation = [Message(role="system", content="sys")]
    for i in range(5):
        conversation += [Message(role="user", content=f"question {i}"), Message(role="assistant", content=f"answer {i}")]
    conversation.append(Message(role="user", content="last"))
    talk.send(Generate(request_id="a", messages=conversation, num_ctx=64, overflow="truncate_oldest"))
    events = talk.until("a")
    started = events[0]
    assert isinstance(started, Started)
    assert started.dropped_messages == 6
    assert started.dropped_tokens > 40
    assert started.prompt_tokens < 64
    assert text_of(events, "a") == 'You said "l'
    talk.send(Generate(request_id="b", messages=conversation, num_ctx=64))
    assert isinstance(talk.receive(), Failed)


def test_overflow_of_a_raw_prompt_by_shifting(talk: Talk) -> None:
    talk.send(Generate(request_id="a", prompt="x" * 100, raw=True, num_ctx=40, overflow="shift", max_tokens=2))
    started = talk.until("a")[0]
    assert isinstance(started, Started)
    assert started.dropped_tokens == 101 - started.prompt_tokens
    assert 30 <= started.prompt_tokens < 40


def test_cancel_takes_one_step() -> None:
    talk = in_thread(partial(fakes.load_fake, delay=0.02, eog_bias=-100.0))
    talk.load()
    talk.send(Generate(request_id="long", prompt="x", max_tokens=100_000, num_ctx=4000))
    for _ in range(5):
        talk.receive()
    talk.send(Cancel(request_id="long"))
    finished = talk.until("long")[-1]
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"
    assert finished.completion_tokens < 1000
    talk.send(Cancel(request_id="long"), Cancel(request_id="unknown"), Tokenize(request_id="t", text=""))
    assert isinstance(talk.receive(), Tokenized)
    talk.send(Shutdown())
    talk.close()


def test_a_full_queue_is_busy() -> None:
    gate = threading.Event()
    talk = in_thread(gated(partial(fakes.load_fake, eog_bias=-100.0), gate))
    talk.load(max_queue=0)
    talk.send(*[Generate(request_id=f"{i}", prompt="x", max_tokens=60) for i in range(80)], Tokenize(request_id="t", text=""))
    talk.until("t")  # the reader has taken all of them: they come to the engine before the first has ended
    gate.set()
    outcomes: dict[str, FromRunner] = {}
    while len(outcomes) < 80:
        event = talk.receive()
        if isinstance(event, Finished | Failed):
            outcomes[event.request_id] = event
    refused = [e for e in outcomes.values() if isinstance(e, Failed)]
    assert {e.code for e in refused} == {"busy"}
    assert len(refused) == 16
    talk.send(Shutdown())
    talk.close()


def test_seed_is_drawn_and_reported() -> None:
    talk = in_thread(fakes.load_fake)
    talk.load()
    seeds, texts = [], []
    for i, given in enumerate([None, -1, None]):
        talk.send(Generate(request_id=f"{i}", prompt="x", max_tokens=20, sampling=Sampling(seed=given)))
        events = talk.until(f"{i}")
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        assert events[0].seed == events[-1].seed
        seeds.append(events[0].seed)
        texts.append(text_of(events, f"{i}"))
    assert len(set(seeds)) == 3
    talk.send(Generate(request_id="again", prompt="x", max_tokens=20, sampling=Sampling(seed=seeds[1])))
    assert text_of(talk.until("again"), "again") == texts[1]
    talk.send(Shutdown())
    talk.close()


def test_evaluate_over_the_pipe(talk: Talk) -> None:
    talk.send(Evaluate(request_id="e", text="hello world, hello", top=3))
    events = talk.until("e")
    chunks = [e for e in events if isinstance(e, Evaluated)]
    tokens = fakes.FakeTokenizer().encode("hello world, hello")
    assert [t for c in chunks for t in c.tokens] == tokens
    assert len([x for c in chunks for x in c.nll]) == len(tokens) - 1
    talk.send(Evaluate(request_id="bad", text="x", tokens=[1]))
    assert isinstance(talk.receive(), Failed)


def test_vectors_over_the_pipe(talk: Talk) -> None:
    """Of a decoder, which gives its last token's; no event but the answer."""
    talk.send(Embed(request_id="v", texts=["one", "two"], dimensions=5))
    (got,) = talk.until("v")
    assert isinstance(got, Embedded)
    assert (got.n, got.width, len(got.data)) == (2, 5, 40)
    talk.send(Embed(request_id="w", texts=["one"], dimensions=5), Rank(request_id="r", query="q", documents=["a"]))
    # What is refused is so at once, whatever the engine is at: either may come first, and nothing else comes.
    answers = {event.request_id: event for event in (talk.receive(), talk.receive()) if isinstance(event, Embedded | Failed)}
    alone, refused = answers["w"], answers["r"]
    assert isinstance(alone, Embedded)
    assert alone.data == got.data[:20]
    assert isinstance(refused, Failed)
    assert refused.code == "unsupported"


def test_a_ranker_over_the_pipe() -> None:
    talk = in_thread(partial(fakes.load_fake, causal=False, pooling="rank", delay=0.05))
    try:
        loaded = talk.load()
        assert (loaded.capabilities, loaded.n_embd) == (["rerank"], fakes.WIDTH)
        talk.send(Rank(request_id="r", query="q", documents=["a", "b"]))
        (got,) = talk.until("r")
        assert isinstance(got, Ranked)
        assert len(got.scores) == 2
        talk.send(Generate(request_id="g", prompt="hello"))
        (refused,) = talk.until("g")
        assert isinstance(refused, Failed)
        assert refused.code == "unsupported"
        talk.send(Rank(request_id="long", query="q", documents=["a"] * 5000), Cancel(request_id="long"))
        (ended,) = talk.until("long")
        assert isinstance(ended, Finished)
        assert ended.reason == "cancelled"
        talk.send(Inspect(request_id="i"))
        (stands,) = talk.until("i")
        assert isinstance(stands, Inspected)
        assert stands.kv_blocks_held == 0
    finally:
        talk.close()


def test_a_frame_that_is_no_message_is_survived(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    talk.connection.send_bytes(b"\xc1 nonsense")
    talk.send(Tokenize(request_id="t", text=""))
    assert isinstance(talk.receive(), Tokenized)
    assert "no message" in caplog.text


def test_an_id_in_use_is_refused() -> None:
    talk = in_thread(partial(fakes.load_fake, delay=0.02, eog_bias=-100.0))
    talk.load()
    talk.send(Generate(request_id="a", prompt="x"), Generate(request_id="a", prompt="y"))
    while not isinstance(event := talk.receive(), Failed):
        assert isinstance(event, Started | Piece)
    assert "in use" in event.message
    talk.send(Shutdown())
    talk.close()


# ---- the process ----------------------------------------------------------------------------------------------------------------


def in_process(loader: Loader | str) -> tuple[Talk, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=runner.main, args=(theirs, loader))
    process.start()
    theirs.close()

    def ended() -> None:
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError("the runner process goes on")

    return Talk(ours, ended), process


@pytest.mark.parametrize(("closes", "expected"), [(True, runner.DaemonGone), (False, TypeError)])
def test_a_pipe_that_is_closed_in_the_middle_of_a_frame(
    closes: bool, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the runner's main thread, which has ended, while the reader is between a frame's length and its content."""
    ours, theirs = multiprocessing.Pipe()
    whole = Connection._recv  # type: ignore[attr-defined]

    def recv(self: Connection, size: int, *rest: Any) -> Any:
        got = whole(self, size, *rest)
        if closes:
            self.close()
        else:
            raise TypeError("something else")
        return got

    monkeypatch.setattr(Connection, "_recv", recv)
    ours.send_bytes(encode(Shutdown()))
    with pytest.raises(expected):
        runner.Pipe(theirs).receive()
    ours.close()
    theirs.close()


def test_process_ends_when_told() -> None:
    talk, process = in_process(partial(fakes.load_scripted, reply="hello"))
    talk.load()
    talk.send(Generate(request_id="a", prompt="x"))
    assert text_of(talk.until("a"), "a") == "hello"
    talk.send(Shutdown())
    talk.ended()
    assert process.exitcode == 0
    talk.close()


def test_process_ends_when_the_daemon_is_gone_in_the_middle_of_an_answer() -> None:
    talk, process = in_process(partial(fakes.load_fake, delay=0.01, eog_bias=-100.0))
    talk.load()
    talk.send(Generate(request_id="a", prompt="x", max_tokens=100_000))
    talk.receive()
    talk.close()
    assert process.exitcode == 0


def test_an_idle_process_uses_no_cpu_and_ends_with_the_pipe() -> None:
    talk, process = in_process(fakes.load_fake)
    talk.load()
    me = psutil.Process(process.pid)

    def in_a_second() -> tuple[float, int]:
        """Processor time, and how often it woke."""
        before, wakes_before = sum(me.cpu_times()[:2]), me.num_ctx_switches().voluntary
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            talk.connection.poll(0.1)
        return sum(me.cpu_times()[:2]) - before, me.num_ctx_switches().voluntary - wakes_before

    # Once it uses the first quiet moment; a busy machine has its say in when that is over.
    end = time.monotonic() + PATIENCE_S
    seconds, wakes = in_a_second()
    while seconds > 0.05 or wakes >= 20:
        assert time.monotonic() < end, (seconds, wakes)
        seconds, wakes = in_a_second()
    talk.close()
    assert process.exitcode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no POSIX signals")
def test_ctrl_c_does_not_reach_the_runner() -> None:
    talk, process = in_process(partial(fakes.load_scripted, reply="hello"))
    talk.load()
    os.kill(process.pid, signal.SIGINT)
    talk.send(Generate(request_id="a", prompt="x"))
    assert text_of(talk.until("a"), "a") == "hello"
    talk.send(Shutdown())
    talk.close()


def test_a_crash_closes_the_pipe() -> None:
    talk, process = in_process(partial(fakes.load_crashing, after_passes=3))
    talk.load()
    talk.send(Generate(request_id="a", prompt="x", max_tokens=100))
    with pytest.raises((EOFError, OSError)):
        while True:
            talk.receive()
    talk.close()
    assert process.exitcode != 0


# ---- memory ---------------------------------------------------------------------------------------------------------------------


def test_kv_budget() -> None:
    def tokens(available: int, asked: int = 0, n_ctx_train: int = 8192) -> int:
        return kv_budget(available, asked, 16 * 24_000, 16, n_ctx_train) // 24_000

    assert tokens(100 << 30) == 8 * 8192, "never more than eight contexts"
    assert tokens(2 << 30) == (2048 - 512) * MEBI // 2 // 24_000
    assert tokens(0) == 512, "room for a little in any case"
    assert tokens(0, asked=48_000) == 2
    assert kv_budget(1 << 50, 0, 1 << 20, 16, 1 << 20) == 8 << 30


def test_available_memory_is_within_the_machine_s() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_the_first_quiet_moment_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What structured output needs is made while nobody waits; afterwards requests are answered as ever."""
    prepared = threading.Event()
    times: list[int] = []

    def prepare(self: Intake) -> None:
        times.append(1)
        prepared.set()

    monkeypatch.setattr(runner, "IDLE_S", 0.01)
    monkeypatch.setattr(Intake, "prepare", prepare)
    talk = in_thread(fakes.load_scripted)
    talk.load()
    assert prepared.wait(PATIENCE_S)
    for name in ("a", "b"):
        talk.send(Generate(request_id=name, prompt="<|user|>hi<|assistant|>", raw=True, sampling=Sampling(temperature=0)))
        assert isinstance(talk.until(name)[-1], Finished)
    talk.close()
    assert times == [1]


def test_tile_shapes_are_timed_in_idle_moments_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first quiet moment, slice by slice until there is nothing left; a request that comes meanwhile waits for one slice."""
    slices: list[float] = []
    waiting, going_on, finished = threading.Event(), threading.Event(), threading.Event()

    def tune(self: fakes.FakeModel, seconds: float) -> bool:
        slices.append(seconds)
        if len(slices) == 3:
            waiting.set()
            assert going_on.wait(PATIENCE_S)
        if len(slices) == 5:
            finished.set()
        return len(slices) < 5

    monkeypatch.setattr(runner, "IDLE_S", 0.01)
    monkeypatch.setattr(Intake, "prepare", lambda self: None)
    monkeypatch.setattr(fakes.FakeModel, "tune", tune)
    talk = in_thread(fakes.load_scripted)
    talk.load()
    assert waiting.wait(PATIENCE_S)
    talk.send(Generate(request_id="a", prompt="<|user|>hi<|assistant|>", raw=True, sampling=Sampling(temperature=0)))
    talk.send(Tokenize(request_id="t", text="x"))
    assert isinstance(talk.receive(), Tokenized)  # the reader has taken the request before
    going_on.set()
    assert isinstance(talk.until("a")[-1], Finished)
    assert slices[:3] == [runner.TUNING_S] * 3
    assert finished.wait(PATIENCE_S), "it goes on in the next quiet moment"
    talk.send(Generate(request_id="b", prompt="<|user|>hi<|assistant|>", raw=True, sampling=Sampling(temperature=0)))
    assert isinstance(talk.until("b")[-1], Finished)
    talk.close()
    assert len(slices) == 5
