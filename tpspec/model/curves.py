"""Functions of each number alone, whose bits do not depend on where in a tensor the number stands.

torch computes sigmoid, silu, gelu and softplus on a CPU with vectors, but for the last numbers of a tensor, which have
other bits: what a row becomes would depend on the rows beside it. Of exp and log1p that is not so. In float32, rounded
once, as torch does. On a card a number's place is nothing to torch, and one launch is all that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

# gelu as tanh approximates it; the others: see rows.inc.
Curve = Literal["silu", "gelu", "clamped", "gelu_alone", "relu2", "xielu"]
ALONE: tuple[Curve, ...] = ("gelu_alone", "relu2", "xielu")  # of MLPs without a gate: of what comes up

CUBIC, TWICE = 0.044715, 1.5957691216057308  # of gelu as tanh approximates it; 2 sqrt(2 / pi)


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x) if x.is_cuda else _sigmoid(x.float()).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    numbers = x.float()
    if x.is_cuda:
        return F.softplus(numbers).to(x.dtype)
    return (numbers.clamp(min=0) + numbers.abs().neg_().exp_().log1p_()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    if x.is_cuda:
        return F.silu(x)
    numbers = x.float()
    return (numbers * _sigmoid(numbers)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """As tanh approximates it."""
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")
    numbers = x.float()
    return (numbers * _sigmoid((numbers + CUBIC * numbers**3).mul_(TWICE))).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()
