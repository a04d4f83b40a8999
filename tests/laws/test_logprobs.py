"""Log-probabilities over shards of any width are those of the whole row, in one gather that no verdict shares."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from tests.laws.test_shards_agree import EDGES, PADDED, VOCAB, Meeting
from tpspec.request import Logprob
from tpspec.verify.logprobs import BLOCK, logprobs
from tpspec.verify.rows import RowLogits


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a gather for verdicts")


def sharded(logits_TV: torch.Tensor, tokens: list[int], num_top: int, edges: list[int]) -> list[Logprob]:
    meeting = Meeting(len(edges) - 1)
    width = max(right - left for left, right in pairwise(edges))

    def rank(r: int) -> list[Logprob]:
        shard_TV = logits_TV[:, edges[r] : edges[r + 1]]
        heard = lambda x: meeting.gather(r, x)  # noqa: E731
        return logprobs(RowLogits(shard_TV, VOCAB, edges[r], width, refuse, gather_logits=heard), tokens, num_top)

    with ThreadPoolExecutor(len(edges) - 1) as pool:
        answers = list(pool.map(rank, range(len(edges) - 1)))
    assert all(answer == answers[0] for answer in answers)
    assert len(meeting.sent) == 1
    assert meeting.sent[0] == len(tokens) * (4 + 8 * max(num_top, 1) + 12)
    return answers[0]


@given(
    seed=st.integers(0, 10_000),
    num_rows=st.sampled_from([1, 2, BLOCK - 1, BLOCK, 2 * BLOCK + 3]),
    num_top=st.sampled_from([0, 1, 5, 20]),
    num_shards=st.sampled_from([1, *EDGES]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_shards_say_what_the_whole_row_says(
    seed: int, num_rows: int, num_top: int, num_shards: int, dtype: torch.dtype
) -> None:
    """Stands against padding that has mass, a shard of one id asked for twenty, and rows lost between blocks."""
    chance = torch.Generator().manual_seed(seed)
    logits_TV = (4 * torch.randn(num_rows, PADDED, generator=chance)).to(dtype)
    tokens = torch.randint(0, VOCAB, (num_rows,), generator=chance).tolist()
    found = sharded(logits_TV, tokens, num_top, EDGES.get(num_shards, [0, PADDED]))
    expected_TV = logits_TV[:, :VOCAB].double().log_softmax(1)
    for one, token, row_V in zip(found, tokens, expected_TV, strict=True):
        assert one.own == pytest.approx(float(row_V[token]), abs=1e-9)
        values, _ = row_V.topk(num_top)
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-9)
        assert all(float(row_V[id]) == pytest.approx(value, abs=1e-9) for id, value in one.top)
        assert len({id for id, _ in one.top}) == num_top
