"""Hundreds of mixed requests over HTTP, many of them given up half-way: what became of each, and whether anything is left behind.

    python benchmarks/soak.py MODEL.gguf [--requests 500] [--at-once 12] [--seed 1] [--threads 2]

A daemon of its own serves them: chats, completions and raw prompts, streamed and whole, of any length and with any options, some with a
form that the answer must have, several answers, log-probabilities or vectors, some that must be refused. A fifth are cancelled by closing
the connection after a random time. Afterwards nothing may run or wait, no KV block be held; a second, smaller round shows whether memory
still grows. Exit status 1 when an answer was neither complete, cancelled nor refused with a reason, or anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import host
import httpx
import psutil
from peer import PeerError
from serve_load import NAME, Server, localrun

LINE = "the river keeps its old stones while a boat of paper turns around lanterns and the children count slowly from one to nine"
WORDS = LINE.split()
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}}, "required": ["name", "n"]}
GROWTH = 0.05
"""Of the memory after the first round, what the second may add."""
PATIENCE_S = 60.0


def text(rng: random.Random, most: int) -> str:
    """Up to so many words; half of all texts begin alike, so that the prefix tree has its work."""
    shared = WORDS * 8 if rng.random() < 0.5 else []
    return " ".join([*shared, *rng.choices(WORDS, k=rng.randint(1, most))])


def options(rng: random.Random) -> dict[str, Any]:
    """For `options` of the Ollama endpoints."""
    return {
        "num_predict": rng.choice([1, 8, 30, 80]),
        "seed": rng.randrange(100),
        **rng.choice(
            [
                {}, {"temperature": 0}, {"top_k": 0, "top_p": 1.0}, {"min_p": 0.1, "typical_p": 0.8}, {"mirostat": 2},
                {"repeat_penalty": 1.3}, {"dry_multiplier": 0.8, "xtc_probability": 0.5}, {"stop": ["the", "\n"]},
                {"num_ctx": 256, "num_predict": 400},
                {"num_ctx": 128, "num_predict": 200}, {"banned_strings": ["river", "stone"]},
                {"draft_num_predict": 0}, {"ignore_eos": True},
            ]
        ),
    }  # fmt: skip


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    kind = rng.choices(["chat", "generate", "openai", "schema", "several", "vectors", "refused"], [30, 20, 20, 10, 5, 5, 10])[0]
    stream = rng.random() < 0.7
    messages = [{"role": "user", "content": text(rng, 60)}]
    if rng.random() < 0.3:
        messages = [{"role": "system", "content": text(rng, 20)}, *messages, {"role": "assistant", "content": "yes"}, *messages]
    fields: dict[str, Any] = rng.choice([{}, {}, {"priority": 1}, {"overflow": "sinks"}, {"overflow": "shift"}])
    ollama = {"model": NAME, "stream": stream, "options": options(rng), **fields}
    openai = {"model": NAME, "stream": stream, "max_tokens": rng.randint(1, 60), "seed": rng.randrange(100), "messages": messages}
    if kind == "chat":
        return "/api/chat", {**ollama, "messages": messages}
    if kind == "generate":
        return "/api/generate", {**ollama, "prompt": text(rng, 200), "raw": rng.random() < 0.5}
    if kind == "schema":
        return "/api/chat", {**ollama, "messages": messages, "format": rng.choice(["json", SCHEMA])}
    if kind == "several":
        return "/v1/chat/completions", {**openai, "n": rng.randint(2, 4), "logprobs": True, "top_logprobs": 3}
    if kind == "vectors":
        return "/api/embed", {"model": NAME, "input": [text(rng, 30) for _ in range(rng.randint(1, 5))]}
    if kind == "refused":
        faults: list[dict[str, Any]] = [{"temperature": "warm"}, {"max_tokens": -3}, {"model": "nobody"}, {"messages": []}, {"top_p": 7}]
        return "/v1/chat/completions", {**openai, **rng.choice(faults)}
    return "/v1/chat/completions", {**openai, "logprobs": rng.random() < 0.2, "temperature": rng.random() * 1.5}


async def asked(server: Server, http: httpx.AsyncClient, rng: random.Random) -> str:
    """How one request ended."""
    path, body = request(rng)
    patience = rng.random() * 3 if rng.random() < 0.2 else None
    try:
        async with asyncio.timeout(patience):
            return await ended(server, http, path, body)
    except TimeoutError:
        return "cancelled"


async def ended(server: Server, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    """Reads an answer to its end."""
    async with http.stream("POST", server.address + path, json=body) as response:
        content = (await response.aread()).decode()
        if response.status_code != 200:
            reason = json.loads(content).get("error")
            said = str(reason["message"] if isinstance(reason, dict) else reason)[:50]
            return f"refused with {response.status_code}: {said}" if reason else f"BAD: status {response.status_code} without a reason"
    if path == "/api/embed":
        return "complete" if json.loads(content)["embeddings"] else "BAD: no vectors"
    if path.startswith("/api"):
        last = json.loads(content.strip().splitlines()[-1])
        if "error" in last:
            return f"error: {last['error'][:60]}"
        return "complete" if last.get("done") and last.get("done_reason") in ("stop", "length") else f"BAD: ends with {content[-80:]!r}"
    if not body["stream"]:
        return "complete" if all(c["finish_reason"] for c in json.loads(content)["choices"]) else "BAD: no finish_reason"
    if '"error"' in content:
        return f"error: {content[-100:]!r}"
    return "complete" if content.rstrip().endswith("[DONE]") else f"BAD: ends with {content[-80:]!r}"


async def one_round(server: Server, http: httpx.AsyncClient, n: int, at_once: int, seed: int) -> collections.Counter[str]:
    """n requests, at most at_once of them at a time; how many ended how."""
    gate = asyncio.Semaphore(at_once)

    async def guarded(i: int) -> str:
        async with gate:
            return await asked(server, http, random.Random(seed * 100_003 + i))

    return collections.Counter(await asyncio.gather(*[guarded(i) for i in range(n)]))


async def at_rest(server: Server, http: httpx.AsyncClient) -> dict[str, Any]:
    """How the model stands, as /api/ps has it, when nothing is asked of it any more. Raises RunError when it does not come to rest."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = (await http.get(server.address + "/api/ps")).json()["models"]
        engine = found[0]["engine"] if found else {}
        if found and not (engine["running"] or engine["waiting"] or engine["kv_tokens_held"]):
            return dict(found[0])
        if time.monotonic() > until:
            raise host.RunError(f"left behind: {engine or 'no model'}")
        await asyncio.sleep(0.2)


def memory() -> int:
    """Bytes of the daemon's and the runner's own, of all that this process has started."""
    return sum(child.memory_full_info().uss for child in psutil.Process().children(recursive=True))


async def soak(server: Server, asked_for: argparse.Namespace) -> bool:
    """Whether all went well."""
    limits = httpx.Limits(max_connections=2 * asked_for.at_once)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as http:
        body = {"model": NAME, "prompt": "hello", "stream": False, "options": {"num_predict": 4, "num_thread": asked_for.threads}}
        (await http.post(server.address + "/api/generate", json=body)).raise_for_status()
        sizes, ends = [memory()], collections.Counter[str]()
        for part, n in enumerate((asked_for.requests, asked_for.requests // 2)):
            began = time.perf_counter()
            found = await one_round(server, http, n, asked_for.at_once, asked_for.seed + part)
            model = await at_rest(server, http)
            sizes.append(memory() - model["kv_bytes_in_use"])
            ends += found
            engine = {key: value for key, value in model["engine"].items() if key != "near_misses"}
            print(f"{n} requests in {time.perf_counter() - began:.0f} s; at rest: {json.dumps(engine)}", flush=True)
    for end, count in sorted(ends.items(), key=lambda item: -item[1]):
        print(f"{count:5}  {end}")
    print("memory, MiB: " + ", ".join(f"{size / 2**20:.0f}" for size in sizes) + " (loaded, after each round; without the prefix cache)")
    bad = sum(count for end, count in ends.items() if end.startswith("BAD"))
    grown = sizes[2] > sizes[1] * (1 + GROWTH)
    print(f"{bad} answers without an end or a reason; memory {'still grows' if grown else 'has stopped growing'}")
    return not bad and not grown


def main() -> int:
    """Exit status 0, or 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print(f"machine: {host.describe()}\nmodel: {given.model.stem}, seed {given.seed}")
    try:
        with localrun(given.model, given.threads) as server:
            return 0 if asyncio.run(soak(server, given)) else 1
    except (PeerError, host.RunError, httpx.HTTPError) as error:
        print(f"Error: {error or type(error).__name__}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
