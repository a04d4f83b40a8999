"""What the metrics page says of the engine's counters, without a server."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tpspec.comm.messages import Drafting, Stats
from tpspec.serve.metrics import Metrics

NAMES = {
    "hits": "tpspec:draft_hits_total",
    "misses": "tpspec:draft_misses_total",
    "late": "tpspec:draft_late_total",
    "timeouts": "tpspec:draft_timeouts_total",
    "messages": "tpspec:draft_messages_total",
    "bytes": "tpspec:draft_bytes_total",
    "num_read": "tpspec:draft_tokens_read_total",
    "num_dropped": "tpspec:draft_tokens_dropped_total",
    "waited_s": "tpspec:draft_wait_seconds_total",
    "waited_rounds": "tpspec:draft_wait_rounds_total",
    "work_s": "tpspec:draft_work_seconds_total",
    "inside_s": "tpspec:draft_work_inside_seconds_total",
    "delayed_s": "tpspec:draft_shard_delay_seconds_total",
    "is_away": "tpspec:drafter_away",
}


def test_requests_that_met_a_nan_are_counted_by_vllms_name() -> None:
    assert page(Stats(corrupted=3))["vllm:corrupted_requests_total"] == 3


def page(stats: Stats) -> dict[str, float]:
    metrics = Metrics("m")
    metrics.engine(stats)
    families = text_string_to_metric_families(metrics.page().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_every_counter_of_drafting_elsewhere_is_shown_under_its_own_name() -> None:
    """Stands against two that are swapped, and a new one that nobody shows."""
    counted = dict(zip(NAMES, range(14, 1, -1), strict=False))
    shown = page(Stats(elsewhere=msgspec.convert(counted | {"is_away": True}, Drafting, strict=False)))
    assert set(NAMES) == {field.name for field in msgspec.structs.fields(Drafting)}
    assert {field: shown[name] for field, name in NAMES.items()} == counted | {"is_away": 1}


def test_a_drafter_that_answers_is_not_away_and_an_inline_one_is_not_mentioned() -> None:
    assert page(Stats(elsewhere=Drafting()))["tpspec:drafter_away"] == 0
    assert not any(name in page(Stats()) for name in NAMES.values())


def test_what_was_looked_up_in_the_cache_and_what_was_found_are_told_apart() -> None:
    shown = page(Stats(prefix_asked=30, prefix_found=20))
    assert (shown["vllm:prefix_cache_queries_total"], shown["vllm:prefix_cache_hits_total"]) == (30, 20)


def test_seconds_of_forwards_and_of_drafting_are_told_apart() -> None:
    shown = page(Stats(forward_s=2.5, drafting_s=0.5))
    assert (shown["tpspec:forward_seconds_total"], shown["tpspec:drafting_seconds_total"]) == (2.5, 0.5)
