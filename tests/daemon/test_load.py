"""Many clients at once: nothing is lost, mixed up or out of order, and nobody else waits long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.daemon.serving import Daemon

CLIENTS = 200


async def stream(client: httpx.AsyncClient, i: int) -> tuple[str, list[dict[str, Any]]]:
    path, text = ("/api/chat", f"number {i}") if i % 2 else ("/v1/chat/completions", f"zahl {i}")
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": True}
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line and line != "data: [DONE]"]
    found: list[dict[str, Any]] = [json.loads(line.removeprefix("data: ")) for line in lines]
    return text, found


def test_two_hundred_streams(daemon: Daemon) -> None:
    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=120, limits=limits) as client:
            streams = [asyncio.create_task(stream(client, i)) for i in range(CLIENTS)]
            answered = 0
            while not all(task.done() for task in streams):
                assert (await client.get("/api/version")).status_code == 200
                answered += 1
                await asyncio.sleep(0.02)
            assert answered > 3  # others were answered while the streams went on
            for text, found in await asyncio.gather(*streams):
                if "message" in found[0]:
                    said = "".join(one["message"]["content"] for one in found)
                    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
                else:
                    choices = [one["choices"][0] for one in found]
                    said = "".join(choice["delta"].get("content") or "" for choice in choices)
                    assert len({one["id"] for one in found}) == 1
                    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
                assert said == f'You said "{text}".'

    asyncio.run(all_of_them())
    (loaded,) = daemon.loaded()
    assert loaded["requests"] == loaded["running"] == 0
