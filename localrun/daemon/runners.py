"""A loaded model as the daemon sees it: a process at the other end of a pipe, and the streams of events that come out of it.

Runners start from a `forkserver` that has the heavy imports behind it (from scratch where there is none, as on Windows). Each has two
threads: one reads frames and hands events to the event loop, one writes frames, so that a runner that does not read cannot hold the daemon
up. When the process dies, however it dies, every waiting request gets RunnerDied at once. Knows neither HTTP nor when a model should be
loaded or given up; see loader.py.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from localrun import messages
from localrun.errors import BadRequest, LoadFailed, LocalrunError, RunnerDied, from_wire
from localrun.messages import (
    Cancel,
    Evaluate,
    Evaluated,
    Failed,
    FromRunner,
    Generate,
    Load,
    Loaded,
    LoadProgress,
    Piece,
    Shutdown,
    Started,
    ToRunner,
)

log = logging.getLogger(__name__)

MOST_WAITING_EVENTS = 1024
"""Of one request. A client that reads more slowly than the model writes gets its pieces joined from there on: none is lost, and what waits
is bounded by the length of the answer."""

STOP_S = (5.0, 2.0, 2.0)
"""How long a runner may take to end: after Shutdown, after terminate, after kill."""

EXIT_S = 5.0
"""How long the exit code of a process that has closed its pipe is waited for. It comes at once, from the process that runners start from,
unless the machine is too busy to let that one run."""

Progress = Callable[[LoadProgress], None]
LoadHook = Callable[..., Any] | None
"""What takes the place of the real loader in a runner (tests); must be picklable."""

_context: BaseContext | None = None
_starting = threading.Lock()


def context() -> BaseContext:
    """Where runners come from; one for the whole process."""
    global _context
    with _starting:
        if _context is None:
            if "forkserver" in multiprocessing.get_all_start_methods():
                made = multiprocessing.get_context("forkserver")
                made.set_forkserver_preload(["localrun.engine.preload"])
                _context = made
            else:
                _context = multiprocessing.get_context("spawn")
            _forget_the_script()
        return _context


def warm_up() -> None:
    """Starts the forkserver, so that the first load does not wait for its imports. Returns while it is still importing."""
    if context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        with _starting:
            forkserver.ensure_running()


def _forget_the_script() -> None:
    """multiprocessing runs the parent's main script again in every child, unless it is a package's `__main__`. The `localrun` command's
    script would load the terminal program there, 0.2 s for nothing; so it is said to be `python -m localrun`, which is the same program."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None:
        main.__spec__ = ModuleSpec("localrun.__main__", None)


def _run(connection: Connection, load: LoadHook) -> None:
    """What a runner process does. The import is here, since the daemon has no use for what it brings."""
    from localrun.engine import runner

    runner.main(connection, load)


def reported(event: Failed) -> LocalrunError:
    """The error that a runner reports. What is nobody's fault but ours stays in the log: it may name files, and helps no client."""
    if event.code == LocalrunError.code:
        log.error("request %s: %s", event.request_id or "(load)", event.message)
        return LocalrunError("internal error in the model's process; the server's log has the details")
    return from_wire(event.code, event.message, event.param)


class Stream:
    """The events of one message's requests (several where a client asked for several answers), in the order they happened.

    Used in the event loop only. Iterate with `next`; `close` it on every path: what has not ended is cancelled.
    """

    def __init__(self, runner: Runner, request_ids: list[str]) -> None:
        self._runner = runner
        self._numbers = {request_id: number for number, request_id in enumerate(request_ids)}
        self._open = set(request_ids)
        self._events: deque[tuple[int, FromRunner]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: LocalrunError | None = None

    async def next(self) -> tuple[int, FromRunner]:
        """The next event and the number of its request. Raises the error that a request ended with, or RunnerDied."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        number, event = self._events.popleft()
        if isinstance(event, Failed):
            raise reported(event)
        return number, event

    def ready(self) -> bool:
        """Whether `next` has something at once."""
        return bool(self._events)

    def cancel(self, number: int) -> None:
        """Asks for the end of one request, whose last event still comes."""
        for request_id, its_number in self._numbers.items():
            if its_number == number:
                self._runner.cancel(request_id)

    def close(self) -> None:
        """Cancels what is still running. Idempotent."""
        for request_id in self._open:
            self._runner.cancel(request_id)
        self._open.clear()
        self._events.clear()

    def push(self, event: Any) -> None:
        """An event that belongs to one of the requests (from the runner's reader)."""
        number = self._numbers[event.request_id]
        if len(self._events) >= MOST_WAITING_EVENTS and isinstance(event, Piece):
            last_number, last = self._events[-1]
            if last_number == number and isinstance(last, Piece):
                self._events[-1] = (number, _joined(last, event))
                return
        self._events.append((number, event))
        self._wake()

    def ended(self, request_id: str) -> None:
        """No more events of this request will come."""
        self._open.discard(request_id)

    def fail(self, error: LocalrunError) -> None:
        """The runner is gone; events that came before are still delivered."""
        self._error = error
        self._open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        request_id=first.request_id,
        text=first.text + second.text,
        thinking=first.thinking + second.thinking,
        tool_calls=[*first.tool_calls, *second.tool_calls],
        logprobs=[*first.logprobs, *second.logprobs],
    )


class Runner:
    """One process with one model. `start` it once, `stop` it on every path. All methods belong to the event loop it was made in."""

    def __init__(self, hook: LoadHook = None) -> None:
        self._hook = hook
        self._loop = asyncio.get_running_loop()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: deque[FromRunner] = deque()
        self._draining = False
        self._threads: list[threading.Thread] = []
        self._streams: dict[str, Stream] = {}
        self._loading: asyncio.Future[Loaded] | None = None
        self._on_progress: Progress | None = None
        self._stopping = False
        self._listens = False
        self._spawning: asyncio.Future[None] | None = None
        self._exit_code: int | None = None
        self.gone = asyncio.Event()
        """Set when the process is dead or the pipe is closed."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def busy(self) -> int:
        """Requests that have not ended, cancelled ones included."""
        return len(self._streams)

    async def start(self, load: Load, on_progress: Progress) -> Loaded:
        """Starts the process and has it load the model. `on_progress` hears of every step.

        Raises what the runner reports (ModelFileRejected, LoadFailed...) or LoadFailed when it dies. Whoever cancels this stops the runner.
        """
        self._on_progress = on_progress
        self._loading = self._loop.create_future()
        self._outbox.put(messages.encode(load))
        self._spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn))
        await asyncio.shield(self._spawning)
        return await self._loading

    def open(self, requests: Sequence[Generate | Evaluate]) -> Stream:
        """Sends the requests and returns their events. Raises RunnerDied when there is no process to ask."""
        return self._send([(request.request_id, request) for request in requests])

    async def ask(self, request_id: str, message: ToRunner) -> FromRunner:
        """One question, one answer (Render, Tokenize, Detokenize). Raises what `Stream.next` raises."""
        stream = self._send([(request_id, message)])
        try:
            return (await stream.next())[1]
        finally:
            stream.close()

    def cancel(self, request_id: str) -> None:
        """Tells the runner that nobody waits for this request any more."""
        if request_id in self._streams:
            self._outbox.put(messages.encode(Cancel(request_id=request_id)))

    async def stop(self) -> None:
        """Ends the process: asked, then told, then made to. Idempotent, bounded by STOP_S, safe at any time after `start` began."""
        self._stopping = True
        if self._spawning is not None:
            await asyncio.wait([self._spawning])
        process = self._process
        if process is not None:
            self._outbox.put(messages.encode(Shutdown()))
            # One that is still loading does not listen yet, and has nothing to finish.
            patiences = STOP_S if self._listens else (0.0, *STOP_S[1:])
            for patience, harder in zip(patiences, (process.terminate, process.kill, None), strict=True):
                try:
                    await asyncio.wait_for(self.gone.wait(), patience)
                    break
                except TimeoutError:
                    if harder is not None:
                        harder()
            await asyncio.to_thread(self._bury, process)
        self.gone.set()
        self._fail_all()

    # ---- in the event loop ----

    def _send(self, requests: Sequence[tuple[str, ToRunner]]) -> Stream:
        if self.gone.is_set() or self._stopping:
            raise self._died()
        try:
            frames = [messages.encode(message) for _, message in requests]
        except (OverflowError, ValueError) as error:
            raise BadRequest(f"the request holds what no model can be sent: {error}") from None
        stream = Stream(self, [request_id for request_id, _ in requests])
        for (request_id, _), frame in zip(requests, frames, strict=True):
            self._streams[request_id] = stream
            self._outbox.put(frame)
        return stream

    def _drain(self) -> None:
        self._draining = False
        while self._inbox:
            self._deliver(self._inbox.popleft())

    def _deliver(self, event: FromRunner) -> None:
        if isinstance(event, LoadProgress):
            if self._on_progress is not None:
                self._on_progress(event)
        elif isinstance(event, Loaded):
            self._listens = True
            if self._loading is not None and not self._loading.done():
                self._loading.set_result(event)
        elif isinstance(event, Failed) and not event.request_id:
            if self._loading is not None and not self._loading.done():
                self._loading.set_exception(reported(event))
        else:
            stream = self._streams.get(event.request_id)
            if stream is None:
                return
            if not isinstance(event, Started | Piece | Evaluated):
                del self._streams[event.request_id]
                stream.ended(event.request_id)
            stream.push(event)

    def _closed(self) -> None:
        self._drain()
        self.gone.set()
        self._fail_all()

    def _fail_all(self) -> None:
        if self._loading is not None and not self._loading.done():
            self._loading.set_exception(LoadFailed(f"the runner ended while it was loading the model{self._cause()}"))
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(self._died())

    def _died(self) -> RunnerDied:
        return RunnerDied(
            "model runner has unexpectedly stopped, this may be due to resource limitations or an internal error, "
            f"check the server logs for details{self._cause()}"
        )

    def _cause(self) -> str:
        code = self._exit_code
        if code is None:
            return ""
        if code < 0:
            try:
                return f" (ended by {signal.Signals(-code).name})"
            except ValueError:
                return f" (ended by signal {-code})"
        return f" (exit code {code})"

    # ---- in threads ----

    def _spawn(self) -> None:
        made = context()
        ours, theirs = made.Pipe()
        process = made.Process(target=_run, args=(theirs, self._hook), name="localrun-runner", daemon=True)  # type: ignore[attr-defined]
        with _starting:
            try:
                process.start()
            finally:
                theirs.close()
        self._connection = ours
        self._process = process
        for target in (self._read, self._write):
            thread = threading.Thread(target=target, name=f"runner {process.pid} {target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _read(self) -> None:
        assert self._connection is not None and self._process is not None
        try:
            while True:
                event = messages.decode_from_runner(self._connection.recv_bytes())
                self._inbox.append(event)
                # Set before the loop is called and cleared before it looks: one call may deliver many events, none is left behind.
                if not self._draining:
                    self._draining = True
                    self._loop.call_soon_threadsafe(self._drain)
        except (EOFError, OSError):
            pass
        except msgspec.ValidationError as error:
            log.error("runner %s sent what is no message: %s", self.pid, error)
            self._process.kill()
        except RuntimeError:
            return  # the event loop has ended, and with it everyone who could wait
        self._exit_code = _exit_code(self._process, EXIT_S)
        self._outbox.put(None)
        try:
            self._loop.call_soon_threadsafe(self._closed)
        except RuntimeError:
            return

    def _write(self) -> None:
        assert self._connection is not None
        while (frame := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(frame)
            except OSError:
                return  # the reader sees the same and tells everyone

    def _bury(self, process: BaseProcess) -> None:
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(EXIT_S + 1.0)
        if self._connection is not None and not any(thread.is_alive() for thread in self._threads):
            self._connection.close()
        if _exit_code(process, EXIT_S) is None:
            log.error("runner %s could not be ended", process.pid)


def _exit_code(process: BaseProcess, patience: float) -> int | None:
    """The code a process ended with, waited for. multiprocessing reads it from a pipe, once, and looks at every child whenever it starts
    another: hence the lock, and no join."""
    until = time.monotonic() + patience
    while True:
        with _starting:
            code = process.exitcode
        if code is not None or time.monotonic() > until:
            return code
        time.sleep(0.005)
