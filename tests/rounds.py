"""Rounds that kernels of a card are tried with."""

from __future__ import annotations

import torch

from tpspec.model.batch import Carried, Span
from tpspec.model.decoder import Decoder


def tree_and_chain(decoder: Decoder, seed: int) -> torch.Tensor:
    """A tree beside a chain, behind a prompt of more rows than are recorded and of more than one block of keys. Logits,
    float32. The decoder has 512 slots, and two states."""
    ids = tuple(torch.randint(3, 263, (90,), generator=torch.Generator().manual_seed(seed)).tolist())
    text = Span(0, 0, ids[:80], ((0, 64), (128, 16)), 0, carried=Carried(0, (), 80))
    decoder.forward([text, Span(1, 0, ids[:3], ((256, 3),), 0, carried=Carried(1, (), 3))])
    parents = (-1, 0, 0, 1, 1, 2)
    tree = Span(0, 80, ids[80:86], ((0, 64), (128, 22)), 6, parents, carried=Carried(0, (0,), 1))
    chain = Span(1, 3, ids[:3], ((256, 6),), 3, carried=Carried(1, (0,), 1))
    return decoder.forward([tree, chain]).float()
