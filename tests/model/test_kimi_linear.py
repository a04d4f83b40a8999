"""Kimi Linear: a config with keys of its own, and tensors as they were published and as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import BASE, KINDS, tiny
from tests.model.test_delta_net import IDS, loaded, logits_of
from tpspec.errors import UserError
from tpspec.model.spec import read_spec
from tpspec.published.multimodal import text_config
from tpspec.published.shape import ModelShape

FILE = "model.safetensors"
SECTION: dict[str, Any] = KINDS["kimi_linear"]["linear_attn_config"]
# As it was published, but for sizes.
PUBLISHED = BASE | KINDS["kimi_linear"] | {"n_group": None, "n_shared_experts": None, "num_experts_per_tok": None}
PUBLISHED |= {"num_expert_group": 4, "num_shared_experts": 2, "num_experts_per_token": 3, "moe_renormalize": True}
PUBLISHED |= {"model_max_length": 512, "rope_scaling": None, "max_position_embeddings": None}
NOW = PUBLISHED | {
    "linear_attn_config": None,
    "first_k_dense_replace": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 10,
    "linear_num_heads": 6,
    "linear_conv_kernel_dim": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}


def shape_of(config: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(text_config(config), "here")


def test_published_keys_mean_what_transformers_own_do(tmp_path: Path) -> None:
    """Stands against lists of layers from 0 on, and a number that is left at what it usually is."""
    shape = shape_of(PUBLISHED)
    assert shape_of(NOW) == shape == ModelShape.of(tiny("kimi_linear", tmp_path))
    assert shape.delta_net is not None
    assert shape.delta_net.layers == {0, 2}
    assert (shape.delta_net.key_heads, shape.delta_net.key_dim, shape.delta_net.kernel) == (6, 10, 3)
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.chosen, shape.experts.groups, shape.experts.shared) == (8, 3, 4, 80)
    assert (shape.experts.first_layer, shape.experts.scale, shape.max_positions) == (1, 2.446, 512)
    for config in (PUBLISHED, NOW):
        said = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert read_spec(tmp_path).shape.delta_net == shape.delta_net
        assert read_spec(tmp_path).shape.experts == shape.experts


def test_layers_that_nobody_names_are_those_of_transformers(tmp_path: Path) -> None:
    config = {key: value for key, value in NOW.items() if value is not None and not key.endswith("layer_types")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    assert read_spec(tmp_path).shape.stateful == {*range(9)} - {4, 8}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; should be True"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is True; should be null"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'; should be sigmoid"),
        ({"linear_attn_config": SECTION | {"gate_lower_bound": -5.0}}, "linear_attn_config.gate_lower_bound is -5.0"),
        (
            {"linear_attn_config": SECTION | {"kda_layers": [0, 2]}},
            r"linear_attn_config.kda_layers is \[0, 2\]; should",
        ),
        ({"linear_attn_config": SECTION | {"head_dim": 1}}, "linear_head_dim is 1; should be a whole number above 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_what_is_not_computed_is_refused(said: dict[str, Any], why: str) -> None:
    """Stands against Kimi K3, whose type this is, too."""
    with pytest.raises(UserError, match=f"here: {why}"):
        shape_of(PUBLISHED | said)


def test_a_checkpoint_as_it_was_published_is_the_same_model(tmp_path: Path) -> None:
    """Whose first layer has an MLP by that name; transformers writes it as a mixture without experts."""
    folder = tiny("kimi_linear", tmp_path)
    as_saved, held = logits_of(loaded(folder), IDS), load_file(folder / FILE)
    for part in ("gate", "up", "down"):
        name = f"{part}_proj.weight"
        held[f"model.layers.0.mlp.{name}"] = held.pop(f"model.layers.0.block_sparse_moe.{name}")
    held["model.layers.2.self_attn.A_log"] = held["model.layers.2.self_attn.A_log"].flatten()
    save_file(held, folder / "new", {"format": "pt"})
    (folder / "new").replace(folder / FILE)
    assert torch.equal(logits_of(loaded(folder), IDS), as_saved)
