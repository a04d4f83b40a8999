"""What a drafter draws and ranks of sharded rows is what it would of whole ones, in one gather."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.laws.test_shards_agree import EDGES, PADDED, VOCAB, Meeting
from tpspec.request import Sampling
from tpspec.verify.draw import Draw, pick, rank, sample
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import RowLogits

Answer = TypeVar("Answer")
NOISE = CounterNoise()
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.2, top_k=9, seed=4),
    Sampling(temperature=0.7, top_p=0.9, seed=5),
]
DRAWS = [Draw((1, 2, 3), 2, sampling) for sampling in SAMPLINGS]


def on_shards(ask: Callable[[RowLogits], Answer], logits_TV: torch.Tensor, edges: list[int]) -> tuple[Answer, int]:
    """What every shard answers, and how many gathers that took."""
    meeting = Meeting(len(edges) - 1)
    width = max(right - left for left, right in pairwise(edges))

    def one(r: int) -> Answer:
        shard_TV = logits_TV[:, edges[r] : edges[r + 1]]
        return ask(RowLogits(shard_TV, VOCAB, edges[r], width, lambda x: meeting.gather(r, x)))

    with ThreadPoolExecutor(len(edges) - 1) as pool:
        answers = list(pool.map(one, range(len(edges) - 1)))
    assert all(answer == answers[0] for answer in answers)
    return answers[0], len(meeting.sent)


def logits(seed: int, spread: float) -> torch.Tensor:
    return spread * torch.randn(len(DRAWS), PADDED, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), num_shards=st.sampled_from(sorted(EDGES)), width=st.integers(1, 6))
def test_a_ranking_is_that_of_the_whole_row(seed: int, num_shards: int, width: int) -> None:
    """Against the likeliest of one shard alone, its own column numbers for ids, and padding that is ranked."""
    logits_TV = logits(seed, 3.0)
    whole = rank(RowLogits(logits_TV, VOCAB), DRAWS, width, NOISE)
    ranked, num_gathers = on_shards(lambda rows: rank(rows, DRAWS, width, NOISE), logits_TV, EDGES[num_shards])
    assert num_gathers == 1
    assert [ids[0] for ids, _ in ranked] == pick(RowLogits(logits_TV, VOCAB), DRAWS, NOISE)
    for (ids, odds), (all_ids, all_odds) in zip(ranked, whole, strict=True):
        assert ids == all_ids
        assert odds == pytest.approx(all_odds)
        assert all(token < VOCAB for token in ids)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), num_shards=st.sampled_from(sorted(EDGES)), draws=st.sampled_from([DRAWS, DRAWS[:1]]))
def test_a_ranking_begins_with_what_is_picked(seed: int, num_shards: int, draws: list[Draw]) -> None:
    """Also where more ids are alike than are listed. Behind it stand the likeliest, the first of them first."""
    logits_TV = logits(seed, 0.7)[: len(draws)].round()
    ranked, _ = on_shards(lambda rows: rank(rows, draws, 5, NOISE), logits_TV, EDGES[num_shards])
    assert [ids[0] for ids, _ in ranked] == pick(RowLogits(logits_TV, VOCAB), draws, NOISE)
    for ids, odds in ranked:
        assert len(set(ids)) == 5
        assert odds[1:] == sorted(odds[1:], reverse=True)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), num_shards=st.sampled_from(sorted(EDGES)), support=st.integers(1, 80))
def test_a_draw_is_from_the_likeliest_of_the_whole_row(seed: int, num_shards: int, support: int) -> None:
    """Against a q that the shards do not share, and more ids than were asked for."""
    logits_TV = logits(seed, 1.0)
    whole = sample(RowLogits(logits_TV, VOCAB), DRAWS, NOISE, support)
    drawn, num_gathers = on_shards(lambda rows: sample(rows, DRAWS, NOISE, support), logits_TV, EDGES[num_shards])
    assert num_gathers == 1
    for (token, q), (all_token, all_q) in zip(drawn, whole, strict=True):
        assert (token, q.ids) == (all_token, all_q.ids)
        assert q.probs == pytest.approx(all_q.probs)
        assert len(q.ids) <= support
