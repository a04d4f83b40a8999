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
from tpspec.published.shape import shape_of
from tpspec.topology.rounds import collectives_per_draft
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


# Kinds, their layers, and all-reduces of attention, of the MLP, and of both together.
KINDS = {"qwen2": (1, 1, 2), "olmo3": (2, 1, 3), "cohere2": (1, 1, 1)}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    return {
        kind: tiny(
            kind, tmp_path_factory.mktemp(kind), num_hidden_layers=LAYERS, **({} if kind == "qwen2" else windows)
        )
        for kind in KINDS
    }


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left_out", [NOTHING, EXIT, SKIPS], ids=["nothing", "exit", "skips"])
def test_left_out_is_as_if_it_added_nothing(
    left_out: Sublayers, kind: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    """Against a sum that is lost where a sublayer is passed over, and a final norm of the wrong rows; and against plans
    that count other collectives than there are."""
    target, (attention, mlp, both) = targets[kind], KINDS[kind]
    expected = logits(without(target, tmp_path / "zeroed", left_out), NOTHING, OneRank())
    comm = Counting()
    assert torch.allclose(logits(target, left_out, comm), expected, atol=1e-5)
    layers = frozenset(range(LAYERS))
    mixing, feeding = layers - left_out.attention, layers - left_out.mlp
    each = both * len(mixing & feeding) + attention * len(mixing - feeding) + mlp * len(feeding - mixing)
    assert len(comm.purposes) == each == collectives_per_draft(shape_of(str(target)), 2, left_out) - 1


def test_an_exit_is_what_the_config_says_or_a_quarter_of_the_layers(targets: dict[str, Path]) -> None:
    target = targets["qwen2"]
    assert behind(2, target, LAYERS) == EXIT
    assert len(behind(0, target, LAYERS)) == 2 * (LAYERS - 1)
    assert len(behind(0, None, 32)) == 48
