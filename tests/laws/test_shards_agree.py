"""Shards reach the verdicts of the unsharded row, token for token, in one gather of known size.

Ranks are threads that meet in `gather`. Vocabulary 230 against 64 candidates a shard, so that truncation is settled
from candidates in some cases and from whole rows in others; coarse logits tie.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tpspec.request import Sampling
from tpspec.staged import Fetched
from tpspec.tokens import Draws, TokenTree, Verdict
from tpspec.verify import RULES, rule, shards
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rows import Case, RowLogits
from tpspec.verify.shards import _in_line

VOCAB, PADDED = 230, 240
EDGES = {2: [0, 100, PADDED], 3: [0, 13, 235, PADDED], 5: [0, 50, 90, 91, 200, PADDED]}


class Meeting:
    """`gather` among threads; counts calls and the bytes each rank sends."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=20)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size
        self.sent: list[int] = []

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.slots[rank] = x
        self.barrier.wait()
        everyone = torch.stack(self.slots)
        if rank == 0:
            self.sent.append(x.numel() * x.element_size())
        self.barrier.wait()
        return everyone


def sharded(name: str, cases: list[Case], logits_TV: torch.Tensor, edges: list[int]) -> tuple[list[Verdict], list[int]]:
    meeting = Meeting(len(edges) - 1)
    width = max(right - left for left, right in pairwise(edges))

    def rank(r: int) -> list[Verdict]:
        shard_TV = logits_TV[:, edges[r] : edges[r + 1]]
        rows = RowLogits(shard_TV, VOCAB, edges[r], width, lambda x: meeting.gather(r, x))
        return rule(name).judge(cases, rows, CounterNoise())

    with ThreadPoolExecutor(len(edges) - 1) as pool:
        answers = list(pool.map(rank, range(len(edges) - 1)))
    assert all(answer == answers[0] for answer in answers)
    return answers[0], meeting.sent


def random_tree(chance: torch.Generator, sampled: bool) -> TokenTree:
    """Up to six nodes; siblings differ; with `sampled`, each row says what its children were drawn from."""
    size = int(torch.randint(0, 7, (), generator=chance))
    parents = tuple(int(torch.randint(-1, max(i, 1), (), generator=chance)) if i else -1 for i in range(size))
    tokens = tuple(torch.randperm(12, generator=chance)[:size].tolist())
    if not sampled:
        return TokenTree(tokens, parents)
    q = torch.rand(12, generator=chance, dtype=torch.float64).softmax(0)
    return TokenTree(tokens, parents, (Draws(tuple(range(12)), tuple(q.tolist())),) * (size + 1))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 5, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 229: 4.0}]),
    seed=st.integers(0, 2**40),
)


def some_cases(
    wanted: list[Sampling], seed: int, spread: float, coarse: bool, sampled: bool
) -> tuple[list[Case], torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    cases: list[Case] = []
    num_rows = 1  # row 0 belongs to nobody: rules must not assume that they are given all rows
    for number, sampling in enumerate(wanted):
        context = tuple(torch.randint(0, VOCAB, (9 + number,), generator=chance).tolist())
        cases.append(Case(number, num_rows, random_tree(chance, sampled), context, 4, sampling))
        num_rows += 1 + len(cases[-1].tree)
    logits_TV = torch.randn(num_rows, PADDED, generator=chance) * spread
    logits_TV[:, :12] += 2 * spread
    return cases, logits_TV.round() if coarse else logits_TV


@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("name", RULES)
@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    wanted=st.lists(samplings, min_size=1, max_size=3),
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.3, 2.0, 5.0]),
    coarse=st.booleans(),
    sampled=st.booleans(),
)
def test_shards_reach_the_verdicts_of_the_whole(name, size, wanted, seed, spread, coarse, sampled) -> None:
    """Stands against bug 14 too: the last shard of three holds padding alone."""
    cases, logits_TV = some_cases(wanted, seed, spread, coarse, sampled)
    before = logits_TV.clone()
    alone = rule(name).judge(cases, RowLogits(logits_TV, VOCAB), CounterNoise())
    together, sent = sharded(name, cases, logits_TV, EDGES[size])
    assert together == alone
    assert len(sent) == 1 or (len(sent) == 2 and any(s.truncates for s in wanted))
    assert torch.equal(before, logits_TV)


def test_match_sends_eight_bytes_a_row_and_nothing_else() -> None:
    cases, logits_TV = some_cases([Sampling(), Sampling(temperature=0.8)], 3, 2.0, False, False)
    _, sent = sharded("match", cases, logits_TV, EDGES[3])
    assert sent == [8 * sum(len(case.rows()) for case in cases)]


def test_what_shards_tell_is_read_once_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three shards; 8-byte numbers begin at an odd word in every other one. Stands against what was in memory before
    they came, for how they are read is made ready while they are on their way."""
    parts = [torch.tensor([[1.5], [2.5], [4.0]]), torch.arange(6.0).double().view(3, 2), torch.tensor([[7], [8], [9]])]
    said_N = [[part[shard] for part in parts] for shard in range(3)]

    class Late(Fetched):
        def __init__(self, x: torch.Tensor) -> None:
            super().__init__(x.clone().zero_())
            self._late = x

        def here(self) -> torch.Tensor:
            return self.place.copy_(self._late)

    def in_words(said: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.view(torch.int32) for part in said])

    monkeypatch.setattr(shards, "Fetched", Late)
    rows = RowLogits(torch.empty(0), VOCAB, gather=lambda _: torch.stack([*map(in_words, said_N)]))
    told = shards.exchange(rows, said_N[0])
    assert [part.tolist() for part in told] == [part.tolist() for part in parts]
    assert [part.dtype for part in told] == [part.dtype for part in parts]


def test_rejection_sends_one_sketch_a_row() -> None:
    """24 bytes (largest, mass, winner and its score) and 4 for each id asked about, the most of any row."""
    tree = TokenTree.chain([1, 2])
    cases = [Case(0, 0, tree, (5, 6), 1, Sampling(temperature=0.8))]
    _, sent = sharded("rejection", cases, torch.randn(3, PADDED), EDGES[2])
    assert sent == [3 * (4 + 8 + 4 + 4 + 4)]


@pytest.mark.parametrize(
    ("wanted", "num_gathers"),
    [
        (Sampling(temperature=1.0, top_k=20), 1),
        (Sampling(temperature=1.0, top_k=150), 2),  # more than one shard's candidates can tell
        (Sampling(temperature=1.0, top_p=0.9), 1),
        (Sampling(temperature=40.0, top_p=0.9), 2),  # flat: the mass is not among the candidates
        (Sampling(temperature=1.0, min_p=0.05), 1),
        (Sampling(temperature=40.0, min_p=0.05), 2),
    ],
)
@pytest.mark.parametrize("name", RULES)
def test_whole_rows_travel_only_when_candidates_cannot_tell(name, wanted, num_gathers) -> None:
    cases, logits_TV = some_cases([wanted], 5, 5.0, False, False)
    _, sent = sharded(name, cases, logits_TV, EDGES[2])
    assert len(sent) == num_gathers


def test_ties_at_the_last_candidate_are_not_guessed() -> None:
    """Every logit equal: top-k keeps them all, and 64 candidates cannot show it."""
    case = Case(0, 0, TokenTree(), (1, 2), 1, Sampling(temperature=1.0, top_k=3, seed=4))
    found = {
        rule("match").judge([replaced(case, seed)], RowLogits(torch.zeros(1, VOCAB), VOCAB), CounterNoise())[0].tokens
        for seed in range(40)
    }
    assert len(found) > 20


def replaced(case: Case, seed: int) -> Case:
    return Case(0, 0, case.tree, case.context, 1, Sampling(temperature=1.0, top_k=3, seed=seed))


@pytest.mark.parametrize("name", RULES)
def test_no_cases_need_no_gather(name) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing to agree on")

    assert rule(name).judge([], RowLogits(torch.zeros(0, VOCAB), VOCAB, gather=refuse), CounterNoise()) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 3))
def test_what_stands_in_line_is_told_as_what_does_not(sizes: list[int], stands: bool, start: int) -> None:
    """A card's winners lie one behind the other, and need no copy. Stands against a part that is left out, told twice,
    or read from where another begins."""
    whole = torch.arange(start + sum(sizes), dtype=torch.int32)
    parts = [*whole[start:].split(sizes)]
    if not stands:
        parts = [part.clone() for part in parts]
    told = _in_line(parts)
    assert told.tolist() == whole[start:].tolist()
    assert (told.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()) == (stands or len(parts) == 1)
    assert _in_line(parts[::-1]).tolist() == torch.cat(parts[::-1]).tolist()
