"""Products as kernels of ours compute them on a card. Without a card, in Triton's interpreter."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tests.slow import slowly
from tpspec.model.quantized import TABLES, DequantizedLinear, Quantized, Ready, Rounded
from tpspec.published.formats import Table
from tpspec.published.groups import Grid, grid_of

pytest.importorskip("triton")
from triton import knobs

from tpspec.model.card import coded as card_coded, codes as card_codes, rows as card_rows, tiles as card_tiles
from tpspec.model.card.coded import CodedLinear
from tpspec.model.card.fragments import FragmentLinear, product_of
from tpspec.model.card.overlap import IN_TURN
from tpspec.model.card.products import FewRowsLinear, TriedProduct, has_tensor_cores
from tpspec.model.card.tiles import CODED_TILES, FRAGMENT_TILES, GATED_TILES, TILES, Tile

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRID = grid_of(range(384), 384)[0]
NEAR = 0 if torch.cuda.is_available() else 2**-10  # the interpreter leaves products to the host's library
KINDS: list[tuple[Any, Literal[8, 4]]] = [(CodedLinear, 8), (CodedLinear, 4), (FragmentLinear, 4)]
of_codes = pytest.mark.parametrize(("kind", "bits"), KINDS)


def processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Where there is a card, Triton compiles for what torch says of the rest of it."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    found = SimpleNamespace(multi_processor_count=count, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize("num_rows", [0, 1, 6, 16, 17, 64, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_become_what_torch_makes_of_them(biased: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shard's 250 inputs, which are read as 256, and 70 outputs, which fill no tile. Stands against rows, columns
    or outputs that are read twice or not at all, and a column behind the last that is read as a number."""
    noise = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*size, generator=noise).to(DEVICE, torch.float16)
                       for size in ((70, 250), (70,), (num_rows, 250)))  # fmt: skip
    made = FewRowsLinear(weight, bias if biased else None)(x)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert made.shape == (num_rows, 70)
    assert made.dtype == torch.float16
    assert num_rows == 0 or (made - expected).abs().max() <= 2**-10 * expected.abs().max()


@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 64])
def test_a_row_becomes_the_same_in_whatever_tiles(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as tiles are tried for, less one, and 70 outputs, which fill no tiles; on a card to the last
    bit. Stands against columns that are added in another order, and rows or outputs that a tile leaves out."""
    processors(monkeypatch, 20)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: True)
    noise = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(size, 384, generator=noise).to(DEVICE, torch.float16) for size in (max(1, num_rows - 1), 70)
    )
    plain, coded = FewRowsLinear(weight, None), [CodedLinear(Rounded(weight, bits, GRID), None) for bits in (8, 4)]
    fragments = FragmentLinear(Rounded(weight, 4, GRID), None)
    ways = [[plain.few(x, tile) for tile in TILES.get(num_rows, ())]]
    ways += [[one.few(x, tile) for tile in CODED_TILES.get(num_rows, ())] for one in coded]
    ways += [[fragments.few(x, tile) for tile in FRAGMENT_TILES.get(num_rows, ())]]
    for usual, *others in filter(None, ways):
        for other in others:
            assert (other - usual).abs().max() <= NEAR * usual.abs().max()


def nvfp4(weight: torch.Tensor) -> Quantized:
    """About the weight: of outputs whose gains are all others'."""
    gains = 0.01 * torch.arange(1, len(weight) + 1, device=DEVICE) / len(weight)
    largest = weight.float().view(len(weight), -1, 16).abs().amax(2) / 6
    scales = (largest / gains[:, None]).to(torch.float8_e4m3fn)
    of_each = (scales.float() * gains[:, None]).repeat_interleave(16, 1)
    numbers = torch.tensor(TABLES["e2m1"], device=DEVICE)
    codes = ((weight.float() / of_each)[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
    return Quantized(codes, scales.view(torch.uint8), None, "e2m1", gains)


@pytest.mark.parametrize("gate", ["silu", "gelu", "clamped"])
@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 64])
def test_a_gate_is_what_it_is_by_a_kernel_of_its_own(num_rows: int, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 35 channels and what they gate, which begin in the middle of a tile; with biases and without. On a card to the
    last bit: the interpreter adds in another order, which rounding mostly hides. Stands against what is gated by
    another channel, and numbers that are not rounded where one kernel leaves them to the other."""
    processors(monkeypatch, 20)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: True)
    noise = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=noise).to(DEVICE, torch.float16)
                       for size in ((max(1, num_rows - 1), 384), (70, 384), (70,)))  # fmt: skip
    weight *= 0.1
    ways: list[TriedProduct[Any]] = [FewRowsLinear(weight, None), FewRowsLinear(weight, bias)]
    ways += [kind(Rounded(weight, bits, GRID), None) for kind, bits in KINDS]
    ways += [CodedLinear(Ready(nvfp4(weight), Grid(16, 0, 384)), None)]
    for product in ways:
        both = product(x)
        expected = torch.empty(len(x), 35, dtype=torch.float16, device=DEVICE)
        card_rows.gate[(len(x), 1)](both, expected, 35, 0.0, wide=64, kind=gate, **IN_TURN)
        for tile in filter(None, product.gated_tiles.get(num_rows, ())):
            made = product.few(x, tile, gate)
            assert (made != expected).double().mean() <= (0 if torch.cuda.is_available() else 0.05)
            assert (made - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert not CodedLinear(Rounded(weight, 8, GRID), bias).gated_tiles  # a bias is added behind the product


def test_what_a_trial_finds_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products and of gates, each for themselves. Stands against a place among the one's tiles that is taken for one
    among the other's."""
    found = []
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(card_tiles, "LEAST_BYTES", 0)
    monkeypatch.setattr(card_tiles, "_chosen", {})
    monkeypatch.setattr(card_tiles, "seconds", lambda works, device: [0.9**i for i in range(len(works))])  # the last
    monkeypatch.setattr(torch, "equal", lambda one, other: True)  # the interpreter adds in another order
    few = FewRowsLinear.few

    def noted(product: FewRowsLinear, x_TI: torch.Tensor, tile: Tile, gate: str = "") -> torch.Tensor:
        found.append((len(x_TI), tile, gate))
        return few(product, x_TI, tile, gate)

    monkeypatch.setattr(FewRowsLinear, "few", noted)
    weight = torch.zeros(16, 32, dtype=torch.float16, device=DEVICE)
    product, given = FewRowsLinear(weight, None), {rows: weight[:1].expand(rows, -1) for rows in TILES}
    found.clear()
    for x_TI in given.values():
        product(x_TI)
    assert found == [(rows, tiles[-1], "") for rows, tiles in TILES.items()]
    product.gated(given[1], "silu", lambda both: both[:, :8])
    found.clear()
    for x_TI in given.values():
        product.gated(x_TI, "silu", lambda both: both[:, :8])
    assert found == [(rows, tiles[-1], "silu") for rows, tiles in GATED_TILES.items()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter leaves products to the host's library")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_how_many_stand_beside_it(dtype: torch.dtype) -> None:
    """To the last bit. Stands against another kernel, or another order of sums, for another number of rows."""
    noise = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*size, generator=noise).to(DEVICE, dtype) for size in ((4096, 4096), (64, 4096)))
    product = FewRowsLinear(weight, None)
    whole = product(x)
    assert all(torch.equal(product(x[:count]), whole[:count]) for count in (1, 2, 6, 7, 16, 33))


@of_codes
@pytest.mark.parametrize("num_processors", [1, 1000])
@pytest.mark.parametrize("on_tensor_cores", [False, True])
def test_codes_are_what_their_weights_are_however_many_groups_are_read_at_once(
    on_tensor_cores: bool, num_processors: int, bits: Literal[8, 4], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against outputs that no program has, or two have, of 70, which fill no tiles; and groups beyond the last:
    three are no multiple of two, or four."""
    processors(monkeypatch, num_processors)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: on_tensor_cores)
    noise = torch.Generator().manual_seed(0)
    grid, read = grid_of(range(320, 630), 640)
    assert grid.num_groups == 3
    matrix = Rounded(torch.randn(70, len(read), generator=noise).to(DEVICE), bits, grid)
    for dtype, near in ((torch.float32, 1e-5), (torch.float16, 2**-9)):
        x = torch.randn(18, 310, generator=noise).to(DEVICE, dtype)
        expected = DequantizedLinear(matrix, None)(x)
        assert (kind(matrix, None)(x) - expected).abs().max() <= near * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_are_computed_in_larger_tiles(bits: Literal[8, 4], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against rows or outputs beyond the first tile: 130 and 150 fill no number of them. In 16 bits, for which
    alone there are such tiles."""
    processors(monkeypatch, 20)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: True)
    noise = torch.Generator().manual_seed(0)
    grid, read = grid_of(range(320, 570), 576)
    matrix = Rounded(torch.randn(150, len(read), generator=noise).to(DEVICE), bits, grid)
    x = torch.randn(130, 250, generator=noise).to(DEVICE, torch.float16)
    expected = DequantizedLinear(matrix, None)(x)
    assert (CodedLinear(matrix, None)(x) - expected).abs().max() <= 2**-9 * expected.abs().max()


@of_codes
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    "kinds",
    [
        (torch.float32, None),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_groups_with_zeros_and_without_and_no_row_at_all(
    kinds: tuple[torch.dtype, torch.dtype | None],
    group: int,
    bits: Literal[8, 4],
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No row is what a head has of a chunk of a prompt of which no logits are wanted. Stands against zeros that only
    four bits have, a zero that is taken for its scale where both are one word, or is one with a scale of another kind,
    and against what each group reads added up where nothing can be cut into groups. In 16 bits groups are added side by
    side."""
    processors(monkeypatch, 20)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: True)
    noise = torch.Generator().manual_seed(0)
    low, high, codes_kind = (-128, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (70, 512), generator=noise).to(codes_kind)
    scales, zeros = (
        None if dtype is None else (torch.rand(70, 512 // group, generator=noise) - more).to(dtype)
        for dtype, more in zip(kinds, (-0.5, 1.0), strict=True)
    )
    assert scales is not None
    matrix = Ready(Quantized(codes, scales, zeros).to(DEVICE), Grid(group, 0, 512))
    product = kind(matrix, None)
    assert product(torch.zeros(0, 512, device=DEVICE)).shape == (0, 70)
    for dtype, near in ((torch.float32, 1e-5), (torch.float16, 2**-9), (torch.bfloat16, 2**-7)):
        x = torch.randn(2, 512, generator=noise).to(DEVICE, dtype)
        expected = DequantizedLinear(matrix, None)(x)
        assert (product(x) - expected).abs().max() <= near * expected.abs().max()


def tabled(table: Table, group: int, *, has_gains: bool, num_outputs: int = 70) -> Ready:
    """370 inputs of 384 columns."""
    noise = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (num_outputs, 384), generator=noise).to(torch.uint8)
    if table == "e4m3":
        codes = torch.randn(num_outputs, 384, generator=noise).to(torch.float8_e4m3fn).view(torch.int8)
    scales, gains = torch.rand(num_outputs, 384 // group, generator=noise) + 0.5, None
    if table == "e2m1":
        low, high = (0, 127) if has_gains else (120, 126)
        scales = torch.randint(low, high, scales.shape, generator=noise).to(torch.uint8)
        gains = torch.rand(num_outputs, generator=noise) * 1e-2 if has_gains else None
    return Ready(Quantized(codes, scales, None, table, gains).to(DEVICE), Grid(group, 8, 370))


TABLED: list[tuple[Table, int, bool]] = [(table, group, False) for table in ("nf4", "fp4") for group in (32, 64, 128)]
TABLED += [("e2m1", 32, False), ("e2m1", 16, True)]  # MXFP4, NVFP4
TABLED += [("e4m3", 32, False), ("e4m3", 128, False)]


@pytest.mark.parametrize(
    ("table", "group", "has_gains", "on_tensor_cores"),
    [*((*case, True) for case in TABLED), *slowly(*((*case, False) for case in TABLED))],
)
def test_codes_of_a_table_are_what_it_has_for_them(
    table: Table, group: int, has_gains: bool, on_tensor_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows, and of as many as larger tiles are for. Stands against the middle of codes that are numbers, which
    is taken off in the end, and a card on which fragments, that know no table, make a product of such codes; and, where
    scales are bytes, against those of a neighbour, columns beyond the last, and gains of other outputs."""
    processors(monkeypatch, 20)
    monkeypatch.setattr(card_coded, "has_tensor_cores", lambda device: on_tensor_cores)
    noise, matrix = torch.Generator().manual_seed(0), tabled(table, group, has_gains=has_gains)
    product = product_of(matrix, None, DEVICE)
    assert isinstance(product, CodedLinear)
    for dtype, near in ((torch.float32, 1e-5), (torch.float16, 2**-9), (torch.bfloat16, 2**-7)):
        for num_rows in (1, 7, 66):
            x = torch.randn(num_rows, 370, generator=noise).to(DEVICE, dtype)
            expected = DequantizedLinear(matrix, None)(x)
            assert (product(x) - expected).abs().max() <= near * expected.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter leaves products to the host's library")
@of_codes
def test_a_row_of_codes_does_not_depend_on_how_many_stand_beside_it(bits: Literal[8, 4], kind: Any) -> None:
    """To the last bit, as of 16 bits."""
    noise = torch.Generator().manual_seed(0)
    matrix = Rounded(torch.randn(4096, 4096, generator=noise).to(DEVICE), bits, grid_of(range(4096), 4096)[0])
    product, x = kind(matrix, None), torch.randn(64, 4096, generator=noise).to(DEVICE, torch.bfloat16)
    whole = product(x)
    assert all(torch.equal(product(x[:count]), whole[:count]) for count in (1, 2, 6, 7, 16, 33))


@pytest.mark.parametrize(("dtype", "bits"), card_codes.FLOATS, ids=str)
def test_the_instructions_that_a_card_is_given_make_floats_of_codes(dtype: torch.dtype, bits: int) -> None:
    """Exactly, of all codes, of both words of a register. The interpreter takes none: stands against a constant of the
    other kind of float, a code that is another's, and what is right of every second word only."""
    name, in_a_word = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[dtype], 16 // bits
    codes = torch.arange(2**bits).repeat(8)[torch.randperm(8 * 2**bits, generator=torch.Generator().manual_seed(0))]
    codes = codes.to(torch.uint8) if bits == 4 else codes.to(torch.uint8).view(torch.int8)
    words = card_codes.in_words(codes.view(1, -1), in_a_word, 64).numpy().view(np.uint32).ravel()
    given = getattr(card_codes, f"_{name}_{bits}").value
    assert len(given) == in_a_word
    for part, ptx in enumerate(given):
        made = torch.from_numpy(floats_by(getattr(ptx, "value", ptx), words, dtype))
        due = codes.view(-1, in_a_word, 64 // in_a_word)[:, part].flatten().double()
        assert torch.equal(made, due - 8 * (bits == 4) + card_codes.FLOATS[dtype, bits].more)


@pytest.mark.parametrize("dtype", card_codes.MINIFLOATS, ids=str)
def test_the_instructions_that_a_card_is_given_make_floats_of_codes_that_are_floats(dtype: torch.dtype) -> None:
    """The same: stands against a sign that is lost, a half that comes from a code of zero, and what is no number."""
    name = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[dtype]
    codes = torch.arange(16).repeat(16)[torch.randperm(256, generator=torch.Generator().manual_seed(0))].to(torch.uint8)
    words = card_codes.in_words(codes.view(1, -1), 4, 64).numpy().view(np.uint32).ravel()
    given = getattr(card_codes, f"_MINI_{name}").value
    for part, ptx in enumerate(given):
        made = torch.from_numpy(floats_by(getattr(ptx, "value", ptx), words, dtype))
        due = torch.tensor(TABLES["e2m1"]).double()[codes.view(-1, 4, 16)[:, part].flatten().long()]
        assert torch.equal(made, due)
    assert len(given) == 4


@pytest.mark.parametrize("dtype", card_codes.EIGHTS, ids=str)
def test_the_instructions_that_a_card_is_given_make_floats_of_bytes(dtype: torch.dtype) -> None:
    """The same, of E4M3, but for what is no number: stands against the least, which are floats of another kind."""
    name = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[dtype]
    codes = torch.tensor([code for code in range(256) if code & 127 < 127] + [0, 1])
    codes = codes.repeat(4)[torch.randperm(1024, generator=torch.Generator().manual_seed(0))].to(torch.uint8)
    words = card_codes.in_words(codes.view(torch.int8).view(1, -1), 2, 64).numpy().view(np.uint32).ravel()
    given = getattr(card_codes, f"_E4M3_{name}").value
    for part, ptx in enumerate(given):
        made = torch.from_numpy(floats_by(getattr(ptx, "value", ptx), words, dtype))
        assert torch.equal(made, codes.view(torch.float8_e4m3fn).view(-1, 2, 32)[:, part].flatten().double())
    assert len(given) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_the_instructions_that_a_card_is_given_look_codes_up(table: Table, dtype: torch.dtype) -> None:
    """The same: stands against halves of a table that change places, bytes of another code's number, and a code whose
    neighbour in the word chooses for it."""
    name = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[dtype]
    codes = (
        torch.arange(16).repeat(64)[torch.randperm(1024, generator=torch.Generator().manual_seed(0))].to(torch.uint8)
    )
    words = card_codes.in_words(codes.view(1, -1), 4, 64).numpy().view(np.uint32).ravel()
    given = getattr(card_codes, f"_{table.upper()}_{name}").value
    for part, ptx in enumerate(given):
        made = torch.from_numpy(floats_by(getattr(ptx, "value", ptx), words, dtype))
        due = torch.tensor(TABLES[table]).to(dtype).double()[codes.view(-1, 4, 16)[:, part].flatten().long()]
        assert torch.equal(made, due)
    assert len(given) == 4


def floats_by(ptx: str, words: NDArray[np.uint32], dtype: torch.dtype) -> NDArray[np.float64]:
    """What PTX of a few instructions makes of each register: two floats, the lower half first."""
    registers = {"$1": words}

    def number(name: str) -> NDArray[np.uint32]:
        return registers[name] if name in registers else np.full_like(words, int(name, 0))

    for line in filter(None, map(str.strip, ptx.strip().strip("{}").split(";"))):
        instruction, *names = re.split(r",?\s+", line)
        if instruction == ".reg":
            continue
        given = [number(name) for name in names[1:]]
        if instruction == "mov.b32":
            (registers[names[0]],) = given
        elif instruction in ("shr.b32", "shl.b32"):
            registers[names[0]] = given[0] >> given[1] if instruction == "shr.b32" else given[0] << given[1]
        elif instruction == "and.b32":
            registers[names[0]] = given[0] & given[1]
        elif instruction == "prmt.b32":
            registers[names[0]] = permuted(*given)
        elif instruction == "lop3.b32":
            first, second, third = (np.unpackbits(one.view(np.uint8)) for one in given[:3])
            chosen = first << 2 | second << 1 | third
            registers[names[0]] = np.packbits(int(names[4], 0) >> chosen.astype(int) & 1).view(np.uint32)
        else:
            assert instruction == f"fma.rn.{'bf' if dtype == torch.bfloat16 else 'f'}16x2"
            factor, by, added = (as_floats(one, dtype) for one in given)
            return (factor * by + added).numpy()
    return as_floats(registers["$0"], dtype).numpy()


def permuted(low: NDArray[np.uint32], high: NDArray[np.uint32], places: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """prmt: each nibble of the lower half of `places` names one of eight bytes, or, with its highest bit, asks for the
    sign of that byte eight times (PTX ISA)."""
    both = np.concatenate([low.view(np.uint8).reshape(-1, 4), high.view(np.uint8).reshape(-1, 4)], 1)
    made = np.zeros((len(low), 4), np.uint8)
    for at in range(4):
        nibble = places >> np.uint32(4 * at) & np.uint32(15)
        byte = both[np.arange(len(low)), nibble & 7]
        made[:, at] = np.where(nibble & 8, 255 * (byte >> 7), byte)
    return made.view(np.uint32).ravel()


def as_floats(registers: NDArray[np.uint32], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(registers.view(np.int16).copy()).view(dtype).double()


def test_tensor_cores_are_left_to_cards_that_have_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against products by those of a 2080 Ti, which Triton has none of."""
    told = {(7, 5): False, (8, 0): True, (8, 6): True, (12, 0): True}
    for capability, due in told.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_tensor_cores(DEVICE) == due
