"""A mixture of experts on a CPU; parity with transformers is tests/parity's, of all kinds of models."""

from __future__ import annotations

import torch

from tpspec.cache.store import KVStore
from tpspec.model.experts import Mixture, Router
from tpspec.model.linear import PlainLinear
from tpspec.model.mlp import GatedMlp
from tpspec.model.steps import Shape, TorchSteps
from tpspec.topology.experts import Experts

CPU = torch.device("cpu")
HIDDEN, CHANNELS = 48, 40
SHAPE = Shape((0,), 16, torch.float32, CPU, frozenset({None}), 1.0, "silu")
STEPS = TorchSteps(SHAPE, [], KVStore(1, 1, 16, 16, torch.float32, CPU), None)  # only their gate is called


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def test_a_row_alone_and_among_others_is_the_same_in_whole_mixtures() -> None:
    """Stands against a row's bits that depend on how many others its expert has (deterministic)."""
    experts = [
        GatedMlp(PlainLinear(noise(2 * CHANNELS, HIDDEN, seed=i)), PlainLinear(noise(HIDDEN, CHANNELS, seed=-i)))
        for i in range(5)
    ]
    router = Router(noise(5, HIDDEN, seed=9), Experts(5, 2, sums_to_one=True))
    whole, apart = (Mixture(router, experts, whole=each) for each in (True, False))
    x_TD = noise(16, HIDDEN, seed=10)
    others_TD = torch.cat([x_TD[:1], -x_TD[1:]])
    assert torch.equal(whole(x_TD, STEPS)[0], whole(others_TD, STEPS)[0])
    assert (whole(x_TD, STEPS) - apart(x_TD, STEPS)).abs().max() <= 1e-6
