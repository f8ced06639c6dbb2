"""A model with recurrent state behind the API: prefixes are found again, memory is told."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests import fakes
from tests.daemon import serving


@pytest.mark.parametrize("pure", [False, True])
def test_prompts_are_found_again_and_memory_is_told(tmp_path: Path, pure: bool) -> None:
    loader = functools.partial(fakes.load_scripted, reply="so it goes on and on", state_bytes=1024, pure=pure)
    with serving.daemon(tmp_path, loader) as running:

        def cached(prompt: str) -> tuple[int, str]:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "seed": 1}
            reply = running.http.post("/v1/completions", json=body).json()
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["text"]

        prompt = "abcdefghij" * 20
        (first, text), (second, again) = cached(prompt), cached(prompt)
        assert first == 0 and second == 192
        assert text == again
        assert cached(prompt + text)[0] > 200, "from the end of the answer"
        (used,) = running.loaded()
        assert used["state_bytes"] == 256 * 1024
        snapshots = used["engine"]["state_snapshots"]
        assert snapshots > 1 and used["engine"]["state_snapshots_evicted"] == 0
        assert used["state_bytes_in_use"] == snapshots * 1024
        assert used["size"] == used["weight_bytes"] + used["kv_bytes_in_use"] + used["state_bytes_in_use"]
        assert (used["kv_bytes"] == 0) == pure


def test_other_models_say_nothing_of_state(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        running.http.post("/api/generate", json={"model": "tiny"})
        (used,) = running.loaded()
        assert not any("state" in key for key in [*used, *used["engine"]])
