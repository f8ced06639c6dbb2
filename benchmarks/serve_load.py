"""Several people at once: localrun's daemon and llama.cpp's server under the same requests, in one run.

    python benchmarks/serve_load.py MODEL.gguf [--only single,eight,shared,intruder,edit] [--threads 2] [--no-peer]

    single    one request: prompt of 128 tokens, answer of 64
    eight     eight of them at once
    shared    six prompts, one after the other, that begin with the same 1,500 tokens
    intruder  three answers are being written when a prompt of 2,000 tokens arrives
    edit      repeat a piece of code with one name changed, greedily: what speculation from the prompt is for

Both get the same token ids over POST /v1/completions, streamed, and write to the end of the length asked for. TTFT: to the first piece of
text; ITL: between pieces; TPOT: (end - first piece) / (tokens - 1); times in milliseconds. Servers have eight slots and the same context.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import host
import httpx
from peer import Peer, PeerError, add_option, end, find, free_port, wait_until_ready

SLOTS = 8
CONTEXT = 8 * 4096
NAME = "bench"
CODE = '''def total_price(items, tax_rate, discount=0.0):
    """Sum of the prices of all items, after the discount, with tax."""
    subtotal = 0.0
    for item in items:
        if item.quantity <= 0:
            raise ValueError(f"item {item.name} has quantity {item.quantity}")
        subtotal += item.price * item.quantity
    subtotal -= subtotal * discount
    return round(subtotal * (1.0 + tax_rate), 2)
'''
EDIT = "Repeat this code, with the variable subtotal renamed to amount:\n\n" + CODE * 2 + "\nThe code with the name changed:\n\n"

Heard = Callable[[int], None]


@dataclass
class Answer:
    """When the pieces of one streamed answer came, in seconds from when it was asked for."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:])]

    @property
    def tpot(self) -> float:
        return (self.pieces[-1] - self.pieces[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Server:
    """One side. `body`: what it must be told besides what both understand."""

    name: str
    address: str
    body: dict[str, Any]

    async def complete(self, http: httpx.AsyncClient, prompt: list[int] | str, n: int, on_piece: Heard | None = None) -> Answer:
        """An answer of n tokens. on_piece is told how many pieces have come. Raises RunError."""
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **self.body}
        answer = Answer(time.perf_counter())
        async with http.stream("POST", f"{self.address}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise host.RunError(f"{self.name}: HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                self._take(answer, json.loads(line[6:]))
                if on_piece is not None:
                    on_piece(len(answer.pieces))
        answer.ended = time.perf_counter()
        if not answer.pieces:
            raise host.RunError(f"{self.name}: an answer without text")
        return answer

    def _take(self, answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            raise host.RunError(f"{self.name}: {event['error']}")
        for choice in event.get("choices") or []:
            if choice.get("text"):
                answer.pieces.append(time.perf_counter())
                answer.text += choice["text"]
        if event.get("usage"):
            answer.tokens = int(event["usage"]["completion_tokens"])


def ids(n: int, seed: int) -> list[int]:
    """Token ids that every vocabulary here has, and no special ones."""
    source = random.Random(seed)
    return [source.randrange(1000, 30_000) for _ in range(n)]


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def figures(answers: list[Answer]) -> dict[str, str]:
    """Of requests that ran at the same time."""
    gaps = [gap for answer in answers for gap in answer.gaps]
    seconds = max(answer.ended for answer in answers) - min(answer.asked for answer in answers)
    return {
        "tokens/s": f"{sum(answer.tokens for answer in answers) / seconds:.1f}",
        "TTFT p50": ms(statistics.median(answer.ttft for answer in answers)),
        "TTFT max": ms(max(answer.ttft for answer in answers)),
        "TPOT p50": ms(statistics.median(answer.tpot for answer in answers)),
        "ITL p50": ms(percentile(gaps, 50)),
        "ITL p99": ms(percentile(gaps, 99)),
    }


# ---- workloads ----------------------------------------------------------------------------------------------------------------


async def single(server: Server, http: httpx.AsyncClient, seed: int) -> dict[str, str]:
    return figures([await server.complete(http, ids(128, seed), 64)])


async def eight(server: Server, http: httpx.AsyncClient, seed: int) -> dict[str, str]:
    return figures(list(await asyncio.gather(*[server.complete(http, ids(128, seed * 100 + i), 64) for i in range(SLOTS)])))


async def shared(server: Server, http: httpx.AsyncClient, seed: int) -> dict[str, str]:
    prefix = ids(1500, seed)
    answers = [await server.complete(http, prefix + ids(24, seed * 100 + i), 8) for i in range(6)]
    later = statistics.median(answer.ttft for answer in answers[1:])
    return {"TTFT first": ms(answers[0].ttft), "TTFT later": ms(later), "later/first": f"{later / answers[0].ttft:.1%}"}


async def intruder(server: Server, http: httpx.AsyncClient, seed: int) -> dict[str, str]:
    """The long prompt is sent when each stream has written 12 pieces; gaps from then until it has its first token count."""
    under_way = [asyncio.Event() for _ in range(3)]

    def heard(which: int) -> Heard:
        return lambda n: under_way[which].set() if n >= 12 else None

    streams = [asyncio.create_task(server.complete(http, ids(64, seed * 100 + i), 160, heard(i))) for i in range(3)]
    started = asyncio.gather(*[event.wait() for event in under_way])
    # An answer that fails before it is under way is not waited for.
    await asyncio.wait([started, *streams], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
    if not started.done():
        started.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await started
    long = await server.complete(http, ids(2000, seed), 8)
    answers = await asyncio.gather(*streams)
    during = [
        b - a for answer in answers for a, b in zip(answer.pieces, answer.pieces[1:]) if b > long.asked and a < long.pieces[0]
    ]  # fmt: skip
    return {
        "worst gap": ms(max(during, default=0.0)),
        "gap p50": ms(percentile(during, 50)) if during else "-",
        "long TTFT": ms(long.ttft),
        "gap before": ms(percentile([g for a in answers for g in a.gaps], 50)),
    }


async def edit(server: Server, http: httpx.AsyncClient, seed: int) -> dict[str, str]:
    answer = await server.complete(http, EDIT, 256)
    return {"tokens/s": f"{(answer.tokens - 1) / (answer.pieces[-1] - answer.pieces[0]):.1f}", "TTFT p50": ms(answer.ttft)}


WORKLOADS: dict[str, Callable[[Server, httpx.AsyncClient, int], Awaitable[dict[str, str]]]] = {
    "single": single, "eight": eight, "shared": shared, "intruder": intruder, "edit": edit,
}  # fmt: skip


# ---- servers ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def localrun(model: Path, threads: int) -> Iterator[Server]:
    """Our daemon on a free port with a store of its own, the model loaded."""
    with tempfile.TemporaryDirectory(prefix="localrun-load-", ignore_cleanup_errors=True) as folder:
        paths = [str(host.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        port = free_port()
        env = {
            **os.environ, "LOCALRUN_HOST": f"127.0.0.1:{port}", "LOCALRUN_MODELS": f"{folder}/models", "LOCALRUN_STATE": f"{folder}/state",
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        command = [sys.executable, "-m", "localrun", "serve"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/api/version", process)
            modelfile = Path(folder) / "Modelfile"
            modelfile.write_text(f"FROM {model.absolute()}\n", encoding="utf-8")
            host.run([sys.executable, "-m", "localrun", "create", NAME, "-f", modelfile], env)
            body = {"model": NAME, "options": {"ignore_eos": True, "num_thread": threads}}
            yield Server("localrun", f"http://127.0.0.1:{port}", body)
        finally:
            end(process)


@contextlib.contextmanager
def the_peer(peer: Peer, model: Path, threads: int) -> Iterator[Server]:
    with peer.server(model, threads=threads, slots=SLOTS, context=CONTEXT) as address:
        yield Server("llama.cpp", address, {"ignore_eos": True, "cache_prompt": True})


async def compare(servers: list[Server], workloads: list[str]) -> None:
    limits = httpx.Limits(max_connections=2 * SLOTS)
    async with httpx.AsyncClient(timeout=1800, trust_env=False, limits=limits) as http:
        for server in servers:
            await server.complete(http, ids(16, 0), 4)  # loads the model, compiles kernels
        for seed, name in enumerate(workloads, 1):
            print(f"{name}:", flush=True)
            for server in servers:
                found = await WORKLOADS[name](server, http, seed)
                print(f"  {server.name:<10}" + "   ".join(f"{key} {value}" for key, value in found.items()), flush=True)


def main() -> int:
    """Exit status 0, or 1 after a line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    add_option(parser)
    options = parser.parse_args()
    workloads = options.only.split(",")
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        parser.error(f"no such workload: {', '.join(unknown)}")
    try:
        with contextlib.ExitStack() as stack:
            print(f"machine: {host.describe()}\nmodel: {options.model.stem}, {options.threads} threads; times in milliseconds")
            servers = [stack.enter_context(localrun(options.model, options.threads))]
            if not options.no_peer:
                peer = find(options.peer_venv)
                print(f"peer: {peer.source}, {SLOTS} slots")
                servers.append(stack.enter_context(the_peer(peer, options.model, options.threads)))
            asyncio.run(compare(servers, workloads))
    except (PeerError, host.RunError, httpx.HTTPError) as error:
        print(f"Error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(f"load average at the end: {host.load_average()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
