"""Tensors are read out of files by name and slice, and a file is opened for many of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tpspec.model import weights
from tpspec.model.weights import MOST_MAPPED, SINGLE, Checkpoint

COUNT, ROWS, COLUMNS = 60, 6, 8
BYTES = 4 * ROWS * COLUMNS


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Of the files that were opened, as often as they were."""
    found: list[Path] = []
    given = weights.open_file
    monkeypatch.setattr(weights, "open_file", lambda path: (found.append(path), given(path))[1])
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, opened: list[Path]) -> Checkpoint:
    tensors = {f"experts.{i}.up.weight": torch.full((ROWS, COLUMNS), i) for i in range(COUNT)}
    save_file({name: tensor.int() for name, tensor in tensors.items()}, tmp_path / SINGLE)
    made = Checkpoint(tmp_path)
    opened.clear()
    return made


def test_many_small_tensors_are_read_of_a_file_that_is_opened_once(checkpoint: Checkpoint, opened: list[Path]) -> None:
    """Stands against a header parsed for every tensor: it names each of them, so that to read 70,000 parts of coded
    experts took 20 minutes."""
    for i in range(COUNT):
        name = f"experts.{i}.up.weight"
        assert (checkpoint.read(name, (ROWS, COLUMNS), rows=range(1, 3), columns=range(2, 5)) == i).all()
        assert checkpoint.under(f"experts.{i}.up") == {"weight"}
    assert len(opened) == 1


def test_pages_do_not_stay_mapped(checkpoint: Checkpoint, opened: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands against a file that stays open while more of it is read than may stay resident, of whole rows where some
    columns are taken."""
    assert BYTES * COUNT < MOST_MAPPED
    monkeypatch.setattr(weights, "MOST_MAPPED", 3 * BYTES)
    for i in range(9):
        checkpoint.read(f"experts.{i}.up.weight", (ROWS, COLUMNS), columns=range(1))
    assert len(opened) == 3


def test_a_module_has_no_parts_of_modules_in_it(checkpoint: Checkpoint) -> None:
    """Stands against a matrix refused for what stands beside it, and a name that begins like another's."""
    assert checkpoint.under("experts.1") == set()
    assert checkpoint.under("experts") == set()
