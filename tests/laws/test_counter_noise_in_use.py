"""The rules with the noise they run on: many seeds side by side, drafts and rounds as in service.

Enumeration proves the rules for ideal noise; here the keys themselves are on trial (a stream or a position shared by
mistake). Chi-squared at fixed seeds; were they drawn anew, a false alarm would come about once in a million runs.
"""

from __future__ import annotations

import pytest
import torch

from tests.laws.test_noise import chi_squared, limit
from tests.laws.tiny import MANY, PLAIN, PROMPT, VOCAB, law_after, other, plain_law, rows_of, seeded, target
from tests.slow import slowly
from tpspec.request import Sampling
from tpspec.tokens import Draws, TokenTree
from tpspec.verify import RULES, rule
from tpspec.verify.draw import Draw, pick, sample
from tpspec.verify.noise import CounterNoise, Stream
from tpspec.verify.rows import Case, RowLogits

NOISE = CounterNoise()
LENGTH = 3
NUM_TEXTS = 4_000
CUT = Sampling(temperature=1.2, top_p=0.9, frequency_penalty=0.2)


def stacked(model, draws: list[Draw]) -> RowLogits:
    return RowLogits(torch.stack([model((*draw.context, *draw.path)) for draw in draws]), VOCAB)


def further(draws: list[Draw], tokens: list[int]) -> list[Draw]:
    return [
        Draw(draw.context, draw.num_prompt, draw.sampling, (*draw.path, token))
        for draw, token in zip(draws, tokens, strict=True)
    ]


def coupled(draws: list[Draw]) -> list[TokenTree]:
    for _ in range(2):
        draws = further(draws, pick(stacked(other, draws), draws, NOISE))
    return [TokenTree.chain(draw.path) for draw in draws]


def sampled(draws: list[Draw]) -> list[TokenTree]:
    told: list[list[Draws]] = []
    for _ in range(2):
        tokens, drawn = zip(*sample(stacked(other, draws), draws, NOISE, 2), strict=True)
        draws, told = further(draws, list(tokens)), [*told, list(drawn)]
    return [TokenTree.chain(draw.path, rows) for draw, rows in zip(draws, zip(*told, strict=True), strict=True)]


def silent(draws: list[Draw]) -> list[TokenTree]:
    return [TokenTree()] * len(draws)


def round_of(name: str, propose, texts: list[tuple[int, ...]], wanted: list[Sampling]) -> list[tuple[int, ...]]:
    trees = propose([Draw(text, len(PROMPT), sampling) for text, sampling in zip(texts, wanted, strict=True)])
    cases: list[Case] = []
    num_rows = 0
    for text, tree, sampling in zip(texts, trees, wanted, strict=True):
        cases.append(Case(len(cases), num_rows, tree, text, len(PROMPT), sampling))
        num_rows += 1 + len(tree)
    rows = RowLogits(torch.cat([rows_of(case) for case in cases]), VOCAB)
    return [verdict.tokens for verdict in rule(name).judge(cases, rows, NOISE)]


def texts_of(name: str, propose, wanted: Sampling, num: int) -> list[tuple[int, ...]]:
    """The texts of seeds 0, 1, ..."""
    texts = [PROMPT] * num
    while short := [i for i, text in enumerate(texts) if len(text) < len(PROMPT) + LENGTH]:
        found = round_of(name, propose, [texts[i] for i in short], [seeded(wanted, i) for i in short])
        for i, tokens in zip(short, found, strict=True):
            texts[i] += tokens
    return [text[len(PROMPT) :][:LENGTH] for text in texts]


@pytest.mark.parametrize(
    ("name", "propose", "wanted"),
    [
        ("match", coupled, PLAIN),
        ("rejection", sampled, PLAIN),
        ("rejection", coupled, PLAIN),
        *slowly(("match", sampled, CUT)),
    ],
)
def test_texts_follow_the_law_of_the_target(name, propose, wanted) -> None:
    texts = texts_of(name, propose, wanted, NUM_TEXTS)
    law = {text: p for text, p in plain_law(wanted, LENGTH).items() if p > 0}
    assert set(texts) <= set(law)
    counts = torch.tensor([texts.count(text) for text in law], dtype=torch.float64)
    expected = torch.tensor(list(law.values()), dtype=torch.float64) * NUM_TEXTS
    assert chi_squared(counts, expected) < limit(len(law) - 1)


@pytest.mark.parametrize("wanted", [PLAIN, CUT, MANY, Sampling()], ids=["plain", "cut", "many", "argmax"])
@pytest.mark.parametrize("propose", [coupled, sampled])
def test_match_gives_the_same_text_whatever_drafts(propose, wanted) -> None:
    assert texts_of("match", propose, wanted, 300) == texts_of("match", silent, wanted, 300)


@pytest.mark.parametrize("name", RULES)
def test_a_seed_gives_its_text_again(name) -> None:
    assert texts_of(name, sampled, CUT, 100) == texts_of(name, sampled, CUT, 100)


def test_shared_noise_brings_acceptance_near_the_optimum() -> None:
    """At least (1 - TV) / (1 + TV) at the first token (arXiv 2408.07978); 1 - TV is the best any rule can do."""
    p = torch.tensor(law_after(PROMPT, 2, PLAIN))
    apart = float((p - other(PROMPT).double().softmax(0)).abs().sum() / 2)
    draws = [Draw(PROMPT, 2, seeded(PLAIN, i)) for i in range(4_000)]
    drafts, own = (pick(stacked(model, draws), draws, NOISE) for model in (other, target))
    accepted = sum(x == y for x, y in zip(drafts, own, strict=True)) / len(draws)
    slack = 5 * 0.5 / len(draws) ** 0.5
    assert (1 - apart) / (1 + apart) - slack < accepted < 1 - apart + slack


def test_a_sample_comes_from_exactly_what_it_says() -> None:
    """Stands against bug 1 at its source."""
    draws = [Draw(PROMPT, 2, seeded(MANY, i)) for i in range(NUM_TEXTS)]
    drawn = sample(stacked(other, draws), draws, NOISE, 2)
    (said,) = {draws for _, draws in drawn}
    assert len(said.ids) == 2
    assert list(said.ids) == sorted(said.ids)
    counts = torch.tensor([sum(token == x for token, _ in drawn) for x in said.ids], dtype=torch.float64)
    assert chi_squared(counts, torch.tensor(said.probs, dtype=torch.float64) * NUM_TEXTS) < limit(1)


@pytest.mark.parametrize(
    ("wanted", "support"),
    [(Sampling(), 3), (Sampling(temperature=1.0, top_k=1), 3), (Sampling(temperature=1.0, top_p=0.01), 2)],
)
def test_a_sample_respects_temperature_and_truncation(wanted, support) -> None:
    ((token, said),) = sample(stacked(other, [Draw(PROMPT, 2, wanted)]), [Draw(PROMPT, 2, wanted)], NOISE, support)
    assert said == Draws((int(other(PROMPT).argmax()),), (1.0,))
    assert said.ids == (token,)


def test_the_drafter_has_a_stream_of_its_own() -> None:
    """Bug 3: were the drafter's noise the rule's, their draws would agree far too often."""
    draws = [Draw(PROMPT, 2, seeded(PLAIN, i)) for i in range(4_000)]
    rows = stacked(target, draws)
    p = torch.tensor(law_after(PROMPT, 2, PLAIN))
    independent = float((p * p).sum())
    streams = [pick(rows, draws, NOISE, stream) for stream in Stream]
    for i, first in enumerate(streams):
        for second in streams[:i]:
            agreed = sum(x == y for x, y in zip(first, second, strict=True)) / len(draws)
            assert abs(agreed - independent) < 5 * 0.5 / len(draws) ** 0.5
