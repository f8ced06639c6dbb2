"""Finds the daemon, and starts one when none listens on this machine. Knows how a process is detached on each platform; knows nothing
of what is asked of the daemon afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import localrun
from localrun.cli.client import Client, CliError, DaemonError, Json, Unreachable
from localrun.cli.environment import Address, address, for_daemon, state_folder

START_SECONDS = 180.0
"""A cold start on a slow, busy machine; a usual one takes about a second."""
POLL_SECONDS = 0.05
GREETING_SECONDS = (5.0, 5.0)
"""The time for an answer is over twice before whoever listens is taken for silent: the whole machine may have stood still meanwhile."""
LOG_NAME = "daemon.log"
LOG_LIMIT = 4 * 1024 * 1024
SERVER_NAME = "localrun"


def connect(where: Address | None = None, *, start: bool = True, say: Callable[[str], None] | None = None) -> Client:
    """A client of a daemon that answers. `start`: start one when nobody listens and the address is this machine's.

    `say` gets a line when a daemon is being started. Raises CliError.
    """
    where = where or address()
    client = Client(where)
    try:
        if not _answers(client):
            if not where.here:
                raise Unreachable(f"nobody answers at {where.url}; is localrun running there?")
            if not start:
                raise Unreachable(f"localrun is not running at {where.url} (start it: localrun serve)", refused=True)
            _start_once(client, say or (lambda text: None))
    except BaseException:
        client.close()
        raise
    return client


def _answers(client: Client) -> bool:
    """Whether a daemon listens. Raises CliError when what listens cannot be talked to."""
    try:
        version = _greeted(client)
    except DaemonError as error:
        if error.status in (401, 403):
            raise
        raise CliError(_taken(client.where, f"HTTP {error.status}")) from None
    except Unreachable as error:
        if error.refused:
            return False
        raise CliError(_taken(client.where, str(error))) from None
    except CliError:
        raise CliError(_taken(client.where, "no JSON")) from None
    if version.get("server") != SERVER_NAME and not client.where.explicit:
        raise CliError(
            f"another program, probably Ollama {version.get('version', '')}, listens at {client.where.url}. Stop it, or give localrun an "
            f"address of its own: LOCALRUN_HOST=127.0.0.1:{client.where.port + 1}. (Set it to this one to use that program.)"
        )
    return True


def _greeted(client: Client) -> Json:
    """What it says of its version. Raises what Client.get raises."""
    first, second = GREETING_SECONDS
    try:
        return client.get("/api/version", timeout=first)
    except Unreachable as error:
        if not error.silent:
            raise
        return client.get("/api/version", timeout=second)


def _taken(where: Address, what: str) -> str:
    return (
        f"what listens at {where.url} is not localrun (it answered: {what}). Stop it, or give localrun an address of its own: "
        f"LOCALRUN_HOST=127.0.0.1:{where.port + 1}"
    )


def _start_once(client: Client, say: Callable[[str], None]) -> None:
    """Starts a daemon, one at a time however many of us try: the others wait, and find it running."""
    import filelock

    folder = state_folder()
    lock = filelock.FileLock(folder / f"start-{client.where.port}.lock")
    try:
        with lock.acquire(timeout=START_SECONDS):
            if not _answers(client):
                say("starting localrun")
                _start(client, folder)
    except filelock.Timeout:
        raise CliError(f"another localrun has been starting the daemon for {START_SECONDS:.0f} seconds; see {folder / LOG_NAME}") from None


def _start(client: Client, folder: Path) -> None:
    """Starts a detached daemon and waits until it answers. Raises CliError naming the log when it does not."""
    log_path = folder / LOG_NAME
    if log_path.exists() and log_path.stat().st_size > LOG_LIMIT:
        log_path.replace(log_path.with_suffix(".old.log"))
    with log_path.open("ab") as log:
        before = log.tell()
        process = _detached(daemon_command(), folder, log.fileno())
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if _answers(client):
            # it is meant to go on without us: no complaint at exit that it was not waited for
            process.returncode = 0
            return
        if process.poll() is not None and not _answers(client):
            raise CliError(f"the daemon did not start: {_last_words(log_path, before)} (log: {log_path})")
        time.sleep(POLL_SECONDS)
    process.terminate()
    raise CliError(f"the daemon did not answer within {START_SECONDS:.0f} seconds (log: {log_path})")


def daemon_command() -> list[str]:
    """-P: the folder it happens to start in is not searched for modules."""
    return [sys.executable, "-P", "-m", "localrun", "serve"]


def _detached(command: list[str], folder: Path, log: int) -> subprocess.Popen[bytes]:
    """A process that outlives this one and its terminal, and that a Ctrl-C typed there does not reach."""
    attempts = [0]
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        # a terminal that ends its job with itself would take the daemon along; not every job lets a process leave
        attempts = [flags | subprocess.CREATE_BREAKAWAY_FROM_JOB, flags]
    for flags in attempts:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=for_daemon(Path(localrun.__file__).resolve().parent.parent),
                start_new_session=True,
                creationflags=flags,
            )
        except OSError as error:
            failure = error
    raise CliError(f"the daemon could not be started: {failure}")


def _last_words(log: Path, start: int) -> str:
    """The last line the daemon wrote: the clear one, as a rule."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    return lines[-1].removeprefix("Error: ")[:500] if lines else "it ended without a word"
