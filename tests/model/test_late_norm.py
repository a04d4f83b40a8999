"""A norm over heads of several ranks, made behind the sum of what these make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from tests.checkpoints import tiny
from tests.worlds import serve, topology
from tpspec.cache.store import Kept, KVStore
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.comm.threads import ThreadWorld
from tpspec.model.late_norm import LateNorm, beside
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.steps import AddNorm
from tpspec.model.torch_steps import TorchSteps, WithoutKernels
from tpspec.request import Request, Sampling

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
CARD = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter rounds to the former otherwise
ROWS, DIM, EPS = 3, 12, 1e-3


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_parts_of_ranks_come_to_have_the_norm_of_all(sizes: list[int], dtype: torch.dtype) -> None:
    """In 16 bits as exactly as the product is. Stands against squares of a rank that count twice or not at all, or of
    which eight bits are told."""
    x_TX, weight_DX = noise(ROWS, sum(sizes)).to(dtype), noise(DIM, sum(sizes), seed=1)
    late = LateNorm(sum(sizes), EPS)
    steps: Any = WithoutKernels()  # of whose verbs one is needed
    parts = [part.to(dtype) for part in torch.split(weight_DX, sizes, 1)]
    made = [F.linear(x, weight) for x, weight in zip(torch.split(x_TX, sizes, 1), parts, strict=True)]

    def rank(comm: OneRank) -> torch.Tensor:
        own_TX = torch.split(x_TX, sizes, 1)[comm.rank].float()
        squares_T = own_TX.square().sum(1)
        partial_TY = late.partly(made[comm.rank], squares_T, steps, comm)
        return late.normed(comm.all_reduce(partial_TY, Purpose.attention), DIM)

    scale_T1 = torch.rsqrt(x_TX.float().square().mean(1, keepdim=True) + EPS)
    total_TD = sum(part.float() for part in made)
    wanted_TD = total_TD * scale_T1
    for told_TD in ThreadWorld(len(sizes)).run(rank):
        off = 1e-5 if dtype == torch.float32 else 2**-7  # the sum is rounded, and then the norm
        assert (told_TD.float() - wanted_TD).abs().max() <= off * wanted_TD.abs().max()


@given(st.floats(1e-30, 1e30))
def test_squares_are_told_to_sixteen_bits_in_columns_of_eight(squares: float) -> None:
    told = beside(torch.zeros(1, DIM, dtype=torch.bfloat16), torch.tensor([squares]), 1, 3)
    assert told.shape == (1, DIM + 6)
    assert not told[0, [*range(DIM + 2), DIM + 4, DIM + 5]].any()
    assert told[0, DIM:].float().sum().item() == pytest.approx(squares, rel=2**-16)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(("dim", "rank", "size"), [(12, 0, 1), (96, 2, 3), (1025, 1, 2), (2048, 7, 8)], ids=str)
def test_a_card_makes_what_torch_makes(dim: int, rank: int, size: int, dtype: torch.dtype) -> None:
    """Stands against columns beyond a program's, and another rank's."""
    card = pytest.importorskip("tpspec.model.card.steps", reason="no Triton")
    shape = Shape(frozenset({Sight(Heads((0,), 16), None)}), dtype, CARD, 1.0, "silu")
    store = KVStore({0: Kept(1, 16)}, 64, dtype, CARD)
    steps = card.CardSteps(shape, [], store, dict.fromkeys(shape.heads, card.Tiling(32, 16, 0, 64)))
    made_TD, squares_T = noise(ROWS, dim).to(CARD, dtype), 40 * noise(ROWS, seed=1).square().to(CARD)
    told_TY = steps.beside(made_TD, squares_T, rank, size)
    assert torch.equal(told_TY, beside(made_TD, squares_T, rank, size))
    late = LateNorm(300, EPS)
    wanted_TD = late.normed(told_TY, dim)
    assert (steps.normed_late(told_TY, late, dim).float() - wanted_TD.float()).abs().max() < (
        1e-5 if dtype == torch.float32 else 4e-3 * wanted_TD.abs().max()
    )


def test_what_is_normed_late_is_normed_before_it_is_added() -> None:
    """Stands against a kernel that sums over ranks, and adds what has columns beside it."""
    x_TD, late = noise(ROWS, DIM), LateNorm(30, EPS)
    total_TY = beside(noise(ROWS, DIM, seed=1), torch.full((ROWS,), 50.0), 0, 2)
    shape = Shape(frozenset({Sight(Heads((0,), 16), None)}), torch.float32, torch.device("cpu"), 1.0, "silu")
    steps = TorchSteps(shape, [], KVStore({0: Kept(1, 16)}, 64, torch.float32, torch.device("cpu")), None)
    then = AddNorm(steps, x_TD, None, late=late)
    nobody: Any = None
    assert then.with_peers(total_TY, nobody) is None
    made_TD, _ = then(total_TY)
    assert torch.allclose(made_TD, x_TD + total_TY[:, :DIM] * (50 / 30 + EPS) ** -0.5)


@pytest.mark.parametrize(
    ("weights", "keys"), [((1.0, 2.0), {}), ((3.0, 1.0, 2.0), {}), ((1.0, 1.0), {"deterministic": True})], ids=str
)
def test_texts_do_not_depend_on_ranks_or_drafts(
    weights: tuple[float, ...], keys: dict[str, Any], tmp_path: Path
) -> None:
    """Granite 4.0 H drafts for itself, in trees that are verified beside prompts."""
    folder = tiny("granite_hybrid_dense", tmp_path)
    asks = [Request(0, (5, 6, 7, 8) * 3, 12), Request(1, (9, 5, 6, 4) * 10, 12, Sampling(temperature=0.9, seed=2))]
    draft = {"source": "model", "model": str(folder), "tokens": 3}
    told = serve(topology(folder, len(weights), target={"weights": weights}, draft=draft, **keys), asks)
    assert told.texts() == serve(topology(folder), asks).texts()
    assert told.stats[-1].accepted > 9
