"""Layers that are one sublayer each: what a config.json says of them, as it was published and as it is saved now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tpspec.errors import UserError
from tpspec.model.spec import read_spec
from tpspec.published.blocks import blocks_of
from tpspec.published.reads import Reads
from tpspec.published.shape import ModelShape
from tpspec.topology.shards import split

SAID = ("linear_attention", "moe", "full_attention", "linear_attention", "mlp")


def blocks(**said: Any) -> tuple[str, ...]:
    return blocks_of(Reads(said, "here"), "nemotron_h")


def test_letters_and_older_words_mean_what_lists_do() -> None:
    assert blocks(hybrid_override_pattern="ME*M-") == SAID
    assert blocks(layers_block_type=["mamba", "moe", "attention", "mamba", "mlp"]) == SAID
    assert blocks(layers_block_type=list(SAID), hybrid_override_pattern="M*") == SAID  # as transformers takes both
    assert blocks_of(Reads({"layer_types": ["full_attention"]}, "here"), "llama") == ()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"hybrid_override_pattern": "MX*"}, r"hybrid_override_pattern is 'MX\*'; should be letters of M\*-E"),
        ({"hybrid_override_pattern": "MEME"}, "and a . among them"),
        ({"layers_block_type": ["conv", "full_attention"]}, "layers_block_type is .*; should be one of"),
        ({"layers_block_type": ["linear_attention"]}, "full_attention for one"),
    ],
)
def test_what_is_no_layer_is_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"here: .*{why}"):
        blocks(**said)


def test_a_checkpoint_as_it_was_published_is_the_same_model(tmp_path: Path) -> None:
    """Stands against a number of layers that nobody says, and infinity, for which JSON has no word."""
    folder = tiny("nemotron_h", tmp_path)
    shape, spec = ModelShape.of(folder), read_spec(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "num_hidden_layers" not in config
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": "ME*M-", "num_hidden_layers": 5, "time_step_limit": [0.0, float("inf")]}
    (folder / "config.json").write_text(json.dumps(config))
    assert ModelShape.of(folder) == shape
    assert read_spec(folder).shape.blocks == spec.shape.blocks == SAID


def test_heads_with_one_norm_stay_on_one_rank(tmp_path: Path) -> None:
    """Stands against a mean of squares of a part of them."""
    shape = ModelShape.of(tiny("nemotron_h", tmp_path))
    shards = split(shape, (3, 1, 2))
    assert [(len(shard.delta_keys), len(shard.delta_values)) for shard in shards] == [(2, 4), (1, 2), (2, 4)]
    with pytest.raises(UserError, match="6 shards for 5 groups of heads with a state; should be at most 5"):
        split(shape, (1,) * 6)


def test_heads_that_are_summed_before_they_are_normed_are_on_any_rank(tmp_path: Path) -> None:
    """Stands against a Mamba-2 of one group that has no second rank; of several, groups stay whole."""
    one, three = (ModelShape.of(tiny(kind, tmp_path / kind)) for kind in ("granite_hybrid", "granite_hybrid_groups"))
    shards = [[(len(shard.delta_keys), len(shard.delta_values)) for shard in split(each, (3, 1, 2))]
              for each in (one, three)]  # fmt: skip
    assert shards == [[(1, 6), (1, 2), (1, 4)], [(1, 4), (1, 4), (1, 4)]]


def test_granites_layers_by_their_older_words_are_the_same_model(tmp_path: Path) -> None:
    """As they were published, whose layers are attention or Mamba-2, and an MLP besides."""
    folder = tiny("granite_hybrid", tmp_path)
    shape = ModelShape.of(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["time_step_limit"], config["mamba_d_head"]
    config |= {"layer_types": ["mamba", "attention", "mamba"], "rope_theta": 10000, "rope_scaling": None}
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    assert ModelShape.of(folder) == shape
    assert read_spec(folder).shape == shape
    assert read_spec(folder).ropes == ()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types is .*; should be full_attention for one layer"),
        ({"layer_types": None}, "layer_types is missing; should be linear_attention or full_attention for each of 3"),
        ({"layer_types": ["mamba", "mlp", "attention"]}, "should be linear_attention or full_attention for each of 3"),
        ({"mamba_d_head": 8}, "mamba_d_head is 8; should be 16, or mamba_expand another"),
        ({"mamba_n_heads": 7}, r"mamba_n_heads is 7; should be a divisor of mamba_expand times hidden_size \(192\)"),
        ({"mamba_n_groups": 5}, r"mamba_n_heads is 12; should be a multiple of n_groups \(5\)"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True; should be null: it is not supported"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit is .*others are not supported"),
        ({"num_local_experts": -1}, "num_local_experts is -1; should be a whole number above -1"),
    ],
)
def test_what_granites_layers_are_not_is_refused(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = tiny("granite_hybrid", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(UserError, match=why):
        ModelShape.of(folder)
