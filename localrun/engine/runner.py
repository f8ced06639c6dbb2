"""The runner process: one model, one pipe. First frame Load, then messages.py in both directions until Shutdown or the pipe's end.

Two threads. The reader takes frames, answers what needs no model (Tokenize, Detokenize, Render) and turns requests into jobs; the main
thread steps the engine while there is work and otherwise waits for the reader, using no CPU. When the daemon dies, the pipe closes and the
process ends. Knows the pipe and the order of a life; what happens in a step is step.py's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from localrun import messages
from localrun.engine.beams import BeamSearch
from localrun.engine.drafting import Drafter
from localrun.engine.images import ImageDesk, Withdrawn
from localrun.engine.intake import Intake
from localrun.engine.jobs import Job
from localrun.engine.memory import available_memory, blocks_without_kv, kv_budget, state_slots
from localrun.engine.parts import Loader, Parts, as_localrun_error, resolve_loader
from localrun.engine.sessions import SessionStore, root_key
from localrun.engine.step import Engine
from localrun.engine.texts import TextIntake
from localrun.engine.vectors import Batch
from localrun.errors import LoadFailed, LocalrunError
from localrun.messages import (
    Cancel,
    Detokenize,
    Embed,
    Evaluate,
    Failed,
    FromRunner,
    Generate,
    Inspect,
    Load,
    Loaded,
    LoadProgress,
    Rank,
    Render,
    Shutdown,
    Tokenize,
    ToRunner,
)
from localrun.models.model import BLOCK_TOKENS

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""After so long without work, once, what the first request with a grammar would wait for is made, and after so long again tile shapes are
timed."""
TUNING_S = 0.02
"""How long a request may have to wait for that."""
PREPARING_S = 5.0
"""How long the end of a runner waits for that."""
READER_S = 5.0
"""How long it waits for the reader thread, which may be tokenizing."""
SWITCH_S = 0.001
"""Between two threads that both have Python to run: the engine takes up the interpreter several times a step, and streams shall not wait
Python's own 5 ms each time while a prompt is tokenized, or a vocabulary made, in another thread."""


class DaemonGone(Exception):
    """Nobody is at the other end of the pipe."""


class Pipe:
    """Whole messages over a connection; any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: FromRunner) -> None:
        """Raises DaemonGone."""
        frame = messages.encode(message)
        try:
            with self._sending:
                self._connection.send_bytes(frame)
        except (OSError, ValueError) as error:
            raise DaemonGone from error

    def receive(self) -> ToRunner:
        """Raises DaemonGone; msgspec.DecodeError for a frame that is no message."""
        try:
            frame = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise DaemonGone from error
        except TypeError as error:  # what a connection raises that another thread closes between a frame's length and the frame
            if not self._connection.closed:
                raise
            raise DaemonGone from error
        return messages.decode_to_runner(frame)

    def stop_receiving(self) -> None:
        """A thread in `receive` gets DaemonGone; what has been sent still arrives, and more can be sent. Windows has named pipes, whose
        readers nothing wakes: there it stays where it is."""
        if sys.platform != "win32":
            with socket.socket(fileno=os.dup(self._connection.fileno())) as same, contextlib.suppress(OSError):  # the daemon may be gone
                same.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Nobody may be in `receive`: the number of the closed connection can be that of another one before it reads."""
        self._connection.close()


def main(connection: Connection, load: Loader | str | None = None) -> None:
    """The runner's whole life. `load` makes the model's parts: by default from the file; a function or `"package.module:function"`
    otherwise.

    Returns when told to, when loading failed (which is reported), or when the daemon is gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; only the daemon decides what it means
    pipe = Pipe(connection)
    try:
        first = pipe.receive()
        if not isinstance(first, Load):
            raise LoadFailed(f"a runner's first message must be load, not {type(first).__name__}")
        with _listening(pipe) as ready:
            _serve(pipe, first, resolve_loader(load), ready)
    except DaemonGone:
        pass
    except Exception as error:
        _report_failure(pipe, "", as_localrun_error(error, "loading"))
    finally:
        pipe.close()


@contextlib.contextmanager
def _listening(pipe: Pipe) -> Iterator[Future[Runner]]:
    """The reader thread, while the block lasts. It hands messages to the runner that the block sets."""
    ready: Future[Runner] = Future()
    reader = threading.Thread(target=_listen, args=(pipe, ready), name="reader", daemon=True)
    reader.start()
    try:
        yield ready
    finally:
        ready.cancel()  # no runner came: a message that waits for it waits in vain
        pipe.stop_receiving()
        reader.join(READER_S)


def _serve(pipe: Pipe, load: Load, loader: Loader, ready: Future[Runner]) -> None:
    began = time.monotonic()
    sys.setswitchinterval(SWITCH_S)
    parts = loader(load, lambda stage, done, total: pipe.send(LoadProgress(stage=stage, done=done, total=total)))
    runner: Runner | None = None
    try:
        n_blocks, n_slots = _allocate(parts, load)
        sessions = _sessions(parts, load)
        runner = Runner(pipe, parts, n_blocks, load.max_queue, n_slots, sessions)
        models = [parts.model.info, *([parts.draft.info] if parts.draft is not None else [])]
        info = parts.model.info
        ready.set_result(runner)  # first: whoever has heard of it may send the next message at once
        pipe.send(
            Loaded(
                architecture=info.architecture,
                n_ctx_train=info.n_ctx_train,
                n_vocab=info.n_vocab,
                kv_tokens=n_blocks * BLOCK_TOKENS,
                weight_bytes=sum(one.weight_bytes for one in models),
                kv_bytes=n_blocks * sum(one.kv_bytes_per_block for one in models),
                state_bytes=n_slots * info.state_bytes,
                packed=info.packed,
                isa=info.isa,
                num_thread=info.n_threads,
                num_thread_batch=info.n_threads_batch or info.n_threads,
                has_template=not parts.template.fallback,
                capabilities=parts.capabilities,
                load_s=time.monotonic() - began,
                n_embd=info.n_embd,
                n_layers=info.n_layers,
                gpu_layers=info.gpu_layers,
                gpu_bytes=info.gpu_bytes,
                gpu_note=info.gpu_note,
                cards=info.cards,
            )
        )
        gc.freeze()  # what has been loaded stays; no collection has to look at it again
        try:
            runner.run()
        finally:
            if sessions is not None:
                sessions.close()
    finally:
        parts.model.close()
        if parts.draft is not None:
            parts.draft.close()
        if parts.encoder is not None and runner is None:
            parts.encoder.close()


def _sessions(parts: Parts, load: Load) -> SessionStore | None:
    """Where K/V of conversations are kept; None: nowhere. Only a model whose file is known by its digest has a place there."""
    info = parts.model.info
    if not load.session_dir or not load.session_bytes or not load.digest or info.state_bytes:
        return None
    # Of all layers, wherever they lie: what is kept goes on with another split.
    size = info.kv_bytes_per_block + info.gpu_kv_bytes_per_block
    if not size:
        return None
    root = root_key(load.digest, load.kv_cache_type, size, info.n_ctx_train)
    return SessionStore(Path(load.session_dir), root, BLOCK_TOKENS, load.session_bytes)


def _allocate(parts: Parts, load: Load) -> tuple[int, int]:
    """Reserves the KV pool, the draft model's with as many blocks, and the slots of recurrent state; the numbers of blocks and slots.

    Raises LoadFailed.
    """
    info = parts.model.info
    models = [parts.model, *([parts.draft] if parts.draft is not None else [])]
    per_block = sum(model.info.kv_bytes_per_block for model in models)
    budget = kv_budget(available_memory(), load.kv_budget, per_block, BLOCK_TOKENS, info.n_ctx_train)
    n_slots = state_slots(available_memory(), load.kv_budget, info.state_bytes, pure=not info.kv_bytes_per_block)
    if per_block:
        n_blocks = (budget - n_slots * info.state_bytes if load.kv_budget else budget) // per_block
    else:
        n_blocks = blocks_without_kv(BLOCK_TOKENS, info.n_ctx_train)
    if info.kv_blocks:
        n_blocks = min(n_blocks, info.kv_blocks)
    if n_blocks < 1:
        raise LoadFailed(f"the KV cache needs at least {per_block + n_slots * info.state_bytes} bytes, kv_budget allows {budget}")
    try:
        for model in models:
            model.allocate_kv(n_blocks)
        if n_slots:
            parts.model.allocate_state(n_slots)
    except MemoryError:
        raise LoadFailed(f"not enough memory for a KV cache of {n_blocks * per_block + n_slots * info.state_bytes >> 20} MiB") from None
    return n_blocks, n_slots


def _listen(pipe: Pipe, ready: Future[Runner]) -> None:
    """The reader thread: hands messages to the runner once there is one, and lets it know of the pipe's end. While the model still loads,
    nobody could heed that, and there is nothing to finish: the process ends at once. When loading has failed it just ends."""
    try:
        while True:
            try:
                message = pipe.receive()
            except msgspec.DecodeError as error:
                log.error("a frame that is no message: %s", error)
                continue
            if isinstance(message, Shutdown) and not ready.done():
                break
            ready.result().handle(message)
            if isinstance(message, Shutdown):
                return
    except (DaemonGone, CancelledError):
        pass
    if ready.cancelled():
        return
    if ready.done():
        ready.result().handle(Shutdown())
    elif multiprocessing.parent_process() is not None:
        os._exit(0)


def _report_failure(pipe: Pipe, request_id: str, error: LocalrunError) -> None:
    try:
        pipe.send(Failed(request_id=request_id, code=error.code, message=str(error), param=error.param))
    except DaemonGone:
        log.warning("nobody to report to: %s", error)


def _request_id(message: Load | Generate | Embed | Rank | Render | Tokenize | Detokenize | Evaluate) -> str:
    match message:
        case Load():
            return ""
        case Render():
            return message.request.request_id
        case _:
            return message.request_id


class Runner:
    """The loop around an engine. `run` returns on Shutdown and when the daemon is gone."""

    def __init__(
        self, pipe: Pipe, parts: Parts, n_blocks: int, max_queue: int, n_slots: int = 0, sessions: SessionStore | None = None
    ) -> None:
        self._pipe = pipe
        drafter = Drafter(parts.draft, n_blocks, parts.model.info.n_vocab) if parts.draft is not None else None
        self.engine = Engine(
            parts.model,
            n_blocks,
            pipe.send,
            n_slots=n_slots,
            say=lambda ids: repr(self._intake.text(ids)),
            max_waiting=max_queue,
            drafter=drafter,
            sessions=sessions,
        )
        self._intake = Intake(parts, n_blocks * BLOCK_TOKENS, self.engine.adapters, keeps_sessions=sessions is not None)
        self._texts = TextIntake(parts, n_blocks * BLOCK_TOKENS)
        self._preparing: threading.Thread | None = None
        """Uses the first quiet moment."""
        self._tuning = True
        """Whether there may be something left to time."""
        self._desk = ImageDesk(parts.encoder, lambda job: self._inbox.put(job), max_queue) if parts.encoder is not None else None
        self._inbox: queue.SimpleQueue[Job | Withdrawn | Batch | BeamSearch | Cancel | Inspect | Shutdown] = queue.SimpleQueue()

    def run(self) -> None:
        """Raises DaemonGone when an event cannot be sent."""
        try:
            while self._take_messages():
                self.engine.step()
        finally:
            if self._desk is not None:
                self._desk.close()
            if self._preparing is not None:
                self._preparing.join(PREPARING_S)

    def _take_messages(self) -> bool:
        """Handles what has come; waits for something when there is no work. False: the end."""
        while True:
            idle = not self.engine.has_work
            try:
                message = self._inbox.get(block=idle, timeout=IDLE_S if self._tuning else None)
            except queue.Empty:
                if not idle:
                    return True
                self._use_idleness()
                continue
            if isinstance(message, Shutdown):
                return False
            if isinstance(message, Cancel):
                self.engine.cancel(message.request_id)
            elif isinstance(message, Inspect):
                self._pipe.send(self.engine.inspected(message.request_id))
            elif isinstance(message, Withdrawn):
                self.engine.withdraw(message.job, message.error)
            else:
                self._submit(message)

    def _use_idleness(self) -> None:
        """Nobody has asked for anything for a while."""
        if self._preparing is None:
            # Beside the engine: who asks for something meanwhile does not wait for it.
            self._preparing = threading.Thread(target=self._intake.prepare, name="preparing", daemon=True)
            self._preparing.start()
            return
        if self._preparing.is_alive():
            return
        while self._tuning and self._inbox.empty():
            self._tuning = self.engine.model.tune(TUNING_S)

    def _submit(self, work: Job | Batch | BeamSearch) -> None:
        request_id = work.request_id if isinstance(work, Batch | BeamSearch) else work.seq.request_id
        try:
            if isinstance(work, Batch):
                self.engine.submit_batch(work)
            elif isinstance(work, BeamSearch):
                self.engine.submit_search(work)
            else:
                self.engine.submit(work)
        except LocalrunError as error:
            _report_failure(self._pipe, request_id, error)

    def handle(self, message: ToRunner) -> None:
        """In the reader thread: answers what needs no model, and hands the rest to the loop. Raises DaemonGone."""
        if isinstance(message, Cancel) and self._desk is not None and self._desk.cancel(message.request_id):
            return
        if isinstance(message, Cancel | Inspect | Shutdown):
            self._inbox.put(message)
            return
        try:
            answer = self._answered(message)
        except DaemonGone:
            raise
        except Exception as error:
            request_id = _request_id(message)
            _report_failure(self._pipe, request_id, as_localrun_error(error, f"request {request_id}"))
            return
        if answer is not None:
            self._pipe.send(answer)

    def _pass_on(self, job: Job) -> None:
        """To the engine, by way of the images' desk where there are some."""
        if self._desk is None or not job.seq.images:
            self._inbox.put(job)
            return
        try:
            self._desk.submit(job)
        except LocalrunError as error:
            self._inbox.put(Withdrawn(job, error))

    def _answered(self, message: Load | Generate | Embed | Rank | Render | Tokenize | Detokenize | Evaluate) -> FromRunner | None:
        """The answer, or None when it will come from the engine."""
        match message:
            case Generate():
                many = message.num_beams != 1 and message.max_tokens != 0
                if many:
                    self._inbox.put(self._intake.search(message))
                else:
                    self._pass_on(self._intake.generation(message))
            case Evaluate():
                self._inbox.put(self._intake.evaluation(message))
            case Embed():
                self._inbox.put(self._texts.embedding(message))
            case Rank():
                self._inbox.put(self._texts.ranking(message))
            case Render():
                return self._intake.rendered(message)
            case Tokenize():
                return self._intake.tokenized(message)
            case Detokenize():
                return self._intake.detokenized(message)
            case Load():
                raise LocalrunError("this runner has a model already")
        return None
