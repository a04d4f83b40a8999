"""A model's output head as plain numbers, whatever it is stored as: what draft heads and training take over from it.

Reads, computes nothing. How a model's own head is held and computed with: matrices.py.

Shapes: D hidden, V ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpspec.model.embedding import head_of
from tpspec.model.stored import StoredMatrices
from tpspec.model.weights import Checkpoint
from tpspec.published.places import rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tpspec.published.shape import ModelShape


def head_numbers(folder: Path, shape: ModelShape) -> tuple[Tensor, Tensor | None]:
    """[V, D], backed by the file where it stands there so, else in float32; and its bias, [V], or None."""
    checkpoint, sizes = Checkpoint(folder), (shape.vocab, shape.hidden)
    name = head_of(checkpoint, sizes, tied=shape.tied)
    bias_V = checkpoint.mapped(f"{name}.bias", sizes[:1]) if shape.head_bias else None
    scheme = None if shape.stored is None else shape.stored.scheme_of(name)
    if scheme is None:
        return checkpoint.mapped(f"{name}.weight", sizes), bias_V
    place = rows_of(name, range(shape.vocab), *sizes)
    return StoredMatrices(checkpoint).plain(scheme, place, torch.float32), bias_V
