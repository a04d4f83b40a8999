"""What the processors promise on their own; that the rules apply them rightly is enumerated elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

from tpspec.request import Sampling
from tpspec.verify.processors import num_kept, process
from tpspec.verify.rows import Draw, RowLogits

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 4.0]])
WARM = Sampling(temperature=1.0)


def scores(wanted: Sampling, path: tuple[int, ...] = (), **rows: int) -> list[float]:
    draw = Draw((0, 1, 1), 1, wanted, path)
    return process(RowLogits(LOGITS, **{"vocab": 4} | rows), [draw])[0].tolist()


def test_rows_without_processors_are_not_even_copied() -> None:
    for wanted in (Sampling(), WARM):
        assert process(RowLogits(LOGITS, 4), [Draw((0,), 1, wanted)]).data_ptr() == LOGITS.data_ptr()


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    assert scores(Sampling(repetition_penalty=2.0)) == [1.0, -2.0, 0.5, 4.0]


def test_frequency_and_presence_count_output_and_not_the_prompt() -> None:
    assert scores(Sampling(frequency_penalty=0.5, presence_penalty=0.25)) == [2.0, -2.25, 0.5, 4.0]


@given(
    prompt=st.lists(st.integers(0, 39), max_size=60),
    output=st.lists(st.integers(0, 39), max_size=60),
    paths=st.lists(st.lists(st.integers(0, 39), max_size=3), min_size=1, max_size=3),
    start=st.integers(0, 30),
)
def test_whatever_occurs_is_penalized_as_often_as_it_does(
    prompt: list[int], output: list[int], paths: list[list[int]], start: int
) -> None:
    """Of ids from some on; few tokens are sorted, and of many is counted each id. Stands against ids of
    another shard, and drafts of another row."""
    wanted = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    draws = [Draw((*prompt, *output), len(prompt), wanted, tuple(path)) for path in paths]
    logits = torch.ones(len(paths), 40 - start)
    made = process(RowLogits(logits, vocab=40, start=start), draws)
    for path, row in zip(paths, made.tolist(), strict=True):
        times = Counter([*output, *path])
        due = [
            (0.5 if times[token] or token in prompt else 1) - 0.5 * times[token] - 0.25 * (times[token] > 0)
            for token in range(start, start + len(row))
        ]
        assert row == due


def test_drafts_before_the_row_are_output() -> None:
    """Stands against bug 11."""
    assert scores(Sampling(frequency_penalty=0.5), path=(3, 3)) == [2.0, -2.0, 0.5, 3.0]


def test_bias_comes_before_penalties_and_temperature_after() -> None:
    wanted = Sampling(temperature=2.0, repetition_penalty=2.0, logit_bias={1: 5.0})
    assert scores(wanted) == [0.5, 1.0, 0.25, 2.0]


def test_ids_beyond_the_vocabulary_are_never_drawn() -> None:
    assert scores(WARM, vocab=2) == [2.0, -1.0, -torch.inf, -torch.inf]


def test_a_shard_sees_its_own_ids_alone() -> None:
    wanted = Sampling(repetition_penalty=2.0, logit_bias={0: 9.0, 7: -1.0})
    draw = Draw((5, 2), 1, wanted, (7,))
    assert process(RowLogits(LOGITS, 100, start=4), [draw])[0].tolist() == [2.0, -2.0, 0.5, 1.5]


TOKENS = st.integers(0, 11)
EDITS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, -0.2]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-1.5, 0.25]), max_size=3),
    temperature=st.sampled_from([0.0, 0.7]),
    min_tokens=st.integers(0, 4),
    withheld=st.frozensets(TOKENS, max_size=2),
)
ROWS = st.tuples(
    EDITS, st.lists(TOKENS, min_size=1, max_size=6), st.lists(st.lists(TOKENS, max_size=3), min_size=1, max_size=4)
)


@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 6), st.integers(1, 6), st.integers(0, 9))
def test_a_row_is_what_it_is_alone(
    sequences: list[tuple[Sampling, list[int], list[list[int]]]], start: int, num_ids: int, seed: int
) -> None:
    """To the last bit. Stands against the path, the text or the wishes of the row before."""
    draws = [Draw(context, 1, wanted, tuple(path)) for wanted, context, paths in sequences for path in paths]
    logits_TV = torch.randn(len(draws), num_ids, generator=torch.Generator().manual_seed(seed))
    alone = [process(RowLogits(logits_TV[i : i + 1], 12, start=start), [draw]) for i, draw in enumerate(draws)]
    assert torch.equal(process(RowLogits(logits_TV, 12, start=start), draws), torch.cat(alone))


def kept(wanted: Sampling, complete: bool = True, probs: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)) -> int | None:
    return num_kept(torch.tensor(probs, dtype=torch.float64).log(), 0.0, complete, wanted)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Sampling(temperature=1.0), 4),
        (Sampling(temperature=1.0, top_k=2), 2),
        (Sampling(temperature=1.0, top_k=9), 4),
        (Sampling(temperature=1.0, top_p=0.69), 2),
        (Sampling(temperature=1.0, top_p=0.71), 3),
        (Sampling(temperature=1.0, top_p=0.0), 1),
        (Sampling(temperature=1.0, min_p=0.45), 3),
        (Sampling(temperature=1.0, min_p=1.0), 1),
        (Sampling(temperature=1.0, top_k=3, top_p=0.75), 2),  # of the three kept, 0.7 / 0.9 is enough
        (Sampling(temperature=1.0, top_k=3, top_p=0.99, min_p=0.7), 2),
    ],
)
def test_truncation_keeps(wanted, expected) -> None:
    assert kept(wanted) == expected


def test_top_k_keeps_whatever_equals_the_kth() -> None:
    assert kept(Sampling(temperature=1.0, top_k=2), probs=(0.4, 0.2, 0.2, 0.2)) == 4


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Sampling(temperature=1.0), None),
        (Sampling(temperature=1.0, top_k=3), 3),
        (Sampling(temperature=1.0, top_k=5), None),
        (Sampling(temperature=1.0, top_p=0.65), 2),
        (Sampling(temperature=1.0, top_p=0.95), None),
        (Sampling(temperature=1.0, top_p=0.95, min_p=0.5), 2),
        (Sampling(temperature=1.0, top_k=5, min_p=0.5), 2),
        (Sampling(temperature=1.0, top_k=5, top_p=0.1), None),
        (Sampling(temperature=1.0, top_k=5, top_p=0.1, min_p=0.5), None),  # min-p hid that top-p was not known
        (Sampling(temperature=1.0, min_p=0.3), 2),
        (Sampling(temperature=1.0, min_p=0.1), None),
    ],
)
def test_a_list_that_ends_too_soon_says_so(wanted, expected) -> None:
    """Listed: 0.4, 0.3, 0.1 of a whole of 1; what is unlisted may come close to the last."""
    assert kept(wanted, complete=False, probs=(0.4, 0.3, 0.1)) == expected
