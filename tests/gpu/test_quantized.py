"""On a CUDA card weights of 8 and 4 bits give what the dequantized weights give. Run with: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.model import published
from tests.worlds import serve, topology
from tpspec.model.linear import quantized_linear
from tpspec.model.quantized import DequantizedLinear, Quantized, Ready, Rounded
from tpspec.published.groups import Grid, grid_of
from tpspec.request import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 33, 130])
@pytest.mark.parametrize(("size", "columns"), [(576, range(576)), (576, range(320, 570)), (4096, range(1024, 3072))])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_cards_product_is_the_dequantized_one(
    bits: Any, size: int, columns: range, num_rows: int, dtype: torch.dtype
) -> None:
    """Stands against nibbles, groups or zeros in another order than the kernel's. Four bits compute in bfloat16."""
    noise = torch.Generator().manual_seed(0)
    grid, read = grid_of(columns, size)
    weight = torch.randn(70, len(read), generator=noise).to(CUDA, dtype)
    bias = torch.randn(70, generator=noise).to(CUDA, dtype)
    x = torch.randn(num_rows, len(columns), generator=noise).to(CUDA, dtype)
    matrix = Rounded(weight, bits, grid)
    y = quantized_linear(matrix, bias, CUDA)(x)
    expected = DequantizedLinear(matrix, bias)(x)
    eps = 2**-6 if bits == 4 or dtype == torch.bfloat16 else 2**-9
    assert (y - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_cards_product_takes_what_others_quantized(bits: Any, has_zeros: bool) -> None:
    """Stands against zeros that only four bits have, and a kernel that reads float32 scales as bfloat16."""
    noise, kind = torch.Generator().manual_seed(0), torch.int8 if bits == 8 else torch.uint8
    codes = torch.randint(-128 if bits == 8 else 0, 128 if bits == 8 else 16, (70, 512), generator=noise).to(kind)
    scales, zeros = (torch.rand(70, 4, generator=noise) + 0.5 for _ in "sz")
    matrix = Ready(Quantized(codes, scales, zeros if has_zeros else None).to(CUDA), Grid(128, 0, 512))
    x = torch.randn(7, 512, generator=noise).to(CUDA, torch.bfloat16)
    expected = DequantizedLinear(matrix, None)(x)
    assert (quantized_linear(matrix, None, CUDA)(x) - expected).abs().max() <= 2**-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 33, 130])
@pytest.mark.parametrize(("table", "group"), [("nf4", 64), ("fp4", 64), ("e2m1", 16), ("e4m3", 128)])
def test_the_cards_product_looks_codes_up(table: Any, group: int, num_rows: int, dtype: torch.dtype) -> None:
    """As bitsandbytes has them, NVFP4 and FP8. Stands against instructions that look up what the interpreter, which has
    others, does not see."""
    noise = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (70, 1024), generator=noise).to(torch.uint8)
    if table == "e4m3":
        codes = torch.randn(70, 1024, generator=noise).to(torch.float8_e4m3fn).view(torch.int8)
    scales, gains = torch.rand(70, 1024 // group, generator=noise) + 0.5, None
    if table == "e2m1":
        scales, gains = scales.to(torch.float8_e4m3fn).view(torch.uint8), torch.rand(70, generator=noise)
    matrix = Ready(Quantized(codes, scales, None, table, gains).to(CUDA), Grid(group, 0, 1024))
    x = torch.randn(num_rows, 1024, generator=noise).to(CUDA, dtype)
    expected = DequantizedLinear(matrix, None)(x)
    eps = {torch.float32: 1e-4, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    assert (quantized_linear(matrix, None, CUDA)(x) - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_world_on_a_card_runs_with_small_weights(kind: str, tmp_path: Path) -> None:
    """Stands against a loader that quantizes on another device than it computes on."""
    keys = {"target": {"quantize": kind, "dtype": "bfloat16"}, "draft": {"source": "ngram", "tokens": 3}}
    made = topology(tiny("llama", tmp_path), device="cuda", **keys)
    (text,) = serve(made, [Request(0, (5, 6, 7, 8) * 3, 16)], device=CUDA).texts()
    assert len(text) == 16


@pytest.mark.parametrize("form", published.of_tables().values(), ids=published.of_tables())
def test_a_published_checkpoint_writes_on_a_card_what_it_writes_without(form: published.Format, tmp_path: Path) -> None:
    """In float32. Stands against codes that a card reads otherwise than the host has laid them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    plain = tiny("llama", tmp_path / "plain", **sizes, intermediate_size=128)
    folder, _ = published.publish(plain, tmp_path, form)
    keys = {"target": {"dtype": "float32"}, "draft": {"source": "ngram", "tokens": 3}}
    asks = [Request(0, (5, 6, 7, 8) * 3, 16)]
    told = serve(topology(folder, device="cuda", **keys), asks, device=CUDA)
    assert told.texts() == serve(topology(folder, **keys), asks).texts()
