"""The law of `rejection` where a source remembers answers, and the same is asked for again with the same seed.

What was drawn then is a function of the noise that judges now. One position is judged, for many seeds.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.worlds import serve, topology
from tpspec.comm.messages import Submit
from tpspec.draft.protocol import Ask
from tpspec.draft.suffix import Suffix
from tpspec.request import Request, Sampling
from tpspec.tokens import TokenTree
from tpspec.verify.noise import CounterNoise
from tpspec.verify.rejection import Rejection
from tpspec.verify.rows import Case, RowLogits

TEXT = [3, 2]  # a prompt of one token, and one that was answered
P = 0.3  # of token 0; token 1 is the other that may come
SEEDS, TIMES = 4000, 3
LEAST, CAUGHT = 3.5, 15.0  # standard deviations


def proposed(source: Suffix, number: int, text: list[int], seed: int, temperature: float = 1.0) -> TokenTree:
    (tree,) = source.propose([Ask(number, text, 1, 1, Sampling(temperature=temperature, seed=seed))])
    return tree


def deviations(*, coupled: bool) -> list[float]:
    """How far the share of token 0 is from its law, each time that all seeds are asked for."""
    sources = [Suffix(min_odds=0, coupled=coupled) for _ in range(SEEDS)]
    found = []
    for number in range(TIMES):
        cases: list[Case] = []
        row = 0
        for seed, source in enumerate(sources):
            tree = proposed(source, number, TEXT, seed)
            cases.append(Case(seed, row, tree, TEXT, 1, Sampling(temperature=1.0, seed=seed)))
            row += 1 + len(tree)
        rows = RowLogits(torch.tensor([P, 1 - P, 0.0, 0.0]).log().repeat(row, 1), 4)
        drawn = [verdict.tokens[0] for verdict in Rejection().judge(cases, rows, CounterNoise())]
        for seed, (source, token) in enumerate(zip(sources, drawn, strict=True)):
            proposed(source, number, [*TEXT, token], seed)
            source.forget(number)
        found.append((drawn.count(0) / SEEDS - P) / math.sqrt(P * (1 - P) / SEEDS))
    return found


def test_the_law_is_the_targets_whenever_the_same_is_asked_for() -> None:
    """Stands against a draft that the coin which judges it has chosen: of two tokens the rarer came in 2 p^2 of the
    cases, when all was asked for a third time."""
    assert max(map(abs, deviations(coupled=False))) < LEAST


def test_an_answer_of_the_same_noise_would_bend_it() -> None:
    """And this test would notice."""
    assert max(map(abs, deviations(coupled=True))) > CAUGHT


@pytest.mark.parametrize(
    ("seed", "before", "temperature", "is_proposed"),
    [(5, [], 1.0, False), (6, [], 1.0, True), (5, [4], 1.0, True), (5, [], 0.0, True)],
)
def test_only_what_the_same_noise_chose_is_held_back(
    seed: int, before: list[int], temperature: float, is_proposed: bool
) -> None:
    """Of another seed, at another place, or where nothing is drawn, an answer is as good a draft as ever."""
    source = Suffix(min_odds=0, coupled=False)
    proposed(source, 1, [*TEXT, 0], 5)
    source.forget(1)
    assert bool(proposed(source, 2, [*before, *TEXT], seed, temperature)) is is_proposed


def test_a_world_writes_the_same_text_again(tmp_path: Path) -> None:
    """Stands against a source that is not told the rule: a text would be judged by drafts of its own making."""
    made = topology(tiny("smollm2", tmp_path), draft={"source": "suffix", "tokens": 4}, accept="rejection")
    wanted = Sampling(temperature=0.4, seed=5)
    asked = {100 * i + 1: [Submit(Request(i, (5, 6, 7, 8), 48, wanted))] for i in range(TIMES)}
    first, *others = serve(made, messages=asked).texts()
    assert others == [first] * (TIMES - 1)
