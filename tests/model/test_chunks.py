"""Attention of many rows in C is that of torch, and of each row alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tpspec.model.chunks import CompiledAttend, compiled_attend
from tpspec.model.sight import Heads, Shape, Sight

CPU = torch.device("cpu")
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 1e-5}  # of the largest number


def attend_of(dim: int, dtype: torch.dtype = torch.float32) -> CompiledAttend | None:
    return compiled_attend(Shape(frozenset({Sight(Heads((0,), dim), None)}), dtype, CPU, 1.0, "silu"))  # type: ignore[return-value]


pytestmark = pytest.mark.skipif(attend_of(64) is None, reason="not built here, or no AVX-512")


def exact(q_GRE: Tensor, k_GSE: Tensor, v_GSE: Tensor, mask_RS: Tensor | None, scale: float) -> Tensor:
    mask = None if mask_RS is None else mask_RS.double()
    return F.scaled_dot_product_attention(q_GRE.double(), k_GSE.double(), v_GSE.double(), mask, scale=scale)


def mask_of(seen_RS: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen_RS.shape, dtype=dtype).masked_fill_(~seen_RS, float("-inf"))


@settings(deadline=None, max_examples=80)
@given(
    num_heads=st.integers(1, 3),
    num_rows=st.integers(1, 120),
    num_keys=st.integers(1, 200),
    dim=st.sampled_from([16, 48, 64, 128, 256, 576]),
    dtype=st.sampled_from(sorted(ROUNDING, key=str)),
    density=st.sampled_from([None, 0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_rows_meet_the_keys_they_see(
    num_heads: int, num_rows: int, num_keys: int, dim: int, dtype: torch.dtype, density: float | None, seed: int
) -> None:
    """In caches whose keys stand apart. Stands against a block that is not full, rows that fill no vector, a block that
    a row sees nothing of, before or after one that it does, and a maximum that comes late."""
    attend, noise = attend_of(dim, dtype), torch.Generator().manual_seed(seed)
    assert attend is not None
    q_GRE = 3 * torch.randn(num_heads, num_rows, dim, generator=noise).to(dtype)
    cache = torch.randn(2, num_heads, num_keys + 9, dim, generator=noise).to(dtype)
    k_GSE, v_GSE = cache[:, :, 4 : 4 + num_keys]
    mask_RS = None
    if density is not None:
        seen_RS = torch.rand(num_rows, num_keys, generator=noise) < density
        seen_RS[torch.arange(num_rows), torch.randint(num_keys, (num_rows,), generator=noise)] = True
        mask_RS = mask_of(seen_RS, dtype)
    made = attend(q_GRE, k_GSE, v_GSE, mask_RS, dim**-0.5)
    due = exact(q_GRE, k_GSE, v_GSE, mask_RS, dim**-0.5)
    assert (made.double() - due).abs().max() <= ROUNDING[dtype] * due.abs().max()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    """Whatever rows are beside it, one of NaNs too, and however many threads there are."""
    attend, noise = attend_of(64, dtype), torch.Generator().manual_seed(0)
    assert attend is not None
    q_GRE, k_GSE, v_GSE = (torch.randn(2, count, 64, generator=noise).to(dtype) for count in (75, 190, 190))
    mask_RS = mask_of(torch.ones(75, 190, dtype=torch.bool).tril(115), dtype)
    made = attend(q_GRE, k_GSE, v_GSE, mask_RS, 0.125)
    alone = [attend(q_GRE[:, r : r + 1], k_GSE, v_GSE, mask_RS[r : r + 1], 0.125) for r in range(75)]
    assert torch.equal(made, torch.cat(alone, 1))
    q_GRE[:, 5] = torch.nan
    spoilt = attend(q_GRE, k_GSE, v_GSE, mask_RS, 0.125)
    assert spoilt[:, 5].isnan().all()
    others = [r for r in range(75) if r != 5]
    assert torch.equal(spoilt[:, others], made[:, others])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(attend(q_GRE, k_GSE, v_GSE, mask_RS, 0.125)[:, others], made[:, others])
    finally:
        torch.set_num_threads(num_threads)


def test_shapes_that_it_is_not_made_for_take_torchs() -> None:
    assert attend_of(24) is None
    assert attend_of(592) is None
    assert attend_of(64, torch.float16) is None
    assert (
        compiled_attend(
            Shape(frozenset({Sight(Heads((0,), 64), None)}), torch.float32, torch.device("cuda"), 1.0, "silu")
        )
        is None
    )
