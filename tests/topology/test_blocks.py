"""Layers that are one sublayer each: what a config.json says of them, as it was published and as it is saved now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tpspec.errors import UserError
from tpspec.model.spec import read_spec
from tpspec.topology.blocks import blocks_of
from tpspec.topology.reads import Reads
from tpspec.topology.shape import ModelShape
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
    assert read_spec(folder).blocks == spec.blocks == SAID


def test_heads_with_one_norm_stay_on_one_rank(tmp_path: Path) -> None:
    """Stands against a mean of squares of a part of them."""
    shape = ModelShape.of(tiny("nemotron_h", tmp_path))
    shards = split(shape, (3, 1, 2))
    assert [(len(shard.delta_keys), len(shard.delta_values)) for shard in shards] == [(2, 4), (1, 2), (2, 4)]
    with pytest.raises(UserError, match="6 shards for 5 groups of heads with a state; should be at most 5"):
        split(shape, (1,) * 6)
