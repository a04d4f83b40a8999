"""A row that cannot be drawn from ends its own sequence and no other, and every rank knows, whichever has the fault."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.laws.test_shards_agree import EDGES, VOCAB, samplings, sharded, some_cases
from tpspec.request import Sampling
from tpspec.tokens import NO_TOKEN, Verdict
from tpspec.verify import RULES, rule
from tpspec.verify.draw import pick, rank, sample
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import Case, Draw, RowLogits

FAULTS = ["nan", "inf", "many nans", "all -inf"]


def spoil(row_V: torch.Tensor, fault: str, token: int) -> None:
    if fault == "all -inf":
        row_V[:] = -torch.inf
    elif fault == "many nans":
        row_V[token % 50 : VOCAB] = torch.nan
    else:
        row_V[token] = float(fault)


def before(case: Case, sound: Verdict, spoilt: set[int]) -> Verdict:
    """What may be said of a case: what was said when nothing was spoilt, up to the first row that is."""
    reached = [case.row, *(case.row + 1 + node for node in sound.path)]
    num = next((i for i, row in enumerate(reached) if row in spoilt), None)
    return sound if num is None else Verdict(sound.seq, sound.path[:num], sound.tokens[:num], corrupt=True)


@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("name", RULES)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    wanted=st.lists(samplings, min_size=1, max_size=3),
    seed=st.integers(0, 999),
    sampled=st.booleans(),
    fault=st.sampled_from(FAULTS),
    token=st.integers(0, VOCAB - 1),
    data=st.data(),
)
def test_a_corrupt_row_ends_its_own_sequence_alike_on_every_rank(
    name, size, wanted, seed, sampled, fault, token, data
) -> None:
    """Against a NaN that loses every comparison, so that a shard which has none wins; against one that wins for all;
    and against rows that nobody reached, which say nothing about a text."""
    cases, logits_TV = some_cases(wanted, seed, 2.0, False, sampled)
    sound = rule(name).judge(cases, RowLogits(logits_TV, VOCAB), CounterNoise())
    spoilt = data.draw(st.sets(st.integers(0, len(logits_TV) - 1), min_size=1, max_size=3))
    for row in spoilt:
        spoil(logits_TV[row], fault, token)
    found, _ = sharded(name, cases, logits_TV, EDGES[size])
    said = [(verdict.seq, verdict.path, verdict.tokens, verdict.corrupt) for verdict in found]
    expected = [before(case, verdict, spoilt) for case, verdict in zip(cases, sound, strict=True)]
    assert said == [(verdict.seq, verdict.path, verdict.tokens, verdict.corrupt) for verdict in expected]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "wanted", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)], ids=["cold", "warm", "cut"]
)
def test_a_corrupt_row_of_a_drafter_offers_nothing(wanted: Sampling, fault: str) -> None:
    """Against a tree with a token that is none, which nobody who is sent it takes; and against drafts for nobody
    because one sequence has none."""
    logits_TV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    rows, draws = RowLogits(logits_TV, VOCAB), [Draw((5, 6), 1, wanted)] * 2
    sound = pick(rows, draws, CounterNoise())[1]
    spoil(logits_TV[0], fault, 7)
    assert pick(rows, draws, CounterNoise()) == [NO_TOKEN, sound]
    none, some = rank(rows, draws, 3, CounterNoise())
    assert (none, len(some[0])) == (((), []), 3)
    (token, q), (drawn, found) = sample(rows, draws, CounterNoise(), 8)
    assert (token, q.ids, drawn in found.ids) == (NO_TOKEN, (), True)
