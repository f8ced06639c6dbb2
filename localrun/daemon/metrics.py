"""What /metrics tells Prometheus.

Names and buckets are vLLM's where it has the same figure (`vllm:...`, so that dashboards made for it work), `localrun:...` for the rest.
Counts what passes through the daemon; knows nothing of what happens inside a runner but what runners say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from localrun.messages import Finished, Inspected, Started

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """The daemon's figures. Used in the event loop only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._inspected: set[str] = set()
        ProcessCollector(registry=self._registry)
        self._running = self._gauge("vllm:num_requests_running", "Requests that are being answered.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that a runner has and has not begun.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival in the runner to the first token.", _FIRST)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between one piece of an answer and the next.", _BETWEEN)
        self._per_token = self._histogram("vllm:request_time_per_output_token_seconds", "Mean time of a token after the first.", _BETWEEN)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival in the daemon to the end of the answer.", _WHOLE)
        self._queued = self._histogram("vllm:request_queue_time_seconds", "Waiting in the runner.", _WHOLE)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Reading the prompt.", _WHOLE)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Writing the answer.", _WHOLE)
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_sizes = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts, cached ones included.")
        self._answer_tokens = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self._asked = self._counter("vllm:prefix_cache_queries", "Tokens that were looked for in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens that were found there.")
        self._ended = self._counter("vllm:request_success", "Answers that ended, by why.", "finished_reason")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed ahead.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Of those, tokens that proved right.")
        self._failed = self._counter("localrun:request_failures", "Requests that ended with an error, by its code.", "code", model=False)
        self._kv = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all.")
        self._kv_cached = self._gauge("localrun:kv_cache_reusable_ratio", "Share of the KV blocks that keep finished prompts.")
        self._preempted = self._gauge("vllm:num_preemptions_total", "Requests that had to give their blocks up for a while.")
        self._busy = self._gauge("localrun:forward_seconds", "Time spent in forward passes since the model was loaded.")
        self._loads = self._histogram("localrun:model_load_seconds", "Loading a model.", _WHOLE)
        self._loaded = Gauge("localrun:models_loaded", "Models in memory.", registry=self._registry)

    def watch(self, loaded: Callable[[], int]) -> None:
        """Says who knows how many models are in memory."""
        self._loaded.set_function(loaded)

    def request(self, model: str) -> Watch:
        """One generation that is sent to a runner."""
        return Watch(self, model)

    def failed(self, code: str) -> None:
        """A request ended with an error."""
        self._failed.labels(code).inc()

    def load_took(self, model: str, seconds: float) -> None:
        """A model was loaded."""
        self._loads.labels(model).observe(seconds)

    def inspected(self, model: str, state: Inspected) -> None:
        """How a runner says it stands."""
        self._inspected.add(model)
        blocks = max(1, state.kv_blocks)
        self._kv.labels(model).set(state.kv_blocks_held / blocks)
        self._kv_cached.labels(model).set(state.kv_blocks_cached / blocks)
        self._preempted.labels(model).set(state.preemptions)
        self._busy.labels(model).set(state.busy_s)

    def forget(self, models: Iterable[str]) -> None:
        """Says nothing more of runners whose model is not in memory. models: those that are."""
        for model in self._inspected - set(models):
            self._inspected.discard(model)
            for gauge in (self._kv, self._kv_cached, self._preempted, self._busy):
                gauge.remove(model)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str, model: bool = True) -> Counter:
        return Counter(name, text, [*(["model_name"] if model else []), *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self._registry)


class Watch:
    """The figures of one generation. `close` it on every path."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._began = time.monotonic()
        self._last: float | None = None
        self._between = metrics._between.labels(model)
        self._gauge: Gauge | None = metrics._waiting.labels(model)
        self._gauge.inc()

    def started(self, event: Started) -> None:
        """Its prompt was accepted."""
        self.close()
        self._gauge = self._metrics._running.labels(self._model)
        self._gauge.inc()
        self._metrics._asked.labels(self._model).inc(event.prompt_tokens)
        self._metrics._hits.labels(self._model).inc(event.cached_tokens)

    def piece(self) -> None:
        """A piece of the answer came."""
        now = time.monotonic()
        if self._last is not None:
            self._between.observe(now - self._last)
        self._last = now

    def finished(self, event: Finished) -> None:
        """The answer is complete."""
        metrics, model = self._metrics, self._model
        metrics._ended.labels(model, event.reason).inc()
        metrics._prompt_tokens.labels(model).inc(event.prompt_tokens)
        metrics._answer_tokens.labels(model).inc(event.completion_tokens)
        metrics._prompt_sizes.labels(model).observe(event.prompt_tokens)
        metrics._answer_sizes.labels(model).observe(event.completion_tokens)
        metrics._first.labels(model).observe(event.first_token_s)
        metrics._queued.labels(model).observe(event.queue_s)
        metrics._prefill.labels(model).observe(event.prefill_s)
        metrics._decode.labels(model).observe(event.decode_s)
        metrics._whole.labels(model).observe(time.monotonic() - self._began)
        metrics._drafted.labels(model).inc(event.drafted_tokens)
        metrics._accepted.labels(model).inc(event.accepted_tokens)
        if event.completion_tokens > 1:
            metrics._per_token.labels(model).observe(event.decode_s / (event.completion_tokens - 1))
        self.close()

    def close(self) -> None:
        """It is no longer under way. Idempotent."""
        if self._gauge is not None:
            self._gauge.dec()
            self._gauge = None
