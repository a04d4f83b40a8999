"""A mixture of experts as a card computes it is what experts.py makes of it. Without a card: Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.slow import slowly
from tpspec.cache.store import Kept, KVStore
from tpspec.errors import UserError
from tpspec.model.experts import Mixture
from tpspec.model.linear import Linear, PlainLinear, Scattered, rounded_linear
from tpspec.model.mlp import GatedMlp
from tpspec.model.quantized import DequantizedLinear, Quantized, Ready
from tpspec.model.router import Router
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.torch_steps import TorchSteps
from tpspec.published.experts import Experts
from tpspec.published.formats import Table
from tpspec.published.groups import Grid, grid_of

pytest.importorskip("triton")
from tpspec.model.card import experts as card_experts, router as card_router
from tpspec.model.card.experts import CardMixture, Stack
from tpspec.model.card.overlap import IN_TURN
from tpspec.model.card.router import Tiles

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, CHANNELS, ALL_CHANNELS = 48, 40, 88  # a shard's of all, of which the first is in the middle of a group
SHAPE = Shape(frozenset({Sight(Heads((0,), 16), None)}), torch.float32, DEVICE, 1.0, "silu")
GIVEN = (SHAPE, [], KVStore({0: Kept(1, 16)}, 16, torch.float32, DEVICE), None)
STEPS = TorchSteps(*GIVEN)  # only their gate is called


@pytest.fixture(autouse=True)
def _some_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        found = SimpleNamespace(multi_processor_count=20, major=8, minor=6)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def mixture(
    count: int,
    chosen: int,
    bits: Literal[4, 8, 16],
    *,
    sums_to_one: bool = True,
    sigmoid: bool = False,
    of_parts: bool = False,
    corrected: Literal["sigmoids", "logits"] | None = "sigmoids",
    groups: tuple[int, int] = (1, 1),
    on_inputs: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Router, list[GatedMlp]]:
    noise = torch.Generator().manual_seed(count)
    grid, read = grid_of(range(24, 24 + CHANNELS), ALL_CHANNELS)

    def product(num_outputs: int, num_inputs: int, grid: Grid | None = None) -> Linear:
        weight = (torch.randn(num_outputs, num_inputs, generator=noise) / num_inputs**0.5).to(DEVICE, dtype)
        return PlainLinear(weight) if bits == 16 else rounded_linear(weight, None, bits, grid, reference=True)

    def mlp() -> GatedMlp:
        down = product(HIDDEN, CHANNELS) if bits == 16 else product(HIDDEN, len(read), grid)
        return GatedMlp(product(2 * CHANNELS, HIDDEN), down)

    weight_ND = (3 * torch.randn(count, HIDDEN, generator=noise) / HIDDEN**0.5).to(DEVICE)
    scale, (of, best) = 2.5 if sigmoid else 1.0, groups
    experts = Experts(
        count, chosen, sums_to_one, sigmoid=sigmoid, scale=scale, groups=of, groups_chosen=best, of_parts=of_parts
    )
    experts = replace(experts, on_inputs=on_inputs)
    if not sigmoid or corrected is None:
        return Router(weight_ND, experts), [mlp() for _ in range(count)]
    bias_N = torch.randn(count, generator=noise).to(DEVICE)
    return Router(weight_ND, replace(experts, corrected=corrected), bias_N), [mlp() for _ in range(count)]


def of_floats(num_outputs: int, num_inputs: int, before: int, dtype: torch.dtype, noise: torch.Generator) -> Linear:
    """As gpt-oss has them, with a bias."""
    grid = Grid(32, before, num_inputs)
    codes = torch.randint(0, 16, (num_outputs, grid.width), generator=noise).to(torch.uint8)
    exponents = torch.randint(120, 126, (num_outputs, grid.num_groups), generator=noise).to(torch.uint8)
    bias = torch.randn(num_outputs, generator=noise).to(DEVICE, dtype)
    return DequantizedLinear(Ready(Quantized(codes, exponents, table="e2m1").to(DEVICE), grid), bias)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)


# What sums may be off by, of the largest: what leaves gate_up and the gate is rounded to it. Triton's interpreter knows
# no products of 16 bits.
ROUNDING = {torch.float32: 1e-5}
if DEVICE.type == "cuda":
    ROUNDING |= {torch.bfloat16: 2**-5, torch.float16: 2**-8}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("num_rows", "count", "chosen"), [(1, 7, 3), (6, 5, 5), (50, 9, 2)])
def test_a_mixture_is_what_the_reference_makes_of_it(
    bits: Literal[4, 8, 16], num_rows: int, count: int, chosen: int, dtype: torch.dtype
) -> None:
    """Stands against a row that goes to another's expert, a tile that ends too early, a group of a neighbour's columns,
    and weights that sum to one where they should not. Of 50 rows an expert fills more than one tile."""
    for sums_to_one, sigmoid in product((True, False), repeat=2):
        router, experts = mixture(count, chosen, bits, sums_to_one=sums_to_one, sigmoid=sigmoid, dtype=dtype)
        x_TD = rows(num_rows).to(dtype)
        due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS).float()
        made_TD = CardMixture(router, experts)(x_TD, STEPS).float()
        assert (made_TD - due_TD).abs().max() <= ROUNDING[dtype] * due_TD.abs().max()


def test_parts_of_a_softmax_that_a_bias_puts_in_another_order_are_what_the_reference_makes_of_them() -> None:
    """As Ernie 4.5's. Stands against rows that go where logits and bias would send them, and weights with the bias."""
    router, experts = mixture(5, 2, 16, sigmoid=True, of_parts=True)
    x_TD = rows(6)
    due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS)
    made_TD = CardMixture(router, experts)(x_TD, STEPS)
    assert (made_TD - due_TD).abs().max() <= 1e-5 * due_TD.abs().max()


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize(("num_rows", "chosen"), [(1, 1), (50, 1), (50, 3)])
def test_what_experts_read_is_weighed_as_the_reference_weighs_it(
    bits: Literal[4, 16], num_rows: int, chosen: int
) -> None:
    """As Llama 4's. Stands against rows weighed for another's expert, and against what is weighed twice, or behind."""
    router, experts = mixture(7, chosen, bits, sigmoid=True, sums_to_one=False, corrected=None, on_inputs=True)
    x_TD = rows(num_rows)
    due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS)
    made_TD = CardMixture(router, experts)(x_TD, STEPS)
    assert (made_TD - due_TD).abs().max() <= 1e-5 * due_TD.abs().max()
    behind = Router(router.weight_ND, replace(router.experts, on_inputs=False))
    assert (Mixture(behind, experts, whole=False)(x_TD, STEPS) - due_TD).abs().max() > 0.01, "weighed alike"


@pytest.mark.parametrize("sums_to_one", [True, False])
@pytest.mark.parametrize("corrected", [None, "logits"])
def test_experts_that_logits_choose_are_what_the_reference_makes_of_them(
    corrected: Literal["logits"] | None, sums_to_one: bool
) -> None:
    """As Command A+'s, without a bias, and Kolibri 1's. Stands against one that is read all the same, or added to
    sigmoids, by which others are chosen, and against weights of corrected logits."""
    router, experts = mixture(7, 3, 16, sums_to_one=sums_to_one, sigmoid=True, corrected=corrected)
    x_TD = rows(50)
    due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS)
    made_TD = CardMixture(router, experts)(x_TD, STEPS)
    assert (made_TD - due_TD).abs().max() <= 1e-5 * due_TD.abs().max()
    if corrected is not None:
        to_sigmoids = Router(router.weight_ND, replace(router.experts, corrected="sigmoids"), router.bias_N)
        assert (Mixture(to_sigmoids, experts, whole=False)(x_TD, STEPS) - due_TD).abs().max() > 0.01, "chosen alike"


def test_weights_that_are_all_small_sum_to_less_than_one_where_much_is_added_to_their_sum() -> None:
    """As LFM2's. Stands against a sum that is left as it is."""
    router, experts = mixture(7, 3, 16, sigmoid=True, corrected=None)
    low = Router(router.weight_ND, replace(router.experts, added=1e-6), torch.full((7,), -14.0, device=DEVICE))
    x_TD = rows(6)
    _, weights_TK = low(x_TD)
    assert (weights_TK.sum(1) < 0.95 * router.experts.scale).any()
    due_TD, made_TD = Mixture(low, experts, whole=False)(x_TD, STEPS), CardMixture(low, experts)(x_TD, STEPS)
    assert (made_TD - due_TD).abs().max() <= 1e-5 * due_TD.abs().max()


def test_experts_that_are_chosen_one_by_one_are_what_the_reference_makes_of_them() -> None:
    """As Phi-3.5-MoE's. Stands against experts that are there no more, which would weigh like any other."""
    router, experts = mixture(7, 2, 16, sums_to_one=False)
    router = Router(router.weight_ND, replace(router.experts, margin=0.4))
    x_TD = rows(50)
    due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS)
    made_TD = CardMixture(router, experts)(x_TD, STEPS)
    assert (made_TD - due_TD).abs().max() <= 1e-5 * due_TD.abs().max()


@pytest.mark.parametrize(
    ("num_rows", "num_processors"),
    [(1, 1000), (6, 20), (50, 2), *slowly((1, 2), (1, 20), (6, 2), (6, 1000), (50, 20), (50, 1000))],
)
@pytest.mark.parametrize("bits", [8, 4, "floats"])
def test_codes_of_experts_in_words_are_what_the_reference_makes_of_them(
    num_rows: int, bits: Literal[8, 4, "floats"], num_processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel of other products with codes, of rows of 16 bits, in tiles of eight rows and of sixteen; of 200
    outputs, which fill no tile, and of two experts a row; codes that are floats with biases, and in eleven groups, of
    which four are read at a time. Stands against another expert's codes, scales or biases, rows of the second half of a
    tile that are taken for the first's, and a row's place in what enters taken for that in what leaves."""
    if not torch.cuda.is_available():
        found = SimpleNamespace(multi_processor_count=num_processors, major=8, minor=6)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    noise = torch.Generator().manual_seed(num_rows)

    def product(num_outputs: int, num_inputs: int) -> Linear:
        if bits == "floats":
            return of_floats(num_outputs, num_inputs, 0, torch.float16, noise)
        weight = (torch.randn(num_outputs, num_inputs, generator=noise) / num_inputs**0.5).to(DEVICE, torch.float16)
        return rounded_linear(weight, None, bits, None, reference=True)

    num_inputs = 352 if bits == "floats" else 384
    experts = [GatedMlp(product(2 * 128, num_inputs), product(200, 128)) for _ in range(5)]
    weight = (3 * torch.randn(5, num_inputs, generator=noise) / num_inputs**0.5).to(DEVICE)
    router = Router(weight, Experts(5, 2, sums_to_one=True), None)
    x_TD = torch.randn(num_rows, num_inputs, generator=noise).to(DEVICE, torch.float16)
    made = CardMixture(router, experts)
    assert made._gate_up._has_kernel
    chosen_TK, _ = router(x_TD)
    tiles, num_pairs = card_router.sorted_tiles(chosen_TK.int(), 5, IN_TURN), 2 * num_rows
    gated_PC = torch.randn(num_pairs, 128, generator=noise).to(DEVICE, torch.float16)
    of_both = (made._gate_up, x_TD, "gate_up"), (made._down, gated_PC, "down")
    for stack, x_XI, name in of_both:
        found_PO, each = stack(x_XI, tiles, num_pairs), num_pairs // len(x_XI)
        for pair, expert in enumerate(chosen_TK.flatten().tolist()):
            due_O = getattr(experts[expert], name)(x_XI[pair // each][None])[0]
            assert (found_PO[pair] - due_O).abs().max() <= 2**-8 * due_O.abs().max()


@pytest.mark.parametrize("sums_to_one", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_experts_of_other_groups_than_the_best_are_not_chosen(sigmoid: bool, sums_to_one: bool) -> None:
    """As in DeepSeek-V3, and V2. Stands against a row's groups taken for another's, and weights of a softmax over what
    is left."""
    router, experts = mixture(12, 3, 16, sums_to_one=sums_to_one, sigmoid=sigmoid, groups=(4, 2))
    x_TD = rows(20)
    due_TD, made_TD = Mixture(router, experts, whole=False)(x_TD, STEPS), CardMixture(router, experts)(x_TD, STEPS)
    assert (made_TD - due_TD).abs().max() <= 1e-5 * due_TD.abs().max()
    apart = Router(router.weight_ND, replace(router.experts, groups=1, groups_chosen=1), router.bias_N)
    assert (Mixture(apart, experts, whole=False)(x_TD, STEPS) - due_TD).abs().max() > 0.01, "no group was closed"


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("num_rows", [1, 6, 50])
def test_codes_that_are_floats_and_biases_are_what_the_reference_makes_of_them(
    num_rows: int, dtype: torch.dtype
) -> None:
    """As gpt-oss has them. Stands against exponents of a neighbouring group, a sign that is lost, a last block of
    groups that is not whole, a bias added once for each group, and one of a router left out of its choice."""
    noise = torch.Generator().manual_seed(num_rows)

    experts = [
        GatedMlp(of_floats(2 * CHANNELS, HIDDEN, 0, dtype, noise), of_floats(HIDDEN, CHANNELS, 24, dtype, noise))
        for _ in range(7)
    ]
    weight, bias = (3 * torch.randn(*size, generator=noise).to(DEVICE) for size in ((7, HIDDEN), (7,)))
    router = Router(weight / HIDDEN**0.5, Experts(7, 3, sums_to_one=True, biased=True), bias)
    x_TD = rows(num_rows).to(dtype)
    due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS).float()
    made_TD = CardMixture(router, experts)(x_TD, STEPS).float()
    assert (made_TD - due_TD).abs().max() <= ROUNDING[dtype] * due_TD.abs().max()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("table", "group"), [("nf4", 32), ("e2m1", 16), ("e4m3", 32)])
def test_experts_of_codes_of_a_table_are_what_the_reference_makes_of_them(
    table: Table, group: int, dtype: torch.dtype
) -> None:
    """As bitsandbytes has those that are matrices of their own, NVFP4 and FP8. Stands against codes that are read as
    numbers in even steps, as they are where nothing says otherwise, and gains of another expert."""
    noise = torch.Generator().manual_seed(0)

    def product(num_outputs: int, num_inputs: int, before: int) -> Linear:
        grid, gains = Grid(group, before % group, num_inputs), None
        codes = torch.randint(0, 16, (num_outputs, grid.width), generator=noise).to(torch.uint8)
        if table == "e4m3":
            codes = torch.randn(codes.shape, generator=noise).to(torch.float8_e4m3fn).view(torch.int8)
        scales = 0.1 * torch.rand(num_outputs, grid.num_groups, generator=noise)
        if table == "e2m1":
            scales = (100 * scales).to(torch.float8_e4m3fn).view(torch.uint8)
            gains = torch.rand(num_outputs, generator=noise) / 100
        return DequantizedLinear(Ready(Quantized(codes, scales, None, table, gains).to(DEVICE), grid), None)

    experts = [GatedMlp(product(2 * CHANNELS, HIDDEN, 0), product(HIDDEN, CHANNELS, 24)) for _ in range(5)]
    router = Router(torch.randn(5, HIDDEN, generator=noise).to(DEVICE), Experts(5, 2, sums_to_one=True))
    x_TD = rows(20).to(dtype)
    due_TD = Mixture(router, experts, whole=False)(x_TD, STEPS).float()
    made_TD = CardMixture(router, experts)(x_TD, STEPS).float()
    assert (made_TD - due_TD).abs().max() <= ROUNDING[dtype] * due_TD.abs().max()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_pair_is_in_one_tile_of_its_expert(data: st.DataObject) -> None:
    """However many there are, by the one program and by torch; those of padding are in none, also where all are; and
    there are never more tiles than are launched."""
    count = data.draw(st.integers(1, 12))
    chosen = data.draw(st.integers(1, count))
    row = st.permutations(range(count)).map(lambda order: order[:chosen])
    rows = row | st.just([-1] * chosen) if data.draw(st.booleans()) else row
    chosen_TK = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=40)), dtype=torch.int32, device=DEVICE)
    of_pair = [(pair, expert) for pair, expert in enumerate(chosen_TK.flatten().tolist()) if expert >= 0]
    by_a_kernel = card_router.sorted_tiles(chosen_TK, count, IN_TURN)
    for tiles in (by_a_kernel, card_router.sorted_by_torch(chosen_TK, count)):
        placed = [(pair, expert) for expert, pairs in _filled(tiles) for pair in pairs]
        assert sorted(placed) == of_pair
        assert all(pairs for _, pairs in _filled(tiles))


def _filled(tiles: Tiles) -> list[tuple[int, list[int]]]:
    both = zip(tiles.expert_L.tolist(), tiles.pairs_LR.tolist(), strict=True)
    return [(expert, [pair for pair in pairs if pair >= 0]) for expert, pairs in both if expert >= 0]


class Padded(TorchSteps):
    """Of rows whose slots are given."""

    def __init__(self, slots: list[int]) -> None:
        super().__init__(*GIVEN)
        self._slots_T = torch.tensor(slots, device=DEVICE)

    def slots(self, num_rows: int) -> torch.Tensor:  # type: ignore[override]
        return self._slots_T[:num_rows]


def test_padding_is_sent_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against experts read for rows that are none: of three rows and one of padding up to a quarter more."""
    router, experts = mixture(9, 2, 16)
    x_TD, real = rows(6), [0, 2, 5]
    sorted_tiles, made = card_experts.sorted_tiles, []
    monkeypatch.setattr(card_experts, "sorted_tiles", lambda *given: made.append(sorted_tiles(*given)) or made[-1])
    padded_TD = CardMixture(router, experts)(x_TD, Padded([7, -1, 3, -1, -1, 0]))
    assert (padded_TD[real] - CardMixture(router, experts)(x_TD[real], STEPS)).abs().max() <= 1e-5
    assert not padded_TD[[1, 3, 4]].any()
    chosen_TK, _ = router(x_TD)
    assert {expert for expert, _ in _filled(made[0])} == set(chosen_TK[real].flatten().tolist())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, as the interpreter
def test_a_router_of_nothing_but_nan_sends_rows_to_experts_that_exist() -> None:
    """Stands against reads beyond the weights: a mixture's NaN must reach the verdict, which says so."""
    router, experts = mixture(5, 2, 16)
    x_TD = rows(3)
    x_TD[1] = torch.nan
    made_TD = CardMixture(router, experts)(x_TD, STEPS)
    assert made_TD[1].isnan().all()
    assert made_TD[[0, 2]].isfinite().all()


def test_matrices_that_cannot_be_one_piece_are_refused() -> None:
    """Stands against experts of another layout read as the first's."""
    _, experts = mixture(3, 2, 16)
    _, small = mixture(3, 2, 8)
    for odd in (small[0].down, Scattered(experts[0].down, torch.arange(CHANNELS), CHANNELS)):
        with pytest.raises(UserError, match=r"run on CPUs only; should be stored alike"):
            Stack([experts[1].down, odd], 1)


def test_no_processor_is_left_without_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against the 4096 outputs of a matrix on a large card: 128 programs for 132 processors."""
    monkeypatch.setattr(card_experts, "num_processors", lambda device: 132)
    assert [card_experts.tile_outputs(count, DEVICE) for count in (4096, 6144, 28672)] == [16, 32, 32]
    monkeypatch.setattr(card_experts, "num_processors", lambda device: 82)
    assert card_experts.tile_outputs(4096, DEVICE) == 32
