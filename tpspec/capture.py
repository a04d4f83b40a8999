"""How work on a card is recorded into a CUDA graph. Knows no other room."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """What is launched inside goes into the graph; other threads may use the card meanwhile.

    Garbage is not collected: that could free what is on the card, which may not be done in the middle of a recording.
    options: of torch.cuda.graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    finally:
        if was_enabled:
            gc.enable()
