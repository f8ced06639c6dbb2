"""/metrics as Prometheus reads it, and the line that each request leaves in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon import serving
from tests.daemon.serving import Daemon
from tests.daemon.test_lifetimes import wait_until

HI = [{"role": "user", "content": "hi"}]


def figures(running: Daemon) -> dict[str, float]:
    """Every sample by name, labels other than the model's in braces."""
    response = running.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name not in ("model_name", "le"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
            if "model_name" in sample.labels:
                assert sample.labels["model_name"] == "tiny:latest"
    return found


def test_figures_of_answers(tmp_path: Path) -> None:
    with serving.daemon(tmp_path) as running:
        assert figures(running)["localrun:models_loaded"] == 0
        first = running.http.post("/api/chat", json={"model": "tiny", "messages": HI, "stream": False}).json()
        second = running.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 2}).json()
        running.http.post("/api/chat", json={"model": "none", "messages": HI})
        found = figures(running)
        assert found["localrun:models_loaded"] == 1
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        prompts = first["prompt_eval_count"] + second["usage"]["prompt_tokens"]
        answers = first["eval_count"] + second["usage"]["completion_tokens"]
        assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == prompts
        assert found["vllm:generation_tokens_total"] == answers
        assert found["vllm:prefix_cache_hits_total"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found["vllm:request_success_total{finished_reason=stop}"] == found["vllm:request_success_total{finished_reason=length}"] == 1
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                     "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
                     "request_time_per_output_token_seconds"):  # fmt: skip
            assert found[f"vllm:{name}_count"] == 2, name
        assert 0 < found["vllm:inter_token_latency_seconds_count"] < answers
        assert found["localrun:model_load_seconds_count"] == 1
        assert found["localrun:request_failures_total{code=model_not_found}"] == 1
        assert found["vllm:kv_cache_usage_perc"] == 0 < found["localrun:kv_cache_reusable_ratio"] < 1
        assert found["localrun:forward_seconds"] > 0 == found["vllm:num_preemptions_total"]
        running.http.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
        wait_until(lambda: "vllm:kv_cache_usage_perc" not in figures(running))


def test_figures_of_what_breaks_off(tmp_path: Path) -> None:
    with serving.daemon(tmp_path, serving.load_crashing) as running:
        running.http.post("/api/chat", json={"model": "tiny", "messages": HI, "stream": False})
        found = figures(running)
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert found["localrun:request_failures_total{code=runner_died}"] == 1
        wait_until(lambda: figures(running)["localrun:models_loaded"] == 0)


def test_a_request_leaves_one_line(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="localrun.requests")
    secret = "a very private question"
    response = daemon.http.post("/api/chat", json={"model": "tiny", "messages": [{"role": "user", "content": secret}], "stream": False})
    daemon.http.get("/api/version")
    daemon.http.request("GET", "/v1/models/a%22b%20c")

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "localrun.requests"]

    wait_until(lambda: len(lines()) >= 2)
    chat, missing = lines()
    fields = dict(part.split("=", 1) for part in chat.split(" "))
    assert fields["id"] == response.headers["x-request-id"]
    assert (fields["method"], fields["path"], fields["status"], fields["model"]) == ("POST", "/api/chat", "200", "tiny:latest")
    assert fields["reason"] == "stop" and int(fields["completion_tokens"]) == response.json()["eval_count"]
    for name in ("seconds", "load_s", "queue_s", "ttft_s", "tpot_s"):
        assert float(fields[name]) >= 0
    assert secret not in caplog.text
    # what a client sends cannot be taken for a field
    assert 'path="/v1/models/a\\"b c"' in missing
