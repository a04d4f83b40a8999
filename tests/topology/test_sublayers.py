"""Which sublayers a draft leaves out, by what a config.json or a topology says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpspec.errors import UserError
from tpspec.topology.sublayers import behind


def of(folder: Path, value: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"early_exit_layer": value}))
    return folder


def test_a_model_is_left_where_the_topology_says_or_it_was_trained_to_be(tmp_path: Path) -> None:
    """And else after a quarter of it."""
    assert min(behind(5, of(tmp_path, 3), 16).mlp) == 5
    assert min(behind(0, of(tmp_path, 3), 16).mlp) == 3
    assert min(behind(0, of(tmp_path, None), 16).mlp) == 4
    assert min(behind(0, None, 16).mlp) == 4


@pytest.mark.parametrize("value", ["3", 2.5, 0, -1, True, [3]], ids=str)
def test_an_exit_that_is_no_layer_is_refused_by_file_and_name(value: Any, tmp_path: Path) -> None:
    """Stands against one that is taken for none given, and against a traceback from a comparison with a text."""
    with pytest.raises(UserError, match=r"config\.json: early_exit_layer .*should be a whole number above 0"):
        behind(0, of(tmp_path, value), 16)


@pytest.mark.parametrize("layer", [-1, 16, 99])
def test_an_exit_behind_the_model_is_refused_with_what_there_is(layer: int) -> None:
    with pytest.raises(UserError, match="should be 1 to 15, of 16 layers"):
        behind(layer, None, 16)
