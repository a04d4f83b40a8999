"""The winner by its noise as a card finds it is the CPU's. Without a card, in Triton's interpreter, to the last bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tpspec.request import Sampling
from tpspec.verify.largest import SHORT
from tpspec.verify.noise import CounterNoise, Stream, _keys
from tpspec.verify.words import LENGTH

pytest.importorskip("triton")
from tests.emulated_card import emulated_card
from tpspec.verify import card_noise
from tpspec.verify.card_noise import BLOCKS, best
from tpspec.verify.draw import pick
from tpspec.verify.rows import Draw, RowLogits

HAS_CARD = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if HAS_CARD else []
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
LEAST_ERROR = 1e-6 if HAS_CARD else 0.0  # a card's logarithm may differ in its last bit, and with it a float32
OF_PROGRAM = BLOCKS * LENGTH


def on_card(scores_TV: torch.Tensor, seeds: list[int], stream: Stream, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys_3T = torch.from_numpy(_keys(seeds, range(len(seeds)), stream)).to(DEVICE)
    value_T, ids_T = best(scores_TV.to(DEVICE), keys_3T, start)
    assert (value_T.dtype, ids_T.dtype) == (torch.float32, torch.int32)
    return value_T.cpu(), ids_T.cpu()


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**64 - 1),
    num_ids=st.integers(1, 3000) | st.sampled_from([OF_PROGRAM - 1, OF_PROGRAM, OF_PROGRAM + 1]),
    start=st.integers(0, 200) | st.sampled_from([OF_PROGRAM, 2**31 - 3000]),
    spread=st.sampled_from([0.0, 0.5, 30.0, 1e8]),
    stream=st.sampled_from(Stream),
)
def test_the_winner_is_that_of_the_cpu(seed: int, num_ids: int, start: int, spread: float, stream: Stream) -> None:
    """Of shards that begin and end within a block. Stands against an id that is read twice or not at all, words that
    keep their sign where they are shifted, and ties that are another's (at a spread of 1e8, float32 has many)."""
    scores_TV = (torch.randn(2, num_ids, generator=torch.Generator().manual_seed(seed % 1000)) * spread).round()
    seeds = [seed, -seed]
    value_T, ids_T = on_card(scores_TV, seeds, stream, start)
    due_T, due_ids_T = CounterNoise().best(scores_TV, seeds, range(2), stream, start)
    torch.testing.assert_close(value_T, due_T, rtol=LEAST_ERROR, atol=LEAST_ERROR)
    assert ids_T.tolist() == due_ids_T.tolist()


@pytest.mark.skipif(HAS_CARD or shutil.which("c++") is None, reason="of an emulated card, for which there is c++")
def test_both_ways_to_a_winner_are_there_before_the_first_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits of any kind. Stands against a first text at temperature 0, or at another, that waits for a compiler."""
    tried, draw = list[tuple[str, bool]](), card_noise.best

    def noted(scores_TV: torch.Tensor, keys_3T: torch.Tensor | None, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        tried.append((str(scores_TV.dtype), keys_3T is None))
        return draw(scores_TV, keys_3T, start)

    monkeypatch.setattr(card_noise, "best", noted)
    with emulated_card():
        CounterNoise().prepare(torch.device("cuda"))
    assert sorted(tried) == [(kind, is_plain) for kind in sorted(map(str, SHORT)) for is_plain in (False, True)]


@pytest.mark.skipif(HAS_CARD or shutil.which("c++") is None, reason="of an emulated card, for which there is c++")
@pytest.mark.parametrize("temperatures", [(0, 0, 0), (1, 1, 1), (0, 1, 0)], ids=str)
def test_logits_of_16_bits_are_judged_as_they_are(temperatures: tuple[int, ...]) -> None:
    """By as many launches as those of float32, and with the CPU's winners. Stands against a copy of a vocabulary in
    every round, and a winner that is told in 16 bits."""
    logits_TV = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    draws = [Draw([1, 2], 1, Sampling(temperature=wanted, seed=row)) for row, wanted in enumerate(temperatures)]
    due, launches = pick(RowLogits(logits_TV, 700), draws, CounterNoise()), list[int]()
    with emulated_card() as card:
        for on_card in (logits_TV.to("cuda"), logits_TV.float().to("cuda")):
            before = card.launches
            assert pick(RowLogits(on_card, 700), draws, CounterNoise()) == due
            launches.append(card.launches - before)
    assert launches[0] == launches[1]


@pytest.mark.parametrize("num_ids", [1, OF_PROGRAM, 3 * OF_PROGRAM - 5])
def test_the_largest_is_the_first_of_those_alike(num_ids: int) -> None:
    """As at temperature 0. Stands against noise where there should be none, and another of two ids that are as good,
    of which one rank draws the one, and one the other."""
    scores_TV = torch.randn(3, num_ids, generator=torch.Generator().manual_seed(0)).round()
    value_T, column_T = (told.cpu() for told in best(scores_TV.to(DEVICE), None, 0))
    due_T = scores_TV.amax(1)
    assert torch.equal(value_T, due_T)
    assert column_T.tolist() == [row.index(due) for row, due in zip(scores_TV.tolist(), due_T.tolist(), strict=True)]
    scores_TV[1, num_ids // 2] = torch.nan
    value_T, _ = best(scores_TV.to(DEVICE), None, 0)
    assert value_T.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("seeds", [None, [3, 4]], ids=["cold", "warm"])
def test_logits_of_any_kind_have_the_winner_that_they_have_as_float32(
    seeds: list[int] | None, dtype: torch.dtype
) -> None:
    """Of 16 bits many are alike. Stands against noise that is added in 16 bits, and a value that is told in those."""
    logits_TV = torch.randn(2, 2 * OF_PROGRAM - 5, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    keys_3T = None if seeds is None else torch.from_numpy(_keys(seeds, range(2), Stream.target)).to(DEVICE)
    told, due = best(logits_TV, keys_3T, 0), best(logits_TV.float(), keys_3T, 0)
    assert all(map(torch.equal, told, due))


@pytest.mark.parametrize("num_programs", [1, 3])
def test_rows_that_cannot_be_drawn_from_say_so(num_programs: int) -> None:
    """A NaN anywhere, nothing at all, and an infinity; beside a row as it should be. Stands against a largest number
    that passes over NaN, as that of a card does, and a piece of a row of which nothing is told."""
    num_ids = num_programs * OF_PROGRAM - 5
    scores_TV = torch.zeros(4, num_ids)
    scores_TV[0, num_ids // 2] = torch.nan
    scores_TV[1] = -torch.inf
    scores_TV[2, num_ids - 1] = torch.inf
    value_T, ids_T = on_card(scores_TV, [1, 2, 3, 4], Stream.target, 0)
    assert value_T[0].isnan()
    assert value_T[1] == -torch.inf
    assert (value_T[2], ids_T[2]) == (torch.inf, num_ids - 1)
    assert value_T[3].isfinite()
