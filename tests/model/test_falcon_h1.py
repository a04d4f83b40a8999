"""Falcon-H1: layers of which attention and Mamba-2 read the same, and what their config says of products."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tiny
from tpspec.errors import UserError
from tpspec.model.spec import read_spec
from tpspec.published.shape import ModelShape
from tpspec.topology.rounds import reduces
from tpspec.topology.shards import split


def say(folder: Path, **said: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return folder


def test_heads_with_a_state_are_on_any_rank_where_they_have_no_norm(tmp_path: Path) -> None:
    """Stands against groups that stay whole for nothing: of one, as published, there would be no second rank."""
    bare, normed = (ModelShape.of(tiny(kind, tmp_path / kind)) for kind in ("falcon_h1", "falcon_h1_normed"))
    shards = [[(len(shard.delta_keys), len(shard.delta_values)) for shard in split(each, (2, 1, 2))]
              for each in (bare, normed)]  # fmt: skip
    assert shards == [[(1, 4), (2, 2), (1, 4)], [(1, 4), (1, 4), (1, 4)]]
    assert reduces(bare) == {"attention": 3, "mlp": 3}


def test_values_of_a_state_are_as_wide_as_is_said(tmp_path: Path) -> None:
    """mamba_d_ssm may be null, which is another thing than left out."""
    folder = tiny("falcon_h1", tmp_path)
    for said, dim in (({}, 7), ({"mamba_d_ssm": None, "mamba_d_head": None, "mamba_n_heads": 12}, 16)):
        net = ModelShape.of(say(folder, **said)).delta_net
        assert net is not None
        assert (net.value_dim, net.layers, net.alone) == (dim, {0, 1, 2}, frozenset())
    config = json.loads((folder / "config.json").read_text())
    del config["mamba_d_ssm"]
    (folder / "config.json").write_text(json.dumps(config | {"mamba_n_heads": 128, "mamba_d_head": "auto"}))
    left_out = ModelShape.of(folder).delta_net
    assert left_out is not None
    assert left_out.value_dim == 8


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"attention_bias": True}, "attention_bias is True; should be null"),
        ({"projectors_bias": True}, "projectors_bias is True; should be null"),
        ({"attn_layer_indices": [0]}, r"attn_layer_indices is \[0\]; should be null"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp is False; should be True"),
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate is True; should be False"),
        ({"mamba_n_heads": 9}, r"mamba_n_heads is 9; should be a divisor of mamba_d_ssm \(70\)|a multiple of n_groups"),
        ({"ssm_multipliers": [1.0] * 4}, r"ssm_multipliers is \[1.0, 1.0, 1.0, 1.0\]; should be 5 numbers"),
        ({"key_multiplier": -0.5}, "key_multiplier is -0.5; should be a number above 0"),
    ],
)
def test_what_is_not_computed_is_refused(said: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        read_spec(say(tiny("falcon_h1", tmp_path), **said))
