"""Prometheus metrics: vLLM's names under `echokv:`, and the cache's own.

Two sources: what the engine counts (a snapshot a scrape) and what the server sees of requests.
"""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from echokv.engine.outputs import FinishReason, RequestOutput
from echokv.engine.stats import EngineStats, LayerCacheStats

PREFIX = "echokv:"

_FIRST_TOKEN_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_BETWEEN_TOKENS_S = (
    *(0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
_WHOLE_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)


class RequestObserver:
    """Times one engine request; made when it is handed to the engine."""

    def __init__(self, metrics: "ServerMetrics", model_name: str) -> None:
        self._metrics = metrics
        self._labels = (model_name,)
        self._started = time.monotonic()
        self._last_token: float | None = None
        self.is_finished = False

    def output(self, output: RequestOutput) -> None:
        """Take note of one output."""
        now = time.monotonic()
        if output.token_ids:
            if self._last_token is None:
                self._metrics.time_to_first_token.labels(*self._labels).observe(now - self._started)
            else:
                self._metrics.inter_token_latency.labels(*self._labels).observe(
                    now - self._last_token
                )
            self._last_token = now
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason)

    def aborted(self) -> None:
        """The client went away."""
        if not self.is_finished:
            self.is_finished = True
            self._metrics.request_success.labels(*self._labels, FinishReason.ABORT.value).inc()

    def _finish(self, output: RequestOutput, reason: FinishReason) -> None:
        self.is_finished = True
        metrics, labels = self._metrics, self._labels
        metrics.request_success.labels(*labels, reason.value).inc()
        metrics.e2e_request_latency.labels(*labels).observe(time.monotonic() - self._started)
        metrics.request_prompt_tokens.labels(*labels).observe(output.num_prompt_tokens)
        metrics.request_generation_tokens.labels(*labels).observe(output.num_output_tokens)


class ServerMetrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self.request_success = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time until the first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _BETWEEN_TOKENS_S
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Time until the last token.", _WHOLE_REQUEST_S
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of ended requests.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of ended requests.", _TOKENS
        )

    def observe(self, model_name: str) -> RequestObserver:
        """Begin to time one request."""
        return RequestObserver(self, model_name)

    def render(self, stats: EngineStats | None, model_name: str) -> bytes:
        """The text of /metrics.

        Args:
            stats: the engine's snapshot; None while there is none.
            model_name: label of every metric; unused without stats.
        """
        if stats is not None:
            for reason in FinishReason:
                self.request_success.labels(model_name, reason.value)
            for histogram in (
                self.time_to_first_token,
                self.inter_token_latency,
                self.e2e_request_latency,
                self.request_prompt_tokens,
                self.request_generation_tokens,
            ):
                histogram.labels(model_name)
        self._engine.snapshot = None if stats is None else (stats, model_name)
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry
        )


class _EngineCollector(Collector):
    """Renders the latest snapshot of the engine's figures."""

    def __init__(self) -> None:
        self.snapshot: tuple[EngineStats, str] | None = None

    def collect(self) -> Iterator[Metric]:
        """Called by the registry on a scrape."""
        if self.snapshot is None:
            return
        stats, model_name = self.snapshot
        for family, name, text, value in _engine_values(stats):
            metric = family(PREFIX + name, text, labels=("model_name",))
            metric.add_metric((model_name,), value)
            yield metric
        yield from _layer_metrics(stats.layers, model_name)


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _engine_values(stats: EngineStats) -> Iterable[tuple[_Family, str, str, float]]:
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    live, slots = stats.host_pool_live_slots, stats.host_pool_slots
    return (
        (gauge, "num_requests_running", "Requests being computed.", stats.requests_running),
        (gauge, "num_requests_waiting", "Requests in the queue.", stats.requests_waiting),
        (
            gauge,
            "kv_cache_usage_perc",
            "Share of the host pool held by requests; 1 is all of it.",
            live / slots if slots else 0.0,
        ),
        (counter, "num_preemptions", "Requests put back into the queue.", stats.preemptions),
        (counter, "prompt_tokens", "Prompt tokens received.", stats.prompt_tokens),
        (counter, "generation_tokens", "Tokens generated.", stats.generation_tokens),
        (
            counter,
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        (
            counter,
            "prefix_cache_hits",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_cache_hits,
        ),
        (gauge, "host_pool_slots", "Host slots in all.", slots),
        (gauge, "host_pool_live_slots", "Host slots held by requests.", live),
        (
            gauge,
            "host_pool_cached_slots",
            "Host slots held by the prefix cache alone.",
            stats.host_pool_cached_slots,
        ),
        (gauge, "device_pool_slots", "Device slots a layer.", stats.device_pool_slots),
        (
            gauge,
            "device_pool_live_slots",
            "Device slots whose host slot is held by a request, in the fullest layer.",
            stats.device_pool_live_slots,
        ),
    )


def _layer_metrics(layers: tuple[LayerCacheStats, ...], model_name: str) -> Iterator[Metric]:
    labels = ("model_name", "layer")
    rate = GaugeMetricFamily(
        PREFIX + "device_pool_hit_rate",
        "Share of selected rows that were resident, since start.",
        labels=labels,
    )
    resident = GaugeMetricFamily(
        PREFIX + "resident_rows", "Rows in the device pool.", labels=labels
    )
    selected = CounterMetricFamily(
        PREFIX + "selected_rows", "Distinct rows wanted by attention, step by step.", labels=labels
    )
    recalled = CounterMetricFamily(
        PREFIX + "recalled_rows", "Selected rows fetched from host memory.", labels=labels
    )
    evicted = CounterMetricFamily(
        PREFIX + "evicted_rows", "Rows that left the device pool for others.", labels=labels
    )
    prefetched = CounterMetricFamily(
        PREFIX + "prefetched_rows",
        "Rows moved early: useful when then selected, else wasted.",
        labels=(*labels, "outcome"),
    )
    for index, layer in enumerate(layers):
        at = (model_name, str(index))
        rate.add_metric(at, layer.hit_rate)
        resident.add_metric(at, layer.resident_rows)
        selected.add_metric(at, layer.selected_rows)
        recalled.add_metric(at, layer.recalled_rows)
        evicted.add_metric(at, layer.evicted_rows)
        prefetched.add_metric((*at, "useful"), layer.prefetched_useful_rows)
        prefetched.add_metric((*at, "wasted"), layer.prefetched_wasted_rows)
    yield from (rate, resident, selected, recalled, evicted, prefetched)
