"""Products with weights of 8 bits as a card computes them. Without a card, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tpspec.model.quantized import DequantizedLinear, Rounded
from tpspec.topology.groups import grid_of

pytest.importorskip("triton")
from tpspec.model.card_products import EightBitLinear, tile_outputs

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    found = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize("num_processors", [1, 1000])
def test_wide_and_narrow_tiles_compute_the_same_product(num_processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against outputs that no program has, or two have; 70 are no multiple of either tile."""
    processors(monkeypatch, num_processors)
    noise = torch.Generator().manual_seed(0)
    grid, read = grid_of(range(320, 570), 576)
    matrix = Rounded(torch.randn(70, len(read), generator=noise).to(DEVICE), 8, grid)
    x = torch.randn(18, 250, generator=noise).to(DEVICE)
    expected = DequantizedLinear(matrix, None)(x)
    assert (EightBitLinear(matrix, None)(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_no_processor_is_left_without_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against the 4096 outputs of an 8B model on a large card: 128 programs for 132 processors."""
    processors(monkeypatch, 132)
    assert [tile_outputs(count, DEVICE) for count in (4096, 6144, 28672)] == [16, 32, 32]
    processors(monkeypatch, 82)
    assert tile_outputs(4096, DEVICE) == 32
