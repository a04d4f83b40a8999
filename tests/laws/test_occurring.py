"""Counts of what occurs in a text: counted on as it grows, they are what they would be counted anew."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
from hypothesis import given, strategies as st

from tpspec.verify.occurring import Occurring

IDS = 12
TOKENS = st.lists(st.integers(0, IDS - 1), max_size=9)


@given(
    prompt=TOKENS,
    rounds=st.lists(st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=4)), max_size=4),
    cut=st.tuples(st.integers(0, IDS), st.integers(0, IDS)),
    with_prompt=st.booleans(),
)
def test_what_is_counted_on_is_what_occurs(
    prompt: list[int], rounds: list[tuple[list[int], list[list[int]]]], cut: tuple[int, int], with_prompt: bool
) -> None:
    """Stands against drafts that stay counted when they are rejected, tokens counted twice, and others' shards."""
    shard, text = range(min(cut), max(cut)), [*prompt]
    occurring = Occurring(text, len(prompt), with_prompt=with_prompt)
    for tokens, paths in rounds:
        text.extend(tokens)
        counts = occurring.counts(shard, paths)
        outputs = [Counter([*text[len(prompt) :], *path]) for path in paths]
        seen = {token for token in shard if any(output[token] for output in outputs)}
        known = {token for token in shard if with_prompt and token in prompt}
        assert counts.columns_C.tolist() == sorted(token - shard.start for token in seen | known)
        ids = [shard.start + column for column in counts.columns_C.tolist()]
        assert counts.prompt_C.tolist() == [token in known for token in ids]
        assert counts.output_RC.tolist() == [[output[token] for token in ids] for output in outputs]


def test_a_round_of_a_long_text_counts_what_is_new() -> None:
    """Against a whole text that is counted in each round: of 100,000 tokens that took longer than all else of one."""
    text = np.random.default_rng(0).integers(0, 1000, 100_000).tolist()
    occurring, best = Occurring(text, 10, with_prompt=True), {"first": 0.0, "next": 1.0}
    begin = time.perf_counter()
    occurring.counts(range(1000), [()])
    best["first"] = time.perf_counter() - begin
    for token in range(20):
        text.append(token)
        begin = time.perf_counter()
        occurring.counts(range(1000), [(), (1,), (1, 2)])
        best["next"] = min(best["next"], time.perf_counter() - begin)
    assert best["next"] < best["first"] / 5, best
