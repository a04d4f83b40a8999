"""What this machine trains best on. Tried, not assumed."""

from __future__ import annotations

import time

import torch

SIDE, TRIES = 768, 5


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bfloat16_is_faster(where: torch.device) -> bool:
    """By a product of the size that heads are made of: 5 times on a CPU with AVX512-BF16, slower on one without."""
    return _seconds(torch.bfloat16, where) < _seconds(torch.float32, where)


def _seconds(dtype: torch.dtype, where: torch.device) -> float:
    x = torch.ones(SIDE, SIDE, dtype=dtype, device=where)
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        (x @ x).sum().item()
        times.append(time.perf_counter() - began)
    return min(times)
