"""A decoder without some sublayers computes what the model would whose weights there are zero."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tpspec.comm.communicator import OneRank, Purpose
from tpspec.model.batch import Span
from tpspec.model.loader import load_whole
from tpspec.topology.shape import shape_of
from tpspec.topology.sublayers import NOTHING, Sublayers, behind

LAYERS, ROWS = 4, 9
EXIT = Sublayers(frozenset({2, 3}), frozenset({2, 3}))
SKIPS = Sublayers(frozenset({0, 2}), frozenset({1, 2}))


class Counting(OneRank):
    def __init__(self) -> None:
        self.purposes: list[Purpose] = []

    def all_reduce(self, x: torch.Tensor, purpose: Purpose) -> torch.Tensor:
        self.purposes.append(purpose)
        return x


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen2", tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def logits(folder: Path, left_out: Sublayers, comm: OneRank) -> torch.Tensor:
    decoder = load_whole(folder, shape_of(str(folder)), torch.float32, torch.device("cpu"), 32)
    span = Span(0, 0, tuple(range(5, 5 + ROWS)), ((0, ROWS),), ROWS)
    return decoder.thinned(left_out, comm).forward([span])


def without(target: Path, folder: Path, left_out: Sublayers) -> Path:
    """A copy of the checkpoint whose outputs of these sublayers are zero."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in left_out.attention]
    names += [f"model.layers.{layer}.mlp.down_proj.weight" for layer in left_out.mlp]
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("left_out", [NOTHING, EXIT, SKIPS], ids=["nothing", "exit", "skips"])
def test_left_out_is_as_if_it_added_nothing(left_out: Sublayers, target: Path, tmp_path: Path) -> None:
    """Against a sum that is lost where a sublayer is passed over, and a final norm of the wrong rows."""
    expected = logits(without(target, tmp_path / "zeroed", left_out), NOTHING, OneRank())
    comm = Counting()
    assert torch.allclose(logits(target, left_out, comm), expected, atol=1e-5)
    assert len(comm.purposes) == 2 * LAYERS - len(left_out)


def test_an_exit_is_what_the_config_says_or_a_quarter_of_the_layers(target: Path) -> None:
    assert behind(2, target, LAYERS) == EXIT
    assert len(behind(0, target, LAYERS)) == 2 * (LAYERS - 1)
    assert len(behind(0, None, 32)) == 48
