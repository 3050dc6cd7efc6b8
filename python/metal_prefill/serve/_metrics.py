"""Prometheus metrics of the server."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from metal_prefill.errors import ClosedError
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._stream import Stream
from metal_prefill.model import Model
from metal_prefill.serve._activity import Change

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters of one server. Rates, such as tokens per second, are computed with Prometheus's ``rate``."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: Model) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"metal_prefill_{name}", text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(f"metal_prefill_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Answered requests", ("path", "status"))
        self.request_seconds = histogram("request_seconds", "Time of a request", _SECONDS, ("path",))
        self.first_token_seconds = histogram(
            "first_token_seconds", "Time from a request to the first token of its answer", _SECONDS
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the cache")
        self.generated_tokens = counter("generated_tokens", "Generated tokens")
        self._changes = counter("changed_prompts", "Prompts that repeat an earlier one after a change")
        self._repeated = counter(
            "repeated_tokens", "Tokens that were computed again because a token before them changed"
        )
        self._position = Gauge(
            "metal_prefill_changed_position",
            "Position of the first difference in the latest prompt with a change",
            registry=registry,
        )
        self._waiting = Gauge("metal_prefill_waiting_texts", "Queued texts", registry=registry)
        self._writing = Gauge("metal_prefill_active_texts", "Texts in flight", registry=registry)
        self._passes = counter("passes", "Passes through the model")
        self._pass_seconds = counter("pass_seconds", "Time of passes")
        self._prefill = counter("prefill_tokens", "Computed tokens of prompts and other inputs")
        self._batch = histogram("batch_texts", "Texts that received tokens from a pass", _BATCH)
        registry.register(_Memory(model))

    def after_pass(self, scheduler: Scheduler) -> None:
        rows = scheduler.last_pass
        self._waiting.set(scheduler.waiting)
        self._writing.set(scheduler.streams - scheduler.waiting)
        self._passes.inc()
        self._pass_seconds.inc(rows.seconds)
        self._prefill.inc(rows.prompts + rows.calls)
        if rows.writing:
            self._batch.observe(rows.writing)

    def count_prompt(self, stream: Stream) -> None:
        """Count the prompt of a text that has started."""
        self.prompt_tokens.inc(stream.prompt_tokens)
        self.cached_tokens.inc(stream.cached_tokens)

    def count_change(self, change: Change | None) -> None:
        """Count a prompt that repeats an earlier one after a change."""
        if change is not None:
            self._changes.inc()
            self._repeated.inc(change.tokens)
            self._position.set(change.position)

    def page(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Memory(Collector):
    """Memory of K and V, read when the metrics are collected."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yield the bytes in use and the bytes kept for later prompts."""
        try:
            stats = self._model.stats()
        except ClosedError:
            return
        for name, text in (
            ("kv_pool_bytes", "K and V in use"),
            ("prefix_bytes", "K and V kept for later prompts with the same prefix"),
        ):
            yield GaugeMetricFamily(f"metal_prefill_{name}", text, value=stats.get(name, 0.0))
