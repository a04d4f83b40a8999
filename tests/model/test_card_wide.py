"""Rounds that verify for many texts, as kernels of ours compute them on a card. Without one, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.model.test_card_many import BEHIND, IDS, KINDS, MANY, pair
from tests.model.test_card_steps import alone, tiling  # noqa: F401
from tests.slow import slowly
from tpspec.model.batch import Carried, Span
from tpspec.model.decoder import Decoder

pytest.importorskip("triton")
from tpspec.model.card.wide import MOST_SPLITS, WideSteps

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
MOST_ROWS = 96


def wide_pair(folder: Path, wanted: int = MANY) -> tuple[Decoder, Decoder, WideSteps]:
    torchs, cards = pair(folder, (1.0, 0.7))
    tilings = {heads: tiling(heads.dim, None) for heads in cards.shape.heads}
    wide = WideSteps(cards.shape, cards.ropes, cards.store, tilings, MOST_ROWS, wanted, cards.states)
    cards._runner.many = wide  # type: ignore[assignment]
    return torchs, cards, wide


def rounds(decoder: Decoder) -> torch.Tensor:
    """Two texts are read, in slots of which one is scattered; then one goes on by 40 rows, and one by a tree behind a
    chain: 52 rows, of the 96 that there could be."""
    text = Span(0, 0, IDS[:60], ((0, 32), (128, 28)), 5, carried=Carried(0, (), 60))
    said = decoder.forward([text, Span(1, 0, IDS[:3], ((256, 3),), 3, carried=Carried(1, (), 3))]).clone()
    more = Span(0, 60, IDS[:40], ((0, 32), (128, 68)), 40, carried=Carried(0, (0,), 40))
    tree = Span(1, 3, IDS[40:52], ((256, 15),), 12, BEHIND, carried=Carried(1, (0,), 7))
    return torch.cat([said, decoder.forward([more, tree])])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5", *slowly(*sorted(KINDS.keys() - {"gpt_oss", "qwen3_5"}))])
def test_rounds_are_what_torch_makes_of_them(kind: str, tmp_path: Path) -> None:
    """Stands against a table whose columns are read as those of few rows, and splits that nobody joins. Shard 0 of two:
    an uneven group of heads in some kinds."""
    torchs, cards, _ = wide_pair(tiny(kind, tmp_path, **KINDS[kind]))
    assert (rounds(cards) - rounds(torchs)).abs().max() < 1e-4
    for mine, its in zip(cards.store.cells, torchs.store.cells, strict=True):
        assert torch.allclose(mine.numbers_GSE, its.numbers_GSE, rtol=0, atol=1e-4)


def test_keys_are_split_less_the_more_rows_there_are(tmp_path: Path) -> None:
    """As if texts had eight each. Stands against programs by the ten thousand of which most have nothing to do."""
    _, _, wide = wide_pair(tiny("smollm2", tmp_path, num_hidden_layers=1))
    ((table, folds),) = [(table, wide._folds[heads]) for (heads, _), table in wide._tables.items()]
    wide._wanted = 24 * (len(folds.firsts) - 1)
    splits = [wide._shares(table, folds, num_rows) for num_rows in (8, 32, 96, 256)]
    assert splits == [(8, MOST_SPLITS), (32, 8), (96, 2), (256, 1)]


def test_chunks_of_prompts_and_rounds_that_are_larger_are_left_to_others(tmp_path: Path) -> None:
    """Stands against rows beyond the last column of a table, and a tree of more rows than a word has bits."""
    _, _, wide = wide_pair(tiny("smollm2", tmp_path, num_hidden_layers=1))
    texts = [Span(seq, 0, (5,) * 48, ((48 * seq, 48),), 48) for seq in range(3)]
    assert wide.fits(texts[:2], 96)
    assert not wide.fits(texts, 144)
    assert not wide.fits([Span(0, 0, (5,) * 70, ((0, 70),), 70, (-1, *([0] * 69)))], 70)
