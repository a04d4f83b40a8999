"""What Prometheus is told: vLLM's names where it has one, `tpspec:` for collective rounds, which only we count.

A registry of its own, no module state. Must not know HTTP. Requests are counted here as they pass; rounds and
collectives are the engine's own counters, shown as the last report gave them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tpspec.comm.messages import Stats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpspec.comm.messages import Drafting
    from tpspec.request import Delta

# vLLM's buckets; between tokens it starts at 10 ms, which a small fast box never reaches.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN_FINE = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075)
BETWEEN = (*BETWEEN_FINE, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class Metrics:
    """Every metric of one server, labelled with the model's name."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._engine = EngineCounters()
        self.registry.register(self._engine)
        self._running = self._gauge("num_requests_running", "Requests the engine is working on")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for pages or a place")
        self._cache = self._gauge("kv_cache_usage_perc", "Share of KV cache pages in use, 0 to 1")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens accepted")
        self._generated = self._counter("generation_tokens", "Tokens sent to clients")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds of a request that verified a draft")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._by_depth = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by depth (0: the first)",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._finished = Counter(
            "vllm:request_success", "Requests ended", ["model_name", "finished_reason"], registry=self.registry
        )
        self._refused = Counter(
            "vllm:admission_rejections", "Requests refused", ["model_name", "reason"], registry=self.registry
        )
        self._restarts = Counter(
            "tpspec:world_restarts", "Times the ranks were started again", ["model_name"], registry=self.registry
        )
        self._restarts.labels(model)
        self._first = self._histogram("time_to_first_token_seconds", "From submission to the first tokens", FIRST)
        self._between = self._histogram("inter_token_latency_seconds", "Between two rounds of a request", BETWEEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From submission to the end", WHOLE)

    def engine(self, stats: Stats) -> None:
        self._engine.stats = stats
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._cache.set(stats.pages_used / stats.pages_total if stats.pages_total else 0)

    def submitted(self, num_prompt_tokens: int) -> None:
        self._prompt.inc(num_prompt_tokens)

    def round(self, delta: Delta, num_tokens: int, accepted: int) -> None:
        """One request's share of a round. accepted: draft tokens that reached the client, so never above num_tokens."""
        self._generated.inc(num_tokens)
        if not any(delta.drafted):
            return
        self._drafts.inc()
        self._drafted.inc(sum(delta.drafted))
        self._accepted.inc(accepted)
        for depth, count in enumerate(delta.accepted[:accepted]):
            self._by_depth.labels(self._model, str(depth)).inc(count)

    def restarted(self) -> None:
        self._restarts.labels(self._model).inc()

    def first(self, seconds: float) -> None:
        self._first.observe(seconds)

    def between(self, seconds: float) -> None:
        self._between.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished.labels(self._model, reason).inc()
        self._whole.observe(seconds)

    def refused(self, reason: str) -> None:
        self._refused.labels(self._model, reason).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["model_name"], registry=self.registry).labels(self._model)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"vllm:{name}", what, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", what, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model)


class EngineCounters(Collector):
    """The engine's counters since start. Rounds per token is tpspec:rounds_total / tpspec:tokens_total."""

    def __init__(self) -> None:
        self.stats = Stats()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats = self.stats
        yield CounterMetricFamily("tpspec:rounds", "Verification rounds", value=stats.rounds)
        yield CounterMetricFamily("tpspec:tokens", "Tokens committed by those rounds", value=stats.tokens)
        yield CounterMetricFamily("vllm:num_preemptions", "Requests set back to free pages", value=stats.preemptions)
        corrupted = "Requests ended because their logits held NaN or infinity"
        yield CounterMetricFamily("vllm:corrupted_requests", corrupted, value=stats.corrupted)
        asked = "Tokens of texts that were looked up in the cache"
        yield CounterMetricFamily("vllm:prefix_cache_queries", asked, value=stats.prefix_asked)
        found = "Tokens found there, which were not read again"
        yield CounterMetricFamily("vllm:prefix_cache_hits", found, value=stats.prefix_found)
        yield CounterMetricFamily(
            "tpspec:forward_seconds",
            "In the target's forwards and verdicts, collectives included",
            value=stats.forward_s,
        )
        yield CounterMetricFamily(
            "tpspec:drafting_seconds", "The lead spent on drafts, or waiting for them", value=stats.drafting_s
        )
        if stats.elsewhere is not None:
            yield from drafting_elsewhere(stats.elsewhere)
        kinds = [
            CounterMetricFamily("tpspec:collectives", "Collectives run", labels=["purpose"]),
            CounterMetricFamily("tpspec:collective_bytes", "Payload bytes the lead contributed", labels=["purpose"]),
            CounterMetricFamily("tpspec:collective_seconds", "Seconds the lead spent in them", labels=["purpose"]),
        ]
        for purpose, tally in sorted(stats.collectives.items()):
            for kind, value in zip(kinds, (tally.count, tally.bytes, tally.seconds), strict=True):
                kind.add_metric([purpose], value)
        yield from kinds


def drafting_elsewhere(drafting: Drafting) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Of a drafter that runs beside the rounds."""
    counters = {
        "hits": ("Drafts that were ready when they were asked for", drafting.hits),
        "misses": ("Drafts that had to be made", drafting.misses),
        "late": ("Drafts for a text that had moved on", drafting.late),
        "timeouts": ("Rounds that stopped waiting for drafts", drafting.timeouts),
        "messages": ("Messages to the drafter and from it", drafting.messages),
        "bytes": ("Bytes of those messages", drafting.bytes),
        "tokens_read": ("Tokens the drafter read", drafting.num_read),
        "tokens_dropped": ("Tokens the drafter read for a future that did not come", drafting.num_dropped),
        "wait_seconds": ("The target waited for drafts", drafting.waited_s),
        "wait_rounds": ("Rounds in which the target waited for drafts", drafting.waited_rounds),
        "work_seconds": ("CPU time of a drafter beside a shard", drafting.work_s),
        "work_inside_seconds": ("Of that, while its shard was in a collective", drafting.inside_s),
        "shard_delay_seconds": ("The shard that has it beside it waited for a core", drafting.delayed_s),
    }
    for name, (what, value) in counters.items():
        yield CounterMetricFamily(f"tpspec:draft_{name}", what, value=value)
    away = "1 while the drafter does not answer and decoding goes on without it"
    yield GaugeMetricFamily("tpspec:drafter_away", away, value=drafting.is_away)
