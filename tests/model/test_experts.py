"""A mixture of experts on a CPU; parity with transformers is tests/parity's, of all kinds of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeTopKRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.flint.modeling_flint import FlintTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from tpspec.cache.store import Kept, KVStore
from tpspec.model.experts import Mixture
from tpspec.model.linear import PlainLinear
from tpspec.model.mlp import GatedMlp
from tpspec.model.router import Router
from tpspec.model.sight import Heads, Shape, Sight
from tpspec.model.torch_steps import TorchSteps
from tpspec.published.experts import Experts, experts_of
from tpspec.published.reads import Reads

CPU = torch.device("cpu")
HIDDEN, CHANNELS = 48, 40
SHAPE = Shape(frozenset({Sight(Heads((0,), 16), None)}), torch.float32, CPU, 1.0, "silu")
STEPS = TorchSteps(SHAPE, [], KVStore({0: Kept(1, 16)}, 16, torch.float32, CPU), None)  # only their gate is called


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


@pytest.mark.parametrize(("groups", "chosen"), [(4, 2), (6, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_experts_are_of_the_groups_that_transformers_chooses(kind: str, groups: int, chosen: int) -> None:
    """Stands against groups compared by another number of their experts, by scores without a bias, or none at all, and
    weights that are parts of what is left."""
    said = {"n_routed_experts": 12, "num_experts_per_tok": 2, "n_group": groups, "topk_group": chosen}
    said |= {
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "topk_method": "group_limited_greedy" if kind == "deepseek_v2" else "noaux_tc",
    }
    config = AutoConfig.for_model(kind, **said, routed_scaling_factor=1.7)
    theirs = (DeepseekV2TopkRouter if kind == "deepseek_v2" else DeepseekV3TopkRouter)(config)
    theirs.weight.data = 3 * noise(12, HIDDEN, seed=1)
    bias_N = None
    if kind == "deepseek_v3":
        bias_N = theirs.e_score_correction_bias = 3 * noise(12, seed=2)
    experts = experts_of(Reads(config.to_dict() | said, "here"), kind)
    assert experts is not None
    x_TD = 3 * noise(64, HIDDEN, seed=3)
    made, (_, *due) = Router(theirs.weight.data, experts, bias_N)(x_TD), theirs(x_TD)
    assert (spread(*made) - spread(*reversed(due))).abs().max() < 1e-6


ROUTERS: list[tuple[str, type[Any], dict[str, str]]] = [
    ("cohere2_moe", Cohere2MoeTopKRouter, {"expert_selection_fn": "softmax"}),
    ("cohere2_moe", Cohere2MoeTopKRouter, {"expert_selection_fn": "sigmoid"}),
    ("flint", FlintTopKRouter, {}),
    ("kolibri1", Kolibri1TopKRouter, {}),
]


@pytest.mark.parametrize("sums_to_one", [True, False])
@pytest.mark.parametrize(("kind", "router", "more"), ROUTERS)
def test_experts_that_logits_choose_have_the_weights_that_transformers_gives_them(
    kind: str, router: type[Any], more: dict[str, str], sums_to_one: bool
) -> None:
    """Stands against a softmax over all experts, sigmoids that are scaled where they should stay, and a bias that is
    added to sigmoids, or counted in the weights."""
    said = {"hidden_size": HIDDEN, "num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": sums_to_one}
    config = AutoConfig.for_model(kind, **said, **more)
    theirs, bias_N = router(config), None
    theirs.weight.data = 3 * noise(12, HIDDEN, seed=1)
    if kind == "kolibri1":
        bias_N = theirs.e_score_correction_bias = 3 * noise(12, seed=2)
    experts = experts_of(Reads(config.to_dict(), "here"), kind)
    assert experts is not None
    x_TD = 3 * noise(64, HIDDEN, seed=3)
    made, (_, *due) = Router(theirs.weight.data, experts, bias_N)(x_TD), theirs(x_TD)
    assert (spread(*made) - spread(*reversed(due))).abs().max() < 1e-6


@pytest.mark.parametrize("noise_of_router", [0.01, 0.2])
def test_experts_that_are_chosen_one_by_one_have_the_weights_that_transformers_gives_them(
    noise_of_router: float,
) -> None:
    """As Phi-3.5-MoE's. Stands against a second expert whose weight is a part with the first's, and logits below 0
    whose margin is taken for another's."""
    said = {"hidden_size": HIDDEN, "num_local_experts": 12, "router_jitter_noise": noise_of_router}
    config = AutoConfig.for_model("phimoe", **said)
    theirs = PhimoeTopKRouter(config).eval()
    theirs.weight.data = noise(12, HIDDEN, seed=1)
    experts = experts_of(Reads(config.to_dict(), "here"), "phimoe")
    assert experts is not None
    x_TD = noise(64, HIDDEN, seed=3)
    with torch.inference_mode():
        made, (_, *due) = Router(theirs.weight.data, experts)(x_TD), theirs(x_TD)
    assert (spread(*made) - spread(*reversed(due))).abs().max() < 1e-6


def spread(chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """[T, N], 0 for experts that are not chosen."""
    return torch.zeros(len(chosen_TK), 12).scatter_(1, chosen_TK, weights_TK)


@pytest.mark.parametrize("on_inputs", [False, True])
def test_a_row_alone_and_among_others_is_the_same_in_whole_mixtures(on_inputs: bool) -> None:
    """Stands against a row's bits that depend on how many others its expert has (deterministic)."""
    experts = [
        GatedMlp(PlainLinear(noise(2 * CHANNELS, HIDDEN, seed=i)), PlainLinear(noise(HIDDEN, CHANNELS, seed=-i)))
        for i in range(5)
    ]
    router = Router(noise(5, HIDDEN, seed=9), Experts(5, 2, sums_to_one=True, on_inputs=on_inputs))
    whole, apart = (Mixture(router, experts, whole=each) for each in (True, False))
    x_TD = noise(16, HIDDEN, seed=10)
    others_TD = torch.cat([x_TD[:1], -x_TD[1:]])
    assert torch.equal(whole(x_TD, STEPS)[0], whole(others_TD, STEPS)[0])
    assert (whole(x_TD, STEPS) - apart(x_TD, STEPS)).abs().max() <= 1e-6
