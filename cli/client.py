"""HTTP to the daemon: one request, one NDJSON stream, and every failure as one line. Knows the wire, not what is said over it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrun import __version__
from localrun.cli.environment import Address, api_key

if TYPE_CHECKING:
    import httpx

# httpx brings a program of its own where rich and click are installed: 40 ms of imports, at every start, that nobody needs
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 600.0
"""Longest wait for the next byte: a model of many gigabytes may load, or a long queue pass, before the first one."""
UPLOAD_CHUNK = 1 << 20
MAX_LINE = 64 * 1024 * 1024
"""A longer NDJSON line is no answer of a daemon."""

Json = dict[str, Any]


class CliError(Exception):
    """Anything that ends a command: `str(error)` is shown after "Error: ", the exit code is 1."""


class DaemonError(CliError):
    """The daemon answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 200 when the error came in a stream that had begun."""


class Unreachable(CliError):
    """Nobody listens, or the connection broke."""

    def __init__(self, message: str, *, refused: bool = False, silent: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        """Nobody took the connection: there may be no daemon, and nothing was sent."""
        self.silent = silent
        """Somebody took it and did not answer in time."""


class Client:
    """One connection pool to one daemon. A context manager; close it and streams that still run are cancelled by the daemon."""

    def __init__(self, where: Address, transport: httpx.BaseTransport | None = None) -> None:
        import httpx

        headers = {"User-Agent": f"localrun/{__version__}"}
        key = api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self.where = where
        # trust_env=False for this machine: a proxy from the environment must not see requests to loopback
        self._http = httpx.Client(
            base_url=where.url,
            headers=headers,
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            transport=transport,
            trust_env=not where.here,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, body: Json | None = None, timeout: float | None = None) -> Json:
        """The answer's JSON object ({} for an empty body). Raises DaemonError, Unreachable."""
        import httpx

        with self._mapped(timeout):
            response = self._http.request(method, path, json=body, timeout=httpx.USE_CLIENT_DEFAULT if timeout is None else timeout)
        if response.is_error:
            raise _refusal(response)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise CliError(f"{self.where.url}{path} answered with something that is no JSON object; is it localrun that listens there?")
        return answer

    def get(self, path: str, timeout: float | None = None) -> Json:
        return self.request("GET", path, timeout=timeout)

    def post(self, path: str, body: Json, timeout: float | None = None) -> Json:
        return self.request("POST", path, body, timeout)

    def upload(self, path: str, file: Path) -> None:
        """Sends a file's bytes as they are. Raises DaemonError, Unreachable."""
        with self._mapped(), file.open("rb") as content:
            response = self._http.post(path, content=iter(lambda: content.read(UPLOAD_CHUNK), b""))
        if response.is_error:
            raise _refusal(response)

    def send(self, path: str, chunks: Iterator[bytes]) -> Json:
        """Posts bytes as they come; the answer's JSON object. Raises DaemonError, Unreachable."""
        with self._mapped():
            response = self._http.post(path, content=chunks)
        if response.is_error:
            raise _refusal(response)
        answer: Json = response.json()
        return answer

    @contextmanager
    def receive(self, path: str, body: Json) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
        """Headers and bytes of an answer that is no JSON. Raises DaemonError, Unreachable."""
        with self._mapped(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield response.headers, response.iter_raw()

    @contextmanager
    def stream(self, path: str, body: Json) -> Iterator[Iterator[Json]]:
        """The objects of an NDJSON answer as they come. Leaving the block closes the connection, which cancels the request.

        Raises DaemonError (before the first object with its status, later with status 200), Unreachable.
        """
        with self._mapped(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield self._objects(response)

    def _objects(self, response: httpx.Response) -> Iterator[Json]:
        rest = b""
        for data in response.iter_bytes():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE:
                raise CliError(f"{self.where.url} sent a line of more than {MAX_LINE} bytes")
            for line in lines:
                if line.strip():
                    yield self._object(line)
        if rest.strip():
            yield self._object(rest)

    def _object(self, line: bytes) -> Json:
        try:
            item = json.loads(line)
        except ValueError:
            item = None
        if not isinstance(item, dict):
            raise CliError(f"{self.where.url} sent a line that is no JSON object; is it localrun that listens there?")
        if "error" in item:
            raise DaemonError(_message(item) or "unknown error", 200)
        return item

    @contextmanager
    def _mapped(self, timeout: float | None = None) -> Iterator[None]:
        """httpx's exceptions as ours. timeout: seconds of silence; None: as usual."""
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            raise Unreachable(f"cannot reach localrun at {self.where.url}: {_reason(error)}", refused=True) from None
        except httpx.ReadTimeout:
            seconds = SILENCE_SECONDS if timeout is None else timeout
            raise Unreachable(f"no answer from {self.where.url} for {seconds:g} seconds", silent=True) from None
        except httpx.TimeoutException:
            raise Unreachable(f"cannot reach localrun at {self.where.url}: timed out") from None
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            raise Unreachable(f"the connection to {self.where.url} broke: {_reason(error)}; did the daemon stop?") from None
        except httpx.HTTPError as error:
            raise Unreachable(f"request to {self.where.url} failed: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _message(item: object) -> str | None:
    """The text of either dialect's error object."""
    if isinstance(item, dict):
        error = item.get("error")
        if isinstance(error, str):
            return error
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
    return None


def _refusal(response: httpx.Response) -> DaemonError:
    """An error status as an exception: the message the daemon gave, else what can be said."""
    try:
        message = _message(response.json())
    except ValueError:
        message = None
    if message is None:
        text = response.text.strip().splitlines()
        request = response.request
        message = f"HTTP {response.status_code} for {request.method} {request.url.path}" + (f": {text[0][:200]}" if text else "")
    return DaemonError(message, response.status_code)
