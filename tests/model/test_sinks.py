"""A sink takes its part of a softmax, and has no value. Parity of a whole model that has some is tests/parity's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tpspec.model.attention import KEY_BLOCK, Attend, fused, stable
from tpspec.model.chunks import compiled_attend
from tpspec.model.sight import Heads, Shape, Sight

SHAPE = Shape(frozenset({Sight(Heads((0,), 16), None)}), torch.float32, torch.device("cpu"), 0.25, "silu")
WAYS: dict[str, Attend | None] = {"fused": fused, "stable": stable, "compiled": compiled_attend(SHAPE)}


@pytest.fixture(params=WAYS, scope="module")
def attend(request: pytest.FixtureRequest) -> Attend:
    return WAYS[request.param] or pytest.skip("not built here, or no AVX-512")


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.integers(1, 60), num_keys=st.integers(1, 150), strength=st.sampled_from([1, 30]), masked=st.booleans(),
    cap=st.sampled_from([None, 0.5, 50.0]),
)  # fmt: skip
def test_a_sink_is_a_score_without_a_value(
    attend: Attend, num_rows: int, num_keys: int, strength: int, masked: bool, cap: float | None
) -> None:
    """Stands against a sink that is scaled as scores are, or capped, another row's or head's, one that a mask hides,
    and sums that overflow where it is far above all scores or far below; and keys that a cap makes seen."""
    noise = torch.Generator().manual_seed(num_rows + num_keys)
    q, k, v = (torch.randn(2, size, 16, generator=noise) for size in (num_rows, num_keys, num_keys))
    sinks = strength * torch.randn(2, num_rows, generator=noise)
    mask = torch.where(torch.rand(num_rows, num_keys, generator=noise) < 0.5, 0.0, float("-inf"))
    mask[:, 0] = 0
    scores = 0.25 * q.double() @ k.double().transpose(1, 2)
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    scores += mask if masked else 0
    odds = torch.cat([scores, sinks.double().unsqueeze(2)], 2).softmax(2)[..., :-1]
    made = attend(q, k, v, mask if masked else None, 0.25, sinks, cap)
    assert (made - odds @ v.double()).abs().max() <= 1e-5 * v.abs().max()


@pytest.mark.parametrize("shift", [1, 5, 40])
def test_a_row_beside_a_sink_has_the_same_bits_wherever_its_keys_are(shift: int) -> None:
    """In a window they begin elsewhere in a chunk than alone (deterministic). Stands against a sink that has a place
    among them, so that other numbers are summed first."""
    noise = torch.Generator().manual_seed(shift)
    q, k, v = (torch.randn(1, size, 16, generator=noise) for size in (4, 8, 8))
    sinks, made = torch.randn(1, 4, generator=noise), []
    for first in (0, shift):
        keys, values = torch.zeros(2, 1, KEY_BLOCK, 16)
        mask = torch.full((4, KEY_BLOCK), float("-inf"))
        keys[:, first : first + 8], values[:, first : first + 8], mask[:, first : first + 8] = k, v, 0
        made.append(stable(q, keys, values, mask, 0.25, sinks))
    assert torch.equal(made[0], made[1])
