"""Products as kernels of ours compute them on a card. Without a card, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from tpspec.model.quantized import DequantizedLinear, Quantized, Ready, Rounded
from tpspec.topology.groups import Grid, grid_of

pytest.importorskip("triton")
from tpspec.model import card_products
from tpspec.model.card_products import CodedLinear, FewRowsLinear, has_tensor_cores, tile_outputs

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Where there is a card, Triton compiles for what torch says of the rest of it."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    found = SimpleNamespace(multi_processor_count=count, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize("num_rows", [0, 1, 6, 16, 17, 64, 65])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_processors", [1, 1000])
def test_few_rows_become_what_torch_makes_of_them(
    num_processors: int, biased: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shard's 250 inputs, which are read as 256, and 70 outputs, which fill no tile. Stands against rows, columns
    or outputs that are read twice or not at all, and a column behind the last that is read as a number."""
    processors(monkeypatch, num_processors)
    noise = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*size, generator=noise).to(DEVICE, torch.float16)
                       for size in ((70, 250), (70,), (num_rows, 250)))  # fmt: skip
    made = FewRowsLinear(weight, bias if biased else None)(x)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert made.shape == (num_rows, 70)
    assert made.dtype == torch.float16
    assert num_rows == 0 or (made - expected).abs().max() <= 2**-10 * expected.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter leaves products to the host's library")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_how_many_stand_beside_it(dtype: torch.dtype) -> None:
    """To the last bit. Stands against another kernel, or another order of sums, for another number of rows."""
    noise = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*size, generator=noise).to(DEVICE, dtype) for size in ((4096, 4096), (64, 4096)))
    product = FewRowsLinear(weight, None)
    whole = product(x)
    assert all(torch.equal(product(x[:count]), whole[:count]) for count in (1, 2, 6, 7, 16, 33))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_processors", [1, 1000])
def test_wide_and_narrow_tiles_compute_the_same_product(
    num_processors: int, bits: Literal[8, 4], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands against outputs that no program has, or two have; 70 are no multiple of either tile. Four bits as on cards
    that torch's kernel does not run on."""
    processors(monkeypatch, num_processors)
    noise = torch.Generator().manual_seed(0)
    grid, read = grid_of(range(320, 570), 576)
    matrix = Rounded(torch.randn(70, len(read), generator=noise).to(DEVICE), bits, grid)
    x = torch.randn(18, 250, generator=noise).to(DEVICE)
    expected = DequantizedLinear(matrix, None)(x)
    assert (CodedLinear(matrix, None)(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_many_rows_are_computed_in_larger_tiles(bits: Literal[8, 4], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against rows or outputs beyond the first tile: 130 and 150 fill no number of them. In 16 bits, for which
    alone there are such tiles."""
    processors(monkeypatch, 20)
    monkeypatch.setattr(card_products, "has_tensor_cores", lambda device: True)
    noise = torch.Generator().manual_seed(0)
    grid, read = grid_of(range(320, 570), 576)
    matrix = Rounded(torch.randn(150, len(read), generator=noise).to(DEVICE), bits, grid)
    x = torch.randn(130, 250, generator=noise).to(DEVICE, torch.float16)
    expected = DequantizedLinear(matrix, None)(x)
    assert (CodedLinear(matrix, None)(x) - expected).abs().max() <= 2**-9 * expected.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_groups_with_zeros_and_without_and_no_row_at_all(
    has_zeros: bool, bits: Literal[8, 4], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is what a head has of a chunk of a prompt of which no logits are wanted. Stands against zeros that only
    four bits have, and against what each group reads added up where nothing can be cut into groups."""
    processors(monkeypatch, 20)
    noise = torch.Generator().manual_seed(0)
    low, high, kind = (-128, 128, torch.int8) if bits == 8 else (0, 16, torch.uint8)
    codes = torch.randint(low, high, (70, 512), generator=noise).to(kind)
    scales, zeros = (torch.rand(70, 4, generator=noise) + 0.5 for _ in "sz")
    matrix = Ready(Quantized(codes, scales, zeros if has_zeros else None).to(DEVICE), Grid(128, 0, 512))
    product = CodedLinear(matrix, None)
    assert product(torch.zeros(0, 512, device=DEVICE)).shape == (0, 70)
    x = torch.randn(2, 512, generator=noise).to(DEVICE)
    expected = DequantizedLinear(matrix, None)(x)
    assert (product(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_no_processor_is_left_without_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against the 4096 outputs of an 8B model on a large card: 128 programs for 132 processors."""
    processors(monkeypatch, 132)
    assert [tile_outputs(count, DEVICE) for count in (4096, 6144, 28672)] == [16, 32, 32]
    processors(monkeypatch, 82)
    assert tile_outputs(4096, DEVICE) == 32


def test_torchs_kernel_is_left_to_cards_that_have_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against products of nothing on a 2080 Ti, for which torch builds it empty. (Triton has none of its tensor
    cores, either.)"""
    told = {(7, 5): False, (8, 0): True, (8, 6): True, (12, 0): True}
    for capability, due in told.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_tensor_cores(DEVICE) == due
