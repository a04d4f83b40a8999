"""Products with codes whose columns several programs share. Without a card, in Triton's interpreter, which runs these
one after the other."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.model.test_card_products import KINDS
from tpspec.model.quantized import Quantized, Ready
from tpspec.published.groups import Grid

pytest.importorskip("triton")
from triton.runtime import interpreter

from tpspec.model.card import coded as card_coded, rows as card_rows, shares as card_shares
from tpspec.model.card.coded import CodedLinear, CodedProduct
from tpspec.model.card.fragments import FragmentLinear, product_of
from tpspec.model.card.overlap import IN_TURN
from tpspec.model.card.shares import Shares, shares
from tpspec.model.card.tiles import CODED_TILES, FRAGMENT_TILES, CodedTile, FragmentTile

ON_CARD = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_CARD else []
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
GROUP, OUTPUTS, LARGE = 64, 38, 2.0**14
# Those of each kind of product.
TILES: dict[Any, list[Any]] = {
    kind: list(dict.fromkeys(tile for of_rows in tiles.values() for tile in of_rows))
    for kind, tiles in ((CodedLinear, CODED_TILES), (FragmentLinear, FRAGMENT_TILES))
}
WIDE: dict[Any, Any] = {CodedLinear: CodedTile(8, 32, 3), FragmentLinear: FragmentTile(8, 32, 4)}
in_both_ways = pytest.mark.parametrize("kind", TILES)


def coded(kind: Any, num_groups: int, cut: Shares, bits: Literal[8, 4], large: float = 1.0) -> CodedProduct[Any]:
    """Of 38 outputs, which fill no tiles; as do 19 channels and what they gate. large: how much more the last group is
    than others, and the first, which is as much less for rows that are `opposite`."""
    noise = torch.Generator().manual_seed(num_groups)
    low, high, dtype = (-128, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (OUTPUTS, num_groups * GROUP), generator=noise).to(dtype)
    scales, zeros = (torch.rand(OUTPUTS, num_groups, generator=noise) * 2**-8 for _ in range(2))
    if large > 1:
        codes[:, -GROUP:] = codes[:, :GROUP]
        scales[:, [0, -1]], zeros[:, [0, -1]] = large * 2**-8, 0.0
    matrix = Ready(Quantized(codes, scales, zeros).to(DEVICE), Grid(GROUP, 0, num_groups * GROUP))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_coded, "has_tensor_cores", lambda device: True)
        patch.setattr(card_coded, "shares", lambda *_: cut)
        made: CodedProduct[Any] = kind(matrix, None)
        return made


def rows(count: int, num_groups: int, *, opposite: bool = False) -> torch.Tensor:
    """Whole numbers, of which a group's product is exact in whatever order the host's library adds: what is rounded is
    what our kernel adds, by itself. opposite: the last group's are the first's, less than nothing."""
    noise = torch.Generator().manual_seed(1)
    x_TI = torch.randint(-8, 9, (count, num_groups * GROUP), generator=noise).to(DEVICE, torch.float16)
    if opposite:
        x_TI[:, -GROUP:] = -x_TI[:, :GROUP]
    return x_TI


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "due"),
    [
        (4096, 4096, Shares(4, 1)),
        (6144, 4096, Shares(4, 1)),
        (4096, 14336, Shares(4, 2)),
        (28672, 4096, Shares(2, 1)),
        (4096, 16 * 512, Shares(4, 2)),
        (2048, 16 * 512, Shares(4, 2)),
        (2048, 32 * 512, Shares(4, 4)),
        (64, 65536, Shares(4, card_shares.MOST_SPLITS)),
    ],
)
def test_there_are_programs_for_every_processor_and_turns_for_every_program(
    num_outputs: int, num_inputs: int, due: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card of 132 processors, and matrices of an 8B first. Stands against shares of a matrix that has programs
    enough, and shares that are too small for codes to be on their way while others are taken."""
    monkeypatch.setattr(card_shares, "num_processors", lambda device: 132)
    assert shares(num_outputs // 16, num_inputs // 128, DEVICE) == due


@pytest.mark.parametrize(
    ("num_outputs", "bits", "due"),
    [(6144, 4, FragmentLinear), (6144, 8, CodedLinear), (28672, 4, CodedLinear), (16, 4, FragmentLinear)],
)
def test_a_short_matrix_of_few_bits_is_read_without_a_processors_memory(
    num_outputs: int, bits: Literal[8, 4], due: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is tried, and on another card perhaps not. Stands against the slower of two kernels: by one, 6144
    outputs of 4 bits take a quarter longer; by the other those of 8 bits, or a long matrix of 4."""
    monkeypatch.setattr(card_shares, "num_processors", lambda device: 132)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: True)
    codes = torch.zeros(num_outputs, GROUP, dtype=torch.int8 if bits == 8 else torch.uint8)
    matrix = Ready(Quantized(codes, torch.ones(num_outputs, 1), None).to(DEVICE), Grid(GROUP, 0, GROUP))
    assert type(product_of(matrix, None, DEVICE)) is due


@in_both_ways
@settings(max_examples=25)
@given(num_groups=st.integers(1, 21), cut=st.sampled_from([Shares(2, 2), Shares(4, 2), Shares(2, 4), Shares(4, 4)]))
def test_what_programs_share_is_what_one_makes(kind: Any, num_groups: int, cut: Shares) -> None:
    """But for its last bits, of float32 in which they are added; and so it is at the next call. Stands against groups
    that no share has, or two have, shares that are cut short or have no groups at all, and counters that do not begin
    anew: without them no program was the last one, and nothing was stored."""
    shared, alone = (coded(kind, num_groups, one, 4) for one in (cut, Shares(cut.at_once)))
    x_TI, tile = rows(9, num_groups), WIDE[kind]
    made = [product.few(x_TI, tile) for product in (alone, shared, shared)]
    assert (made[1].float() - made[0].float()).abs().max() <= 2**-10 * made[0].abs().max()
    assert torch.equal(made[1], made[2])
    assert not shared._counters.any()
    assert not len(alone._counters)


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_a_row_is_added_up_the_same_way_in_whatever_tile(kind: Any, bits: Literal[8, 4]) -> None:
    """To the last bit, beside any number of rows, and where a gate is part of the product; of 13 groups, of which the
    last share has one. By fewer programs it is added up in another way: what is left of these numbers tells."""
    by_four, by_two, by_one = (coded(kind, 13, Shares(4, splits), bits, LARGE) for splits in (4, 2, 1))
    x_TI = rows(40, 13, opposite=True)
    expected = by_four.few(x_TI, TILES[kind][0])
    for other in (by_two, by_one):
        assert (other.few(x_TI, TILES[kind][0]) != expected).double().mean() > 0.25
    for tile, count in ((tile, count) for tile in TILES[kind] for count in (1, 9, 40)):
        assert torch.equal(by_four.few(x_TI[:count], tile), expected[:count])
    due = torch.empty(len(x_TI), OUTPUTS // 2, dtype=x_TI.dtype, device=DEVICE)
    card_rows.gate[(len(x_TI), 1)](expected, due, OUTPUTS // 2, 0.0, wide=32, kind="silu", **IN_TURN)
    for gated in {tile for tiles in by_four.gated_tiles.values() for tile in tiles if tile is not None}:
        assert torch.equal(by_four.few(x_TI, gated, "silu"), due)
    assert not by_four._counters.any()


@pytest.mark.skipif(ON_CARD, reason="a card's programs come in an order of their own")
@in_both_ways
def test_it_does_not_matter_which_share_comes_last(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against what the last one made being added first, or last."""
    shared, x_TI = coded(kind, 13, Shares(2, 4), 4, LARGE), rows(3, 13, opposite=True)
    expected, came = shared.few(x_TI, TILES[kind][0]), list[int]()
    set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx

    def the_other_way_round(builder: Any, x: int, y: int, z: int) -> None:
        came.append(3 - z)
        set_grid_idx(builder, x, y, 3 - z)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", the_other_way_round)
    assert torch.equal(shared.few(x_TI, TILES[kind][0]), expected)
    assert came == 3 * [3, 2, 1, 0]


@pytest.mark.skipif(not ON_CARD, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_on_a_card_programs_see_what_the_others_made(kind: Any, bits: Literal[8, 4]) -> None:
    """At every call. Stands against one that counts before its numbers are there for others, or reads old ones."""
    shared, x_TI = coded(kind, 112, Shares(4, 4), bits, LARGE), rows(40, 112, opposite=True)
    expected = [shared.few(x_TI, tile) for tile in TILES[kind]]
    for _ in range(100):
        assert all(torch.equal(shared.few(x_TI, tile), due) for tile, due in zip(TILES[kind], expected, strict=True))
